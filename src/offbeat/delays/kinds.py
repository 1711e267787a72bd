"""Delays that are drawn: numbers, and who is late by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from offbeat.basics import draw
from offbeat.delays.distribution import (
    Distribution,
    Seconds,
    bind,
    describe,
    probability_ok,
    range_ok,
    seconds_ok,
    words,
)

_STANDARD = NormalDist()


@dataclass(frozen=True)
class RandomRanks(Distribution):
    """``ranks`` different ranks, drawn anew each step, are late by ``seconds``."""

    ranks: int = 2
    seconds: float = 0.32

    def __post_init__(self) -> None:
        if self.ranks < 0:
            raise ValueError(f"{self.ranks} ranks cannot be late; use 0 or more")
        seconds_ok(self.seconds)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return self.seconds if rank in _late(workers, self.ranks, seed, step) else 0.0

    def bound(self, seed: int, workers: int) -> Callable[[int, int], float]:
        _late(workers, self.ranks, seed, 0)
        return super().bound(seed, workers)

    def __str__(self) -> str:
        return f"{self.ranks} random {'rank' if self.ranks == 1 else 'ranks'} a step late by {words(self.seconds)}"


@lru_cache(maxsize=4096)  # workers may be many steps apart, and each asks for its own step
def _late(workers: int, ranks: int, seed: int, step: int) -> frozenset[int]:
    if ranks > workers:
        raise ValueError(f"{ranks} different ranks cannot be late among {workers} workers; use 0 to {workers}")
    return frozenset(draw.sample(workers, ranks, seed, 1, step))


@dataclass(frozen=True)
class Constant(Distribution):
    """The listed ranks (None: all) take ``seconds`` every step."""

    seconds: float
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        seconds_ok(self.seconds)
        if self.ranks is not None and any(rank < 0 for rank in self.ranks):
            raise ValueError(f"rank {min(self.ranks)} does not exist; ranks count from 0")

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return self.seconds if self.ranks is None or rank in self.ranks else 0.0

    def bound(self, seed: int, workers: int) -> Callable[[int, int], float]:
        if self.ranks and (top := max(self.ranks)) >= workers:
            raise ValueError(f"rank {top} cannot be late among {workers} workers; use ranks 0 to {workers - 1}")
        return super().bound(seed, workers)

    def __str__(self) -> str:
        if self.ranks is None:
            return f"every rank {words(self.seconds)}"
        names = ", ".join(map(str, self.ranks)) or "none"
        return f"{'rank' if len(self.ranks) == 1 else 'ranks'} {names} always late by {words(self.seconds)}"


def constant(seconds: float, ranks: Iterable[int] | None = None) -> Constant:
    """The listed ranks, or all of them, take ``seconds`` every step."""
    return Constant(seconds, None if ranks is None else tuple(sorted(set(ranks))))


def chronic(rank: int = 0, seconds: float = 0.1) -> Constant:
    """One worker that is late every step: slower hardware, a hot machine, a noisy neighbour."""
    return Constant(seconds, (rank,))


@dataclass(frozen=True)
class Rotating(Distribution):
    """All ranks are late, evenly from ``low`` to ``high``, and the pattern moves on by one rank each step."""

    low: float = 0.05
    high: float = 0.4

    def __post_init__(self) -> None:
        range_ok(self.low, self.high)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        place = (rank + step) % workers
        return self.low + (self.high - self.low) * place / max(workers - 1, 1)

    def __str__(self) -> str:
        return f"{words(self.low)} to {words(self.high)}, rotating over the ranks"


@dataclass(frozen=True)
class Exponential(Distribution):
    """Memoryless, with this mean."""

    mean_s: float

    def __post_init__(self) -> None:
        seconds_ok(self.mean_s)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return -self.mean_s * math.log1p(-draw.uniform(seed, 3, step, rank))

    def __str__(self) -> str:
        return f"exponential with mean {words(self.mean_s)}"


@dataclass(frozen=True)
class LogNormal(Distribution):
    """exp of a normal variable: ``median_s`` in the middle, ``sigma`` the spread of the logarithm."""

    median_s: float
    sigma: float = 0.5

    def __post_init__(self) -> None:
        seconds_ok(self.median_s)
        if not 0 <= self.sigma <= 10:
            raise ValueError(f"a log-normal sigma of {self.sigma} cannot be used; use 0 to 10, such as 0.5")

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        u = draw.uniform(seed, 4, step, rank) or 2.0**-54  # the quantile of exactly 0 is minus infinity
        return self.median_s * math.exp(self.sigma * _STANDARD.inv_cdf(u))

    def __str__(self) -> str:
        return f"log-normal with median {words(self.median_s)}, sigma {self.sigma:g}"


@dataclass(frozen=True)
class Pareto(Distribution):
    """Heavy-tailed: at least ``scale_s``, P(more than x) = (scale_s / x)^alpha, cut at ``cap`` times the median."""

    scale_s: float
    alpha: float = 1.8
    cap: float = 20.0

    def __post_init__(self) -> None:
        seconds_ok(self.scale_s)
        if not 0.1 <= self.alpha < math.inf:
            raise ValueError(f"a Pareto alpha of {self.alpha} cannot be used; use a number from 0.1, such as 1.8")
        if not 1 <= self.cap <= 1e9:
            raise ValueError(f"a cap of {self.cap} medians cannot be used; use 1 to 1e9, such as 20")

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        exponent = -math.log1p(-draw.uniform(seed, 5, step, rank)) / self.alpha
        return self.scale_s * math.exp(min(exponent, math.log(2) / self.alpha + math.log(self.cap)))

    def __str__(self) -> str:
        return f"Pareto from {words(self.scale_s)}, alpha {self.alpha:g}, cut at {self.cap:g} medians"


@dataclass(frozen=True)
class Bimodal(Distribution):
    """``slow_s`` with this probability, else ``fast_s``."""

    fast_s: float
    slow_s: float
    probability: float = 0.1

    def __post_init__(self) -> None:
        seconds_ok(self.fast_s)
        seconds_ok(self.slow_s)
        probability_ok(self.probability)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return self.slow_s if draw.uniform(seed, 6, step, rank) < self.probability else self.fast_s

    def __str__(self) -> str:
        if not self.fast_s:
            return f"{100 * self.probability:g}% of steps late by {words(self.slow_s)}"
        return f"{words(self.fast_s)}, but {words(self.slow_s)} in {100 * self.probability:g}% of steps"


def stalls(probability: float = 0.1, seconds: float = 0.1) -> Bimodal:
    """Each rank, each step, independently: late by ``seconds`` with this probability, else not at all."""
    return Bimodal(0.0, seconds, probability)


@dataclass(frozen=True)
class Uniform(Distribution):
    """Anything from ``low`` to ``high``, alike."""

    low: float
    high: float

    def __post_init__(self) -> None:
        range_ok(self.low, self.high)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return self.low + (self.high - self.low) * draw.uniform(seed, 7, step, rank)

    def __str__(self) -> str:
        return f"uniform from {words(self.low)} to {words(self.high)}"


@dataclass(frozen=True)
class Total(Distribution):
    """The sum of several. Each part draws on its own, so two parts of a kind do not strike together."""

    parts: tuple[Seconds, ...]

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return self.bound(seed, workers)(step, rank)

    def bound(self, seed: int, workers: int) -> Callable[[int, int], float]:
        seeds = [seed, *(draw.bits(seed, 8, i) for i in range(1, len(self.parts)))]
        bound = [
            bind(part, seed=s, workers=workers, what=f"the part {describe(part)!r}")
            for part, s in zip(self.parts, seeds, strict=False)
        ]
        return lambda step, rank: sum(f(step, rank) for f in bound)

    def __str__(self) -> str:
        return " + ".join(describe(part) for part in self.parts) or "no delay"


def total(*specs: Seconds) -> Total:
    """The sum of several: numbers, distributions or functions."""
    return Total(specs)
