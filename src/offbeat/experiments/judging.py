"""Whether a claim is met: each measure of ours against a rival's, seed by seed, and the median of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offbeat.experiments.experiment import Case, Claim, Measure
from offbeat.experiments.figures import Figures
from offbeat.experiments.trying import Found

Seeds = Sequence[Figures]


@dataclass(frozen=True)
class Verdict:
    """One claim about one method in one case: its figure for each seed, and whether their median will do."""

    claim: Claim
    case: str
    method: str
    values: tuple[float, ...]

    @property
    def figure(self) -> float:
        return statistics.median(self.values)

    @property
    def missed_by(self) -> float:
        """How far the figure is on the wrong side of the goal; 0 or less where it is met."""
        if self.claim.at_least is not None:
            return self.claim.at_least - self.figure
        assert self.claim.at_most is not None
        return self.figure - self.claim.at_most

    @property
    def met(self) -> bool:
        return self.missed_by <= 0


def judge(claims: Sequence[Claim], cases: Sequence[Case], found: Mapping[str, Mapping[str, Found]]) -> list[Verdict]:
    """Every claim, in every case that it is about, for every method of ours that it is about."""
    return [
        Verdict(claim, case.name, method, _values(claim, method, found[case.name]))
        for claim in claims
        for case in cases
        if case.learns == claim.learning and claim.among in case.name
        for method in claim.of
    ]


def _values(claim: Claim, method: str, found: Mapping[str, Found]) -> tuple[float, ...]:
    ours, measure = found[method].figures, MEASURES[claim.measure]
    if not claim.over:
        return tuple(measure(ours, ours))
    worst: Callable[[Sequence[float]], float] = min if claim.at_least is not None else max
    over = claim.over
    if claim.measure == "time to the best score":
        over = (max(over, key=lambda rival: statistics.median(map(highest, found[rival].figures))),)
    against = [measure(ours, found[rival].figures) for rival in over]
    return tuple(worst(of_seed) for of_seed in zip(*against, strict=True))


def highest(run: Figures) -> float:
    """The best that was held out on the way."""
    return max((value for _, value in run.reached), default=-math.inf)


def to_same_score(ours: Figures, other: Figures) -> float:
    """Our time over the other's, each until it was where the other one's highest is; inf: never."""
    mine, theirs = (
        next((at_s for at_s, value in run.reached if value >= highest(other)), math.inf) for run in (ours, other)
    )
    return mine / theirs


def to_same_loss(ours: Figures, other: Figures) -> float:
    """The other's time over ours, each until its training loss was at the lowest that both come to."""
    goal = max(min((loss for _, loss in run.curve if math.isfinite(loss)), default=math.inf) for run in (ours, other))
    mine, theirs = (next((at_s for at_s, loss in run.curve if loss <= goal), math.inf) for run in (ours, other))
    if math.isinf(mine):
        return 0.0
    return theirs / mine


def _ratio(value: Callable[[Figures], float | None]) -> Callable[[Seeds, Seeds], list[float]]:
    def over(ours: Seeds, others: Seeds) -> list[float]:
        pairs = zip(map(value, ours), map(value, others), strict=True)
        return [math.inf if a is None else 0.0 if b is None else a / b for a, b in pairs]

    return over


def _over_highest(ours: Seeds, others: Seeds) -> list[float]:
    """Each of our losses over the highest of the other's: up to 1 it is within the other's own spread."""
    highest = max(math.inf if o.loss is None else o.loss for o in others)
    return [math.inf if o.loss is None else o.loss / highest for o in ours]


def _points_lost(ours: Seeds, others: Seeds) -> list[float]:
    return [100 * ((b.accuracy or 0.0) - (a.accuracy or 0.0)) for a, b in zip(ours, others, strict=True)]


MEASURES: Mapping[Measure, Callable[[Seeds, Seeds], list[float]]] = {
    "speed-up": lambda ours, others: [b.seconds / a.seconds for a, b in zip(ours, others, strict=True)],
    "speed-up to the same training loss": lambda ours, others: [
        to_same_loss(a, b) for a, b in zip(ours, others, strict=True)
    ],
    "bytes": _ratio(lambda run: float(run.sent)),
    "loss": _over_highest,
    "training loss": _ratio(lambda run: run.training_loss),
    "points lost": _points_lost,
    "efficiency": lambda ours, others: [run.efficiency for run in ours],
    "work": lambda ours, others: [a.efficiency / b.efficiency for a, b in zip(ours, others, strict=True)],
    "score lost": lambda ours, others: [(b.score or 0.0) - (a.score or 0.0) for a, b in zip(ours, others, strict=True)],
    "time to the best score": lambda ours, others: [to_same_score(a, b) for a, b in zip(ours, others, strict=True)],
}
SAID: Mapping[Measure, str] = {
    "speed-up": "time at equal samples, over ours",
    "speed-up to the same training loss": "time to the same training loss, over ours",
    "bytes": "bytes sent, ours over theirs",
    "loss": "held-out loss, ours over the highest of theirs",
    "training loss": "training loss, ours over theirs",
    "points lost": "points of accuracy lost",
    "efficiency": "share of the time that is computing",
    "work": "computing a second, ours over theirs",
    "score lost": "score lost",
    "time to the best score": "time to the best rival's held-out score, over its own",
}
