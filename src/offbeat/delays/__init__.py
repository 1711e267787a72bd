"""How long things take, and who is late: seconds as numbers, as distributions, or as functions of (step, rank).

| delay | who is late |
| --- | --- |
| ``delays.random(ranks=2, seconds=0.32)`` | 2 different random ranks each step (WAGMA-SGD's experiment: 2 of 64) |
| ``delays.random(ranks=1, seconds=0.3)`` | eager-SGD's hyperplane: 1 of 8 |
| ``delays.rotating(low=0.05, high=0.4)`` | eager-SGD's severe skew: everybody late, shifted by one rank each step |
| ``delays.chronic(rank=0, seconds=0.3)`` | one worker that is always late |
| ``delays.profile("bytedance-se", seconds=0.3)`` | as it was measured elsewhere (``delays.PROFILES``) |
| ``delays.trace(run)``, ``delays.trace("mine.csv")`` | as you measured it |
| ``delays.total(a, b)`` | both |

Every draw is a pure function of (seed, step, rank): no stream is shared, so the order in which workers ask changes
nothing, and a run can be repeated or resumed. Two specs that should be independent (of the same kind, such as a
log-normal compute time and a log-normal delay) want different seeds; ``total`` sees to that for its parts.
"""

from __future__ import annotations

from offbeat.delays import faults
from offbeat.delays.distribution import Distribution, Seconds, bind
from offbeat.delays.faults import Faults
from offbeat.delays.kinds import (
    Bimodal,
    Constant,
    Exponential,
    LogNormal,
    Pareto,
    RandomRanks,
    Rotating,
    Total,
    Uniform,
    chronic,
    constant,
    stalls,
    total,
)
from offbeat.delays.measured import Table, trace
from offbeat.delays.phrases import parse
from offbeat.delays.profiles import PROFILES, Measurement, Profile, profile

random, rotating = RandomRanks, Rotating
exponential, lognormal, pareto, bimodal, uniform = Exponential, LogNormal, Pareto, Bimodal, Uniform

__all__ = [
    "PROFILES",
    "Bimodal",
    "Constant",
    "Distribution",
    "Exponential",
    "Faults",
    "LogNormal",
    "Measurement",
    "Pareto",
    "Profile",
    "RandomRanks",
    "Rotating",
    "Seconds",
    "Table",
    "Total",
    "Uniform",
    "bimodal",
    "bind",
    "chronic",
    "constant",
    "exponential",
    "faults",
    "lognormal",
    "pareto",
    "parse",
    "profile",
    "random",
    "rotating",
    "stalls",
    "total",
    "trace",
    "uniform",
]
