"""Micro-batches in virtual time: each worker computes until the bell of its round has reached it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from offbeat.method.effects import Batch, Done
from offbeat.rounds.micro import Leftover, pieces, quota
from offbeat.runs.trace import Trace
from offbeat.sim.network import Network
from offbeat.tensors.vector import Vec

Piece = tuple[int, int, int, int]  # batch, from row, to row, round


@dataclass
class _Stream:
    """A worker's data in order: it runs on where it stopped, whatever the rounds do."""

    batches: int = 0  # fetched so far
    waiting: list[Leftover] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The number of the batch in front."""
        return self.batches - len(self.waiting)


@dataclass
class _Part:
    """A worker's part of one round."""

    r: int
    effect: Batch
    answer: Callable[[Done], None]
    began_s: float
    compute_s: float
    at_most: int
    pieces: list[Piece] = field(default_factory=list)


class Streams:
    """All workers' streams, and the bells."""

    def __init__(
        self,
        env: simpy.Environment,
        network: Network,
        compute_s: Callable[[int, int], float],
        delay_s: Callable[[int, int], float],
        trace: Trace,
        size: int,
        rows: Callable[[int, int], int],
        union: Callable[[int, list[Piece]], Vec],
    ) -> None:
        self._env, self._compute_s, self._delay_s, self._trace = env, compute_s, delay_s, trace
        self._rows, self._union = rows, union
        self._news_s = math.ceil(math.log2(size)) * network.latency(0, size - 1) if size > 1 else 0.0
        self._streams = [_Stream() for _ in range(size)]
        self._done: dict[int, int] = {}  # round → workers that have done their whole batch
        self._rung_s: dict[int, float] = {}  # round → when its bell has reached everybody

    def begin(self, rank: int, r: int, effect: Batch, answer: Callable[[Done], None]) -> None:
        """Worker ``rank`` begins its part of round ``r``: what is left, and a new batch where that makes no round."""
        stream, now, delay = self._streams[rank], self._env.now, self._delay_s(r, rank)
        if not stream.waiting or pieces(stream.waiting, effect.micro) < quota(stream.waiting, effect.micro):
            stream.waiting.append(Leftover(self._rows(rank, stream.batches)))
            stream.batches += 1
        self._trace.span(rank, r, "delay", now, now + delay)
        part = _Part(r, effect, answer, now, self._compute_s(r, rank), quota(stream.waiting, effect.micro))
        self._env.timeout(delay).callbacks.append(lambda _: self._go_on(rank, part))

    def _go_on(self, rank: int, part: _Part) -> None:
        """Before the first micro-batch and after each."""
        now, effect, done, stream = self._env.now, part.effect, len(part.pieces), self._streams[rank]
        through = done == part.at_most or not stream.waiting  # a short batch behind leftovers may not make a round
        if through:
            self._ring(effect)
        rung = now >= self._rung_s.get(effect.r, math.inf)
        if through or effect.stop.is_over(done, part.at_most, rung, now - part.began_s):
            samples = sum(hi - lo for _, lo, hi, _ in part.pieces)
            whole_s = (now - part.began_s) * part.at_most / done if done else None
            part.answer(Done(self._union(rank, part.pieces), samples, done, part.at_most, whole_s))
            return
        batch, rest = stream.first, stream.waiting[0]
        lo, hi = rest.first(effect.micro)
        seconds = part.compute_s / rest.whole(effect.micro)
        rest.lo = hi
        if not rest.left:
            stream.waiting.pop(0)
        part.pieces.append((batch, lo, hi, part.r))
        self._trace.span(rank, part.r, "compute", now, now + seconds)
        self._env.timeout(seconds).callbacks.append(lambda _: self._go_on(rank, part))

    def _ring(self, effect: Batch) -> None:
        r = effect.r
        self._done[r] = self._done.get(r, 0) + 1
        if effect.stop.workers is not None and self._done[r] >= effect.stop.workers:
            self._rung_s.setdefault(r, self._env.now + self._news_s)
