"""What decides the order of things in a simulated world: the clock. (Or a record: `offbeat.sim.replay`.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import simpy

from offbeat.method.effects import Batch, Channel, Done
from offbeat.method.replica import Replica
from offbeat.rounds.seat import Got
from offbeat.runs.order import Told
from offbeat.runs.trace import Trace
from offbeat.sim.channels import SimulatedChannel
from offbeat.sim.exchanges import Pending
from offbeat.sim.network import Network
from offbeat.sim.shared import Shared
from offbeat.sim.streams import Streams
from offbeat.sim.workers import Work
from offbeat.tensors.vector import Vec
from offbeat.topology.hierarchy import Nodes

M = TypeVar("M", bound="SimulatedChannel | Shared | Streams")


class ChannelOfAll(Protocol):
    """One channel, as all workers see it."""

    bytes_sent: int
    nodes: Nodes

    def open(self, me: Replica, channel: Channel, x: Vec | None) -> None: ...
    def offer(self, rank: int, x: Vec, step: int, answer: Callable[[list[Got]], None]) -> None: ...
    def rest(self, rank: int, x: Vec | None, answer: Callable[[Got | None], None]) -> None: ...
    def through(self, rank: int, step: int, answer: Callable[[bool], None]) -> None: ...

    def finished(self, rank: int) -> None: ...
    def who_waits(self) -> dict[int, str]: ...
    @property
    def parts(self) -> list[object]: ...
    @property
    def lost(self) -> list[tuple[int, int]]: ...


class SharedByAll(Protocol):
    """The shared weights of all workers."""

    bytes_sent: int

    def share(self, me: Replica, x: Vec) -> None: ...
    def add(self, rank: int, delta: Vec, answer: Callable[[Vec], None]) -> None: ...
    def meet(self, i: int, j: int) -> Pending: ...
    def retire(self, rank: int, answer: Callable[[Vec], None]) -> None: ...
    def who_waits(self) -> dict[int, str]: ...


class StreamsOfAll(Protocol):
    """The micro-batches of all workers."""

    def begin(self, rank: int, r: int, effect: Batch, answer: Callable[[Done], None]) -> None: ...


class Decides(Protocol):
    """Makes the parts of a world in which order is a matter of time. ``homes``: the hosts of all workers, where they
    are known."""

    homes: Sequence[int]

    def channel(
        self, channel: Channel, env: simpy.Environment, network: Network, trace: Trace, nodes: Nodes, seed: int
    ) -> ChannelOfAll: ...

    def shared(
        self, env: simpy.Environment, network: Network, trace: Trace, arrived: Callable[[Pending], None]
    ) -> SharedByAll: ...

    def streams(
        self, env: simpy.Environment, network: Network, work: Work, trace: Trace, size: int
    ) -> StreamsOfAll: ...

    def stands(self, rank: int, step: int, go_on: Callable[[], None]) -> bool:
        """Whether a worker with data stands before this step, for an average of all; then ``go_on`` comes later."""
        ...

    def idle(self, ranks: set[int]) -> None:
        """These workers wait without data."""
        ...

    def spent(self, rank: int, seconds: float) -> float:
        """What a worker is told of its own time; ``seconds`` by the clock."""
        ...

    def died(self, rank: int) -> None:
        """A worker is dead, and the others go on."""
        ...

    def settles(self, rank: int, go: Callable[[], None]) -> bool:
        """Whether nothing is under way with this worker, which is between two steps; else ``go`` is called when that
        may be so.
        """
        ...

    def can_revive(self, rank: int, twin_of: int) -> bool:
        """Whether a dead one can be a worker again now, as the twin of another one that is between two steps."""
        ...

    def revive(self, rank: int, twin_of: int, ahead: int) -> None:
        """It is one. ``ahead``: so many more batches it has begun than the other one."""
        ...


class Clock:
    """Virtual time decides; ``told`` is where the order that comes of it is written down, if it is to be."""

    homes: Sequence[int] = ()

    def __init__(self, told: Sequence[Told] | None = None) -> None:
        self._told, self._made = told, list[SimulatedChannel | Shared | Streams]()
        self._events = [own.events for own in told] if told is not None else None
        self._parts = [own.parts for own in told] if told is not None else None
        self._spent = [own.spent for own in told] if told is not None else None

    def channel(
        self, channel: Channel, env: simpy.Environment, network: Network, trace: Trace, nodes: Nodes, seed: int
    ) -> SimulatedChannel:
        told, name, beside = self._told, channel.name, channel.beside
        logs = None if told is None else [own.events_of(name, beside) for own in told]
        return self._one_more(SimulatedChannel(channel, env, network, trace, nodes, seed, logs))

    def shared(
        self, env: simpy.Environment, network: Network, trace: Trace, arrived: Callable[[Pending], None]
    ) -> Shared:
        return self._one_more(Shared(env, network, trace, arrived, self._events))

    def streams(self, env: simpy.Environment, network: Network, work: Work, trace: Trace, size: int) -> Streams:
        return self._one_more(Streams(env, network, work, trace, size, self._parts))

    def _one_more(self, made: M) -> M:
        self._made.append(made)
        return made

    def died(self, rank: int) -> None:
        for part in self._made:
            part.died(rank)

    def settles(self, rank: int, go: Callable[[], None]) -> bool:
        return all(part.settles(rank, go) for part in self._made)

    def can_revive(self, rank: int, twin_of: int) -> bool:
        return all(part.can_revive(rank, twin_of) for part in self._made)

    def revive(self, rank: int, twin_of: int, ahead: int) -> None:
        for part in self._made:
            part.revive(rank, twin_of, ahead)

    def stands(self, rank: int, step: int, go_on: Callable[[], None]) -> bool:
        return False

    def idle(self, ranks: set[int]) -> None:
        pass

    def spent(self, rank: int, seconds: float) -> float:
        if self._spent is not None:
            self._spent[rank].append(seconds)
        return seconds
