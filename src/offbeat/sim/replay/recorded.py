"""A record decides the order of things, where else the clock does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import simpy

from offbeat.method.effects import Channel
from offbeat.runs.order import Told
from offbeat.runs.trace import Trace
from offbeat.sim.exchanges import Pending
from offbeat.sim.network import Network
from offbeat.sim.replay.averages import Averages
from offbeat.sim.replay.batches import ReplayedStreams
from offbeat.sim.replay.channel import ReplayedChannel
from offbeat.sim.replay.mismatch import Mismatch
from offbeat.sim.replay.weights import ReplayedShared
from offbeat.sim.workers import Work
from offbeat.topology.hierarchy import Nodes


class Recorded:
    """The lists of all workers. ``equalise`` makes all replicas equal; ``homes`` are the workers' hosts, where they are
    known."""

    def __init__(self, told: Sequence[Told], equalise: Callable[[], None], homes: Sequence[int] = ()) -> None:
        self._told, self._equalise, self.homes = told, equalise, homes
        self._averages = Averages([own.averages for own in told], len(told), self._make_equal)
        self._channels: list[ReplayedChannel] = []
        self._comes = [set[int]() for _ in told]  # of each worker, the places at which it is to stand
        self._stands = [set[int]() for _ in told]  # and those at which it does
        self._shared: ReplayedShared | None = None
        self._spent = [deque(own.spent) for own in told]

    def died(self, rank: int) -> None:
        raise AssertionError("a run in which workers die is not recorded")

    def settles(self, rank: int, go: Callable[[], None]) -> bool:
        return True

    def can_revive(self, rank: int, twin_of: int) -> bool:
        return False

    def revive(self, rank: int, twin_of: int, ahead: int) -> None:
        raise AssertionError("a run in which workers die is not recorded")

    def channel(
        self, channel: Channel, env: simpy.Environment, network: Network, trace: Trace, nodes: Nodes, seed: int
    ) -> ReplayedChannel:
        events = [own.events_of(channel.name, channel.beside) for own in self._told]
        homes = [self.homes[nodes.leader(node)] for node in range(nodes.count)] if self.homes else []
        made = ReplayedChannel(channel, env, network, trace, nodes, events, lambda rank: self._stood(rank, made), homes)
        self._channels.append(made)
        return made

    def shared(
        self, env: simpy.Environment, network: Network, trace: Trace, arrived: Callable[[Pending], None]
    ) -> ReplayedShared:
        events = [own.events for own in self._told]
        made = ReplayedShared(env, network, arrived, events, lambda rank: self._stood(rank, made))
        self._shared = made
        return made

    def streams(self, env: simpy.Environment, network: Network, work: Work, trace: Trace, size: int) -> ReplayedStreams:
        return ReplayedStreams(env, work, [own.parts for own in self._told])

    def spent(self, rank: int, seconds: float) -> float:
        if not self._spent[rank]:
            raise Mismatch(f"the record cannot be followed: it says no more of how long rank {rank}'s steps took")
        return self._spent[rank].popleft()

    # Averages of all in the middle of the run.

    @property
    def _places(self) -> list[ReplayedChannel | ReplayedShared]:
        """Where workers stand in the order of their lists."""
        shared = self._shared if self._shared is not None and self._shared.is_open else None
        return [*self._channels, *([] if shared is None else [shared])]

    def _stood(self, rank: int, where: ReplayedChannel | ReplayedShared) -> None:
        """A worker stands at one of its places, if it rests there as its list says; then it comes to the others, too.
        When it stands at all of them, it is there."""
        places = self._places
        self._comes[rank].add(places.index(where))
        self._stands[rank].add(places.index(where))
        self._come(rank)
        if len(self._stands[rank]) == len(places):
            self._comes[rank], self._stands[rank] = set(), set()
            self._averages.stands(rank)

    def _come(self, rank: int) -> None:
        """To all its places, each once: it may stand at the last of them, and all be over, before this is."""
        new = [(number, place) for number, place in enumerate(self._places) if number not in self._comes[rank]]
        self._comes[rank].update(number for number, _ in new)
        for _, place in new:
            place.stand(rank)

    def stands(self, rank: int, step: int, go_on: Callable[[], None]) -> bool:
        if not self._averages.is_due(rank, step):
            return False
        self._averages.park(rank, go_on)
        self._come(rank)
        if not self._places:
            self._averages.stands(rank)
        return True

    def idle(self, ranks: set[int]) -> None:
        self._averages.idle(ranks if not self._places else set())

    def _make_equal(self) -> None:
        self._equalise()
        for place in self._places:
            for rank in range(len(self._told)):
                place.adopt(rank)
