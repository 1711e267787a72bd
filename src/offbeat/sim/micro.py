"""Micro-batches in virtual time: each worker computes until the bell of its round has reached it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from offbeat.effects import Batch, Done
from offbeat.sim.network import Network
from offbeat.stopping import cuts
from offbeat.trace import Trace
from offbeat.vector import Vec

Piece = tuple[int, int, int, int]  # batch, from row, to row, round


@dataclass
class _Stream:
    """A worker's data in order: it runs on where it stopped, whatever the rounds do."""

    batch: int = 0
    waiting: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class _Part:
    """A worker's part of one round."""

    effect: Batch
    answer: Callable[[Done], None]
    began_s: float
    piece_s: float
    pieces: list[Piece] = field(default_factory=list)


class MicroBatches:
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
        self._last = [-1] * size

    def begin(self, rank: int, r: int, effect: Batch, answer: Callable[[Done], None]) -> None:
        """Worker ``rank`` begins its part of round ``r``."""
        delay, compute = self._delay_s(r, rank), self._compute_s(r, rank)
        now = self._env.now
        self._trace.span(rank, r, "delay", now, now + delay)
        part = _Part(effect, answer, now, compute / effect.micro)
        self._env.timeout(delay + part.piece_s).callbacks.append(lambda _: self._piece_done(rank, r, part))

    def _next_piece(self, rank: int, micro: int) -> tuple[int, int, int]:
        stream = self._streams[rank]
        if not stream.waiting:
            rows = self._rows(rank, stream.batch)
            stream.waiting = [(stream.batch, lo, hi) for lo, hi in cuts(rows, micro)]
            stream.batch += 1
        return stream.waiting.pop(0)

    def _piece_done(self, rank: int, r: int, part: _Part) -> None:
        now, effect = self._env.now, part.effect
        batch, lo, hi = self._next_piece(rank, effect.micro)
        part.pieces.append((batch, lo, hi, r))
        self._trace.span(rank, r, "compute", now - part.piece_s, now)
        done = len(part.pieces)
        if done == effect.micro:
            self._ring(r, effect)
        rung = now >= self._rung_s.get(r, math.inf)
        if not effect.stop.is_over(done, effect.micro, rung, now - part.began_s):
            self._env.timeout(part.piece_s).callbacks.append(lambda _: self._piece_done(rank, r, part))
            return
        samples = sum(hi - lo for _, lo, hi, _ in part.pieces)
        whole_s = now - part.began_s if done == effect.micro else None
        part.answer(Done(self._union(rank, part.pieces), samples, done, whole_s))

    def _ring(self, r: int, effect: Batch) -> None:
        self._done[r] = self._done.get(r, 0) + 1
        if effect.stop.workers is not None and self._done[r] >= effect.stop.workers:
            self._rung_s.setdefault(r, self._env.now + self._news_s)
