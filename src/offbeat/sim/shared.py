"""Weights that others may average with at any moment, in virtual time: a driver of `offbeat.rounds.shared`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import simpy

from offbeat.method.replica import Replica
from offbeat.rounds.seat import Event
from offbeat.rounds.shared import SharedVec
from offbeat.runs.trace import Round, Trace
from offbeat.sim.exchanges import Pending
from offbeat.sim.network import Network
from offbeat.tensors.vector import Vec
from offbeat.tensors.wire import message_bytes


class Shared:
    """The shared weights of all workers."""

    def __init__(
        self,
        env: simpy.Environment,
        network: Network,
        trace: Trace,
        arrived: Callable[[Pending], None],
        logs: Sequence[list[Event]] | None = None,
    ) -> None:
        self._env, self._network, self._trace, self._arrived, self._logs = env, network, trace, arrived, logs
        self._shared: dict[int, SharedVec] = {}
        self._noted: dict[int, dict[int, int]] = {}  # the staleness noted for the step under way, if it has met
        self._waiting: dict[int, Callable[[Vec], None]] = {}
        self._dead: set[int] = set()
        self._returning: set[int] = set()  # whose weights are there already
        self._size = 0
        self._met = 0
        self.bytes_sent = 0

    @property
    def is_open(self) -> bool:
        return bool(self._shared)

    def share(self, me: Replica, x: Vec) -> None:
        if me.rank in self._returning:
            self._returning.discard(me.rank)
            return
        log = None if self._logs is None else self._logs[me.rank]
        self._shared[me.rank] = SharedVec(x, log)
        self._size = me.size

    def add(self, rank: int, delta: Vec, answer: Callable[[Vec], None]) -> None:
        mine = self._shared[rank]
        if rank in self._noted:  # others may have come in since the meeting; its own does not count
            self._noted.pop(rank)[rank] = mine.changed - 1
        answer(mine.add(delta))

    def meet(self, i: int, j: int) -> Pending:
        """Begin a meeting; the answer arrives when i's weights hold their half."""
        pending = Pending(i, self._env.now)
        if i == j or j in self._dead:
            pending.arrived = True
            return pending
        mine = self._shared[i]
        number, sent = mine.depart()
        nbytes = message_bytes(sent, None)
        self.bytes_sent += 2 * nbytes

        def at_the_peer(_: object) -> None:
            half = self._shared[j].visited(i, sent)
            back = self._env.timeout(self._network.send_s(j, i, nbytes))
            back.callbacks.append(lambda _: self._home(pending, mine, j, number, half))

        self._env.timeout(self._network.send_s(i, j, nbytes)).callbacks.append(at_the_peer)
        return pending

    def _home(self, pending: Pending, mine: SharedVec, j: int, number: int, half: Vec) -> None:
        i, stale = pending.rank, mine.home(number, half)
        pending.arrived = True
        if mine is not self._shared[i]:  # it has died since, and another is there in its place
            return
        if self._trace.keep_rounds:
            waited = {i: self._env.now - pending.asked_s}
            staleness = self._noted[i] = {i: stale, j: self._shared[j].changed}
            self._trace.rounds.append(Round(self._met, i, (i,), staleness, waited, self._env.now))
        self._met += 1
        self._arrived(pending)

    def retire(self, rank: int, answer: Callable[[Vec], None]) -> None:
        """Answered when all have retired: then nothing is in flight, since each has finished its own meetings."""
        self._waiting[rank] = answer
        self._let_go_if_all_have()

    def died(self, rank: int) -> None:
        """Its weights are nobody's from now on; what others have of them they keep."""
        self._dead.add(rank)
        self._returning.discard(rank)
        self._waiting.pop(rank, None)
        self._let_go_if_all_have()

    def settles(self, rank: int, go: Callable[[], None]) -> bool:
        return True

    def can_revive(self, rank: int, twin_of: int) -> bool:
        return twin_of not in self._waiting

    def revive(self, rank: int, twin_of: int, ahead: int) -> None:
        """Its weights are those of the other one by now."""
        self._dead.discard(rank)
        self._noted.pop(rank, None)
        if self.is_open:
            self._shared[rank] = SharedVec(self._shared[twin_of].weights)
            self._returning.add(rank)

    def _let_go_if_all_have(self) -> None:
        if self._waiting and len(self._waiting.keys() | self._dead) == self._size:
            waiting, self._waiting = self._waiting, {}
            for r, go in sorted(waiting.items()):
                self._env.timeout(0).callbacks.append(partial(self._let_go, r, go))

    def _let_go(self, rank: int, go: Callable[[Vec], None], _: object) -> None:
        go(self._shared[rank].now())

    def who_waits(self) -> dict[int, str]:
        """Nobody but those who have retired, which their worker says itself."""
        return {}
