"""Weights that others may average with at any moment, in virtual time.

A meeting of i with j: i's weights travel to j; j's clerk takes half the difference, s_i − s_j, into j's weights and
sends it back; i takes the other half out of its own. What either side adds in the meantime stays: the sum of all shared
weights and of the halves in flight changes only by what workers add.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import simpy

from offbeat.method.replica import Replica
from offbeat.runs.trace import Round, Trace
from offbeat.sim.exchanges import Pending
from offbeat.sim.network import Network
from offbeat.tensors.sums import wire_bytes
from offbeat.tensors.vector import Vec


class Shared:
    """The shared weights of all workers."""

    def __init__(
        self, env: simpy.Environment, network: Network, trace: Trace, arrived: Callable[[Pending], None]
    ) -> None:
        self._env, self._network, self._trace, self._arrived = env, network, trace, arrived
        self._y: dict[int, Vec] = {}
        self._changed: dict[int, int] = {}  # how often others' weights came in since the last step began
        self._noted: dict[int, dict[int, int]] = {}  # the staleness noted for the step under way, if it has met
        self._retired: dict[int, Callable[[Vec], None]] = {}
        self._size = 0
        self._met = 0
        self.bytes_sent = 0

    def share(self, me: Replica, x: Vec) -> None:
        self._y[me.rank], self._changed[me.rank], self._size = x.clone(), 0, me.size

    def add(self, rank: int, delta: Vec) -> Vec:
        if rank in self._noted:  # others may have come in since the meeting; its own does not count
            self._noted.pop(rank)[rank] = self._changed[rank] - 1
        self._changed[rank] = 0
        return self._y[rank].add_(delta)

    def meet(self, i: int, j: int) -> Pending:
        """Begin a meeting; the answer arrives when i's weights hold their half."""
        pending = Pending(i, self._env.now)
        if i == j:
            pending.arrived = True
            return pending
        sent, nbytes = self._y[i].clone(), wire_bytes(self._y[i], None)
        self.bytes_sent += 2 * nbytes

        def at_the_peer(_: object) -> None:
            half = (sent - self._y[j]) * 0.5
            self._y[j].add_(half)
            self._changed[j] += 1
            back = self._env.timeout(self._network.send_s(j, i, nbytes))
            back.callbacks.append(lambda _: self._home(pending, i, j, half))

        self._env.timeout(self._network.send_s(i, j, nbytes)).callbacks.append(at_the_peer)
        return pending

    def _home(self, pending: Pending, i: int, j: int, half: Vec) -> None:
        self._y[i].add_(half, alpha=-1.0)
        pending.arrived = True
        if self._trace.keep_rounds:
            waited = {i: self._env.now - pending.asked_s}
            staleness = self._noted[i] = {i: self._changed[i], j: self._changed[j]}
            self._trace.rounds.append(Round(self._met, i, (i,), staleness, waited, self._env.now))
        self._changed[i] += 1
        self._met += 1
        self._arrived(pending)

    def retire(self, rank: int, answer: Callable[[Vec], None]) -> None:
        """Answered when all have retired: then nothing is in flight, since each has finished its own meetings."""
        self._retired[rank] = answer
        if len(self._retired) == self._size:
            for r, go in sorted(self._retired.items()):
                self._env.timeout(0).callbacks.append(partial(self._let_go, r, go))

    def _let_go(self, rank: int, go: Callable[[Vec], None], _: object) -> None:
        go(self._y[rank])
