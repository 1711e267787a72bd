"""What a worker notes of its own steps: a handful of numbers each, so that it costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean as mean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.method.facts import Facts
from offbeat.runs.trace import Doing, Point, Round, Trace, merged

SNAPSHOTS = 24
MOST_NUMBERS = 500_000  # a larger model is not copied in the middle of a run only to draw a line


class Status(NamedTuple):
    """Where a worker stands: what a live screen shows. ``stale`` is −1 where nothing is known."""

    job: int
    step: int
    doing: Doing
    stale: int
    loss: float


class Entry(NamedTuple):
    """One step: seconds since the common start, samples, bytes sent, and the period of adaptive averaging or 0."""

    start_s: float
    late_until_s: float
    computed_s: float
    end_s: float
    samples: int
    sent_bytes: int
    period: int


@dataclass
class StepRecord:
    """What one worker hands in at the end."""

    entries: list[Entry] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    spread: list[tuple[int, float]] = field(default_factory=list)


class StepLog:
    """Kept by a worker while it trains. ``tell`` hears of every change of what it does."""

    def __init__(self, steps: int, parameters: Sequence[Tensor], tell: Callable[[int, Doing, float], None] | None):
        self._tell, self._parameters = tell, parameters
        self._every = max(steps // SNAPSHOTS, 1) | 1  # odd, so as not to fall on every average of a period of 2, 4, 8
        self._copies: list[Tensor] = []
        self._copied = sum(p.numel() for p in parameters) <= MOST_NUMBERS
        self._losses: list[Tensor] = []
        self._shown_loss = float("nan")
        self._waited_s = 0.0
        self._sent_bytes = 0
        self.entries: list[Entry] = []
        self.start_s = self._began_s = self._late_until_s = 0.0

    def start(self, waited_s: float, sent_bytes: int) -> None:
        """The common start: what was waited and sent before does not count."""
        self._waited_s, self._sent_bytes = waited_s, sent_bytes
        self.start_s = time.monotonic()

    def late(self) -> None:
        self._began_s = time.monotonic()
        self._say("delay")

    def computing(self) -> None:
        self._late_until_s = time.monotonic()
        self._say("compute")

    def waiting(self) -> None:
        self._say("wait")

    def over(self, loss: Tensor, samples: int, waited_s: float, sent_bytes: int, period: int) -> None:
        """A step is over. Its waiting is taken to lie at its end, where almost all of it is."""
        end_s = time.monotonic()
        computed_s = max(end_s - (waited_s - self._waited_s), self._late_until_s)
        sent, start = sent_bytes - self._sent_bytes, self.start_s
        self._waited_s, self._sent_bytes = waited_s, sent_bytes
        self.entries.append(
            Entry(
                self._began_s - start,
                self._late_until_s - start,
                computed_s - start,
                end_s - start,
                samples,
                sent,
                period,
            )
        )
        self._losses.append(loss)
        step = len(self.entries)
        if self._copied and step % self._every == 0 and len(self._copies) < SNAPSHOTS:
            self._copies.append(torch.cat([p.detach().reshape(-1) for p in self._parameters]))
        if self._tell is not None and step % self._every == 0:
            self._shown_loss = float(loss)

    def _say(self, doing: Doing) -> None:
        if self._tell is not None:
            self._tell(len(self.entries), doing, self._shown_loss)

    def records(self, rounds: Sequence[Round]) -> StepRecord:
        """Everything noted. Every rank must call it: the replicas' copies are compared here."""
        start = self.start_s
        shifted = [
            Round(r.version, r.started_by, r.fresh, r.staleness, r.waited_s, r.end_s - start)
            for r in rounds
            if r.end_s >= start
        ]
        return StepRecord(self.entries, [float(loss) for loss in self._losses], shifted, self._spread())

    def _spread(self) -> list[tuple[int, float]]:
        """(step, mean of ‖x_i − x̄‖² over the workers that have taken that many steps) for some steps."""
        count = torch.tensor([len(self._copies)])
        dist.all_reduce(count, dist.ReduceOp.MIN)
        if not int(count):
            return []
        own = torch.stack(self._copies[: int(count)]).double().cpu()
        mean = own.clone()
        dist.all_reduce(mean)
        apart = (own - mean.div_(dist.get_world_size())).square_().sum(dim=1)
        dist.all_reduce(apart)
        apart /= dist.get_world_size()
        return [((k + 1) * self._every - 1, value) for k, value in enumerate(apart.tolist())]


