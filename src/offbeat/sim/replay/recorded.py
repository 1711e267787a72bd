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
    """The lists of all workers. ``equalise`` makes all replicas equal."""

    def __init__(self, told: Sequence[Told], equalise: Callable[[], None]) -> None:
        self._told, self._equalise = told, equalise
        self._averages = Averages([own.averages for own in told], len(told), self._make_equal)
        self._channel: ReplayedChannel | None = None
        self._shared: ReplayedShared | None = None
        self._spent = [deque(own.spent) for own in told]

    def channel(
        self, channel: Channel, env: simpy.Environment, network: Network, trace: Trace, nodes: Nodes, seed: int
    ) -> ReplayedChannel:
        events = [own.events for own in self._told]
        self._channel = ReplayedChannel(channel, env, network, trace, nodes, events, self._averages.stands)
        return self._channel

    def shared(
        self, env: simpy.Environment, network: Network, trace: Trace, arrived: Callable[[Pending], None]
    ) -> ReplayedShared:
        events = [own.events for own in self._told]
        self._shared = ReplayedShared(env, network, arrived, events, self._averages.stands)
        return self._shared

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
        return [place for place in (self._channel, shared) if place is not None]

    def stands(self, rank: int, step: int, go_on: Callable[[], None]) -> bool:
        if not self._averages.is_due(rank, step):
            return False
        self._averages.park(rank, go_on)
        for place in self._places:
            place.stand(rank)
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
