"""Micro-batches as a record says that they were done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import simpy

from offbeat.method.effects import Batch, Done
from offbeat.runs.order import Part
from offbeat.sim.replay.mismatch import Mismatch
from offbeat.sim.workers import Piece, Work


class ReplayedStreams:
    """Micro-batches as they were done: no bell, no deadline."""

    def __init__(self, env: simpy.Environment, work: Work, parts: Sequence[Sequence[Part]]) -> None:
        self._env, self._work = env, work
        self._parts = [deque(own) for own in parts]

    def begin(self, rank: int, r: int, effect: Batch, answer: Callable[[Done], None]) -> None:
        if not self._parts[rank]:
            raise Mismatch(f"the record cannot be followed: rank {rank} has no part in round {effect.r}")
        part = self._parts[rank].popleft()
        pieces: list[Piece] = [(batch, lo, hi, r) for batch, lo, hi in part.pieces]
        if not pieces and part.samples == 1:  # a batch that was not cut
            pieces = [(r, 0, self._work.rows(rank, r), r)]
        seconds = self._work.compute_s(r, rank) * part.done / part.of if part.of else 0.0

        def over(_: object) -> None:
            total, rows = self._work.union(rank, pieces), sum(hi - lo for _, lo, hi, _ in pieces)
            if rows and part.samples != rows:
                total = total * (part.samples / rows)
            answer(Done(total, part.samples, part.done, part.of, part.whole_s))

        self._env.timeout(seconds).callbacks.append(over)
