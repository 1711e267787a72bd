"""When to average: a period that keeps the spread of the replicas in proportion to the learning rate, or each worker's
steps in proportion to its speed.

Pure functions of what was measured, so that all workers, given the same numbers, decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """The period now, and the yardstick: ``C2``, the mean of S/γ over ``samples`` measurements."""

    p: int
    C2: float = 0.0
    samples: int = 0


def sampled(pace: Pace, spread: float, lr: float) -> Pace:
    """Take one more measurement into the yardstick; the period stays.

    At a learning rate of 0 nothing moves, and S/γ means nothing: such a measurement is left out.
    """
    if not lr > 0:
        return pace
    samples = pace.samples + 1
    return Pace(pace.p, pace.C2 + (spread / lr - pace.C2) / samples, samples)


def adapted(pace: Pace, spread: float, lr: float, low: float, high: float, cap: int) -> Pace:
    """One step longer where the spread is under ``low`` · γ · C2, one shorter where it is over ``high`` · γ · C2.

    The period stays in 1 … ``cap``, and as it is while there is no yardstick. A spread that is not a number changes
    nothing.
    """
    if not pace.samples or not lr > 0:
        return pace
    target = lr * pace.C2
    if spread < low * target:
        return Pace(min(pace.p + 1, cap), pace.C2, pace.samples)
    if spread > high * target:
        return Pace(max(pace.p - 1, 1), pace.C2, pace.samples)
    return pace


def sampling_steps(sampling: float, period: int, horizon: int | None) -> float:
    """How many steps the yardstick is taken for.

    ``sampling`` up to 1 is a share of the run's ``horizon``, above 1 a number of steps. A share of a run whose length
    nobody knows becomes 25 periods.
    """
    if sampling > 1:
        return sampling
    return sampling * horizon if horizon is not None else 25 * period if sampling else 0


SLACK = 0.05


def in_proportion(period: int, steps: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """How many steps each worker takes until the next average: ⌊v_k / max v · H⌋, at least 1 (DyLU).

    v_k = steps / seconds, as measured since the last average. Who has no speed, since it took no step or no time, is
    taken for as fast as the fastest. A worker may be late by the ``SLACK``: without it, of equal workers with the least
    noise all but one would be a step short.
    """
    speeds = [n / s if n and s > 0 else None for n, s in zip(steps, seconds, strict=True)]
    fastest = max((v for v in speeds if v is not None), default=1.0)
    return [
        period if v is None else max(1, min(period, math.floor((1 + SLACK) * v / fastest * period))) for v in speeds
    ]
