"""Micro-batches in virtual time: each worker computes until the bell of its round has reached it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import simpy

from offbeat.method.effects import Batch, Done
from offbeat.rounds.bell import Rope
from offbeat.rounds.micro import Supply
from offbeat.runs.order import Part
from offbeat.runs.trace import Trace
from offbeat.sim.network import Network
from offbeat.sim.workers import Piece, Work


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
        work: Work,
        trace: Trace,
        size: int,
        parts: Sequence[list[Part]] | None = None,
    ) -> None:
        self._env, self._work, self._trace, self._parts = env, work, trace, parts
        self._news_s = math.ceil(math.log2(size)) * network.latency(0, size - 1) if size > 1 else 0.0
        self._supplies = [Supply() for _ in range(size)]
        self._fetched = [0] * size
        self._rope = Rope(size)
        self._rung_s: dict[int, float] = {}  # round → when its bell has reached everybody
        self._under_way: dict[int, _Part] = {}  # of those who live
        self._rang: dict[int, int] = {}  # for which round a worker has pulled last

    def begin(self, rank: int, r: int, effect: Batch, answer: Callable[[Done], None]) -> None:
        """Worker ``rank`` begins its part of round ``r``: what is left, and a new batch where that makes no round."""
        supply, now, delay = self._supplies[rank], self._env.now, self._work.delay_s(r, rank)
        if not supply.enough(effect.micro):
            supply.add(self._work.rows(rank, self._fetched[rank]))
            self._fetched[rank] += 1
        self._trace.span(rank, r, "delay", now, now + delay)
        part = _Part(r, effect, answer, now, self._work.compute_s(r, rank), supply.quota(effect.micro))
        self._under_way[rank] = part
        self._env.timeout(delay).callbacks.append(lambda _: self._go_on(rank, part))

    def died(self, rank: int) -> None:
        """The bell is rung by those who are left."""
        self._under_way.pop(rank, None)
        for r in self._rope.one_less():
            self._rung_s[r] = self._env.now + self._news_s

    def settles(self, rank: int, go: Callable[[], None]) -> bool:
        return True

    def can_revive(self, rank: int, twin_of: int) -> bool:
        return True

    def revive(self, rank: int, twin_of: int, ahead: int) -> None:
        """It begins with a batch of its own; what was left of the dead one's nobody has."""
        self._supplies[rank] = Supply(self._fetched[rank])
        self._rope.one_more(self._rang.get(twin_of, -1))

    def _go_on(self, rank: int, part: _Part) -> None:
        """Before the first micro-batch and after each."""
        if self._under_way.get(rank) is not part:
            return
        now, effect, done, supply = self._env.now, part.effect, len(part.pieces), self._supplies[rank]
        through = supply.is_through(done, part.at_most)
        if through and effect.stop.workers is not None:
            self._rang[rank] = effect.r
            if self._rope.pull(effect.r, effect.stop.workers):
                self._rung_s[effect.r] = now + self._news_s
        rung = now >= self._rung_s.get(effect.r, math.inf)
        if through or effect.stop.is_over(done, part.at_most, rung, now - part.began_s):
            samples = sum(hi - lo for _, lo, hi, _ in part.pieces)
            whole_s = (now - part.began_s) * part.at_most / done if done else None
            if self._parts is not None:
                pieces = tuple((batch, lo, hi) for batch, lo, hi, _ in part.pieces)
                self._parts[rank].append(Part(pieces, done, part.at_most, whole_s, samples))
            part.answer(Done(self._work.union(rank, part.pieces), samples, done, part.at_most, whole_s))
            return
        batch, lo, hi = supply.first(effect.micro)
        seconds = part.compute_s / supply.whole(effect.micro)
        supply.take(hi)
        part.pieces.append((batch, lo, hi, part.r))
        self._trace.span(rank, part.r, "compute", now, now + seconds)
        self._env.timeout(seconds).callbacks.append(lambda _: self._go_on(rank, part))