def assemble(records: Sequence[StepRecord], facts: Facts) -> Trace:
    """The trace of a run from all workers' records.

    Where everyone meets, a step in which something was sent is a round of all; where it is also waited for there, a
    worker's waiting ends when the last one has come, and what follows is communication.
    """
    trace, together_s = Trace(), dict[tuple[int, int], float]()
    if facts.meets == "everyone":
        for steps in _meetings(records):
            met = [records[rank].entries[step] for rank, step in enumerate(steps)]
            last_s = max(entry.computed_s for entry in met)
            last = next(rank for rank, entry in enumerate(met) if entry.computed_s == last_s)
            waited = {rank: entry.end_s - entry.computed_s for rank, entry in enumerate(met)}
            everyone, end_s = tuple(range(len(records))), max(entry.end_s for entry in met)
            trace.rounds.append(Round(len(trace.rounds), last, everyone, dict.fromkeys(everyone, 0), waited, end_s))
            if facts.waits_where_it_begins:
                together_s.update(dict.fromkeys(enumerate(steps), last_s))
    else:
        trace.rounds = merged([record.rounds for record in records])
    for rank, record in enumerate(records):
        for step, entry in enumerate(record.entries):
            trace.span(rank, step, "delay", entry.start_s, entry.late_until_s)
            trace.span(rank, step, "compute", entry.late_until_s, entry.computed_s)
            split_s = min(max(together_s.get((rank, step), entry.end_s), entry.computed_s), entry.end_s)
            trace.span(rank, step, "wait", entry.computed_s, split_s)
            trace.span(rank, step, "communicate", split_s, entry.end_s)
    trace.series = _series(records)
    return trace


def _meetings(records: Sequence[StepRecord]) -> list[tuple[int, ...]]:
    """The steps (one for each worker) at which all met: everybody's k-th step that sent something."""
    sending = [[step for step, entry in enumerate(record.entries) if entry.sent_bytes] for record in records]
    return list(zip(*sending, strict=False)) if len(records) > 1 else []


def mean_losses(records: Sequence[StepRecord]) -> list[float]:
    """Of each step, over the workers that took so many."""
    steps = zip_longest(*(record.losses for record in records))
    return [mean(value for value in losses if value is not None) for losses in steps]


def _series(records: Sequence[StepRecord]) -> dict[str, list[Point]]:
    period, moments, samples = [], [], 0
    for step in range(max((len(record.entries) for record in records), default=0)):
        here = [record.entries[step] for record in records if step < len(record.entries)]
        samples += sum(entry.samples for entry in here)
        time_s = mean(entry.end_s for entry in here)
        moments.append((time_s, samples))
        if here[0].period:
            period.append(Point(time_s, samples, here[0].period))
    # The loss in the order of time: with shared work the steps of one number lie far apart.
    all_steps = sorted(
        (entry.end_s, entry.samples, value)
        for record in records
        for entry, value in zip(record.entries, record.losses, strict=True)
    )
    loss, samples = [], 0
    for first in range(0, len(all_steps), len(records)):
        times_s, counts, values = zip(*all_steps[first : first + len(records)], strict=True)
        samples += sum(counts)
        loss.append(Point(mean(times_s), samples, mean(values)))
    spread = [Point(*moments[step], value) for step, value in (records[0].spread if records else ())]
    return {name: points for name, points in (("loss", loss), ("period", period), ("spread", spread)) if points}
