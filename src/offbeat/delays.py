"""How long things take, and who is late: seconds as numbers, as distributions, or as functions of (step, rank).

| delay | who is late |
| --- | --- |
| ``delays.random(ranks=2, seconds=0.32)`` | 2 different random ranks each step (WAGMA-SGD's experiment: 2 of 64) |
| ``delays.random(ranks=1, seconds=0.3)`` | eager-SGD's hyperplane: 1 of 8 |
| ``delays.rotating(low=0.05, high=0.4)`` | eager-SGD's severe skew: everybody late, shifted by one rank each step |
| ``delays.chronic(rank=0, seconds=0.3)`` | one worker that is always late |
| ``delays.total(a, b)`` | both |

Every draw is a pure function of (seed, step, rank): no stream is shared, so the order in which workers ask changes
nothing, and a run can be repeated or resumed. Two specs that should be independent (of the same kind, such as a
log-normal compute time and a log-normal delay) want different seeds; ``total`` sees to that for its parts.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

from offbeat.basics import draw
from offbeat.basics.units import parse_seconds

_STANDARD = NormalDist()


class Distribution(ABC):
    """Seconds that depend on the seed, the step and the rank, and on nothing else."""

    @abstractmethod
    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        """The seconds of this rank in this step."""

    @abstractmethod
    def __str__(self) -> str:
        """In words, with units."""

    def bound(self, seed: int, workers: int) -> Callable[[int, int], float]:
        """``draw`` as a function of (step, rank); raises a ValueError if so many workers cannot be served."""
        return lambda step, rank: self.draw(seed, step, rank, workers)


Seconds: TypeAlias = float | int | Distribution | Callable[[int, int], float]


def bind(spec: Seconds | None, *, seed: int, workers: int, what: str) -> Callable[[int, int], float]:
    """The function (step, rank) → seconds that a spec stands for; ``None`` is no time at all.

    ``what`` names the argument in error messages ("compute_s", "delays"). Numbers are checked here, and the answers of
    functions and distributions each time: time that is negative, NaN or infinite would stop or reverse the clock.
    """
    if spec is None:
        return lambda step, rank: 0.0
    if isinstance(spec, (int, float)):
        if not 0 <= spec < math.inf:
            raise ValueError(f"{what} is {spec}; use a finite number of seconds, 0 or more")
        seconds = float(spec)
        return lambda step, rank: seconds
    if not isinstance(spec, Distribution) and not callable(spec):
        hint = "; delays.parse reads text" if isinstance(spec, str) else ""
        raise ValueError(f"{what} is {spec!r}; use a number of seconds, a distribution or a function{hint}")
    function = spec.bound(seed, workers) if isinstance(spec, Distribution) else spec

    def checked(step: int, rank: int) -> float:
        value = function(step, rank)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        return number if 0.0 <= number < math.inf else _refuse(what, step, rank, value)

    return checked


def _refuse(what: str, step: int, rank: int, value: object) -> float:
    raise ValueError(f"{what} gave {value!r} for step {step}, rank {rank}; use a finite number of seconds, 0 or more")


@dataclass(frozen=True)
class RandomRanks(Distribution):
    """``ranks`` different ranks, drawn anew each step, are late by ``seconds``."""

    ranks: int = 2
    seconds: float = 0.32

    def __post_init__(self) -> None:
        if self.ranks < 0:
            raise ValueError(f"{self.ranks} ranks cannot be late; use 0 or more")
        _seconds_ok(self.seconds)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return self.seconds if rank in _late(workers, self.ranks, seed, step) else 0.0

    def bound(self, seed: int, workers: int) -> Callable[[int, int], float]:
        _late(workers, self.ranks, seed, 0)
        return super().bound(seed, workers)

    def __str__(self) -> str:
        return f"{self.ranks} random {'rank' if self.ranks == 1 else 'ranks'} a step late by {_words(self.seconds)}"


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
        _seconds_ok(self.seconds)
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
            return f"every rank {_words(self.seconds)}"
        names = ", ".join(map(str, self.ranks)) or "none"
        return f"{'rank' if len(self.ranks) == 1 else 'ranks'} {names} always late by {_words(self.seconds)}"


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
        _range_ok(self.low, self.high)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        place = (rank + step) % workers
        return self.low + (self.high - self.low) * place / max(workers - 1, 1)

    def __str__(self) -> str:
        return f"{_words(self.low)} to {_words(self.high)}, rotating over the ranks"


@dataclass(frozen=True)
class Exponential(Distribution):
    """Memoryless, with this mean."""

    mean_s: float

    def __post_init__(self) -> None:
        _seconds_ok(self.mean_s)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return -self.mean_s * math.log1p(-draw.uniform(seed, 3, step, rank))

    def __str__(self) -> str:
        return f"exponential with mean {_words(self.mean_s)}"


@dataclass(frozen=True)
class LogNormal(Distribution):
    """exp of a normal variable: ``median_s`` in the middle, ``sigma`` the spread of the logarithm."""

    median_s: float
    sigma: float = 0.5

    def __post_init__(self) -> None:
        _seconds_ok(self.median_s)
        if not 0 <= self.sigma <= 10:
            raise ValueError(f"a log-normal sigma of {self.sigma} cannot be used; use 0 to 10, such as 0.5")

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        u = draw.uniform(seed, 4, step, rank) or 2.0**-54  # the quantile of exactly 0 is minus infinity
        return self.median_s * math.exp(self.sigma * _STANDARD.inv_cdf(u))

    def __str__(self) -> str:
        return f"log-normal with median {_words(self.median_s)}, sigma {self.sigma:g}"


@dataclass(frozen=True)
class Pareto(Distribution):
    """Heavy-tailed: at least ``scale_s``, P(more than x) = (scale_s / x)^alpha, cut at ``cap`` times the median."""

    scale_s: float
    alpha: float = 1.8
    cap: float = 20.0

    def __post_init__(self) -> None:
        _seconds_ok(self.scale_s)
        if not 0.1 <= self.alpha < math.inf:
            raise ValueError(f"a Pareto alpha of {self.alpha} cannot be used; use a number from 0.1, such as 1.8")
        if not 1 <= self.cap <= 1e9:
            raise ValueError(f"a cap of {self.cap} medians cannot be used; use 1 to 1e9, such as 20")

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        exponent = -math.log1p(-draw.uniform(seed, 5, step, rank)) / self.alpha
        return self.scale_s * math.exp(min(exponent, math.log(2) / self.alpha + math.log(self.cap)))

    def __str__(self) -> str:
        return f"Pareto from {_words(self.scale_s)}, alpha {self.alpha:g}, cut at {self.cap:g} medians"


@dataclass(frozen=True)
class Bimodal(Distribution):
    """``slow_s`` with this probability, else ``fast_s``."""

    fast_s: float
    slow_s: float
    probability: float = 0.1

    def __post_init__(self) -> None:
        _seconds_ok(self.fast_s)
        _seconds_ok(self.slow_s)
        _probability_ok(self.probability)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return self.slow_s if draw.uniform(seed, 6, step, rank) < self.probability else self.fast_s

    def __str__(self) -> str:
        if not self.fast_s:
            return f"{100 * self.probability:g}% of steps late by {_words(self.slow_s)}"
        return f"{_words(self.fast_s)}, but {_words(self.slow_s)} in {100 * self.probability:g}% of steps"


def stalls(probability: float = 0.1, seconds: float = 0.1) -> Bimodal:
    """Each rank, each step, independently: late by ``seconds`` with this probability, else not at all."""
    return Bimodal(0.0, seconds, probability)


@dataclass(frozen=True)
class Uniform(Distribution):
    """Anything from ``low`` to ``high``, alike."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _range_ok(self.low, self.high)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return self.low + (self.high - self.low) * draw.uniform(seed, 7, step, rank)

    def __str__(self) -> str:
        return f"uniform from {_words(self.low)} to {_words(self.high)}"


@dataclass(frozen=True)
class Table(Distribution):
    """Measured seconds, ``table[step][rank]``. Steps and ranks beyond the table begin again at its start."""

    table: tuple[tuple[float, ...], ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.table or not all(self.table):
            raise ValueError("a trace has no seconds in at least one of its steps; give each step one number a rank")
        for step, row in enumerate(self.table):
            for rank, seconds in enumerate(row):
                if not 0 <= seconds < math.inf:
                    _refuse("a trace", step, rank, seconds)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        row = self.table[step % len(self.table)]
        return row[rank % len(row)]

    def __str__(self) -> str:
        return f"a trace of {len(self.table)} steps"


def trace(table: Sequence[Sequence[float]]) -> Table:
    """Seconds as they were measured: ``table[step][rank]``, wrapping round at both ends."""
    return Table(tuple(tuple(float(seconds) for seconds in row) for row in table))


@dataclass(frozen=True)
class Total(Distribution):
    """The sum of several. Each part draws on its own, so two parts of a kind do not strike together."""

    parts: tuple[Seconds, ...]

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return self.bound(seed, workers)(step, rank)

    def bound(self, seed: int, workers: int) -> Callable[[int, int], float]:
        seeds = [seed, *(draw.bits(seed, 8, i) for i in range(1, len(self.parts)))]
        bound = [
            bind(part, seed=s, workers=workers, what=f"the part {_describe(part)!r}")
            for part, s in zip(self.parts, seeds, strict=False)
        ]
        return lambda step, rank: sum(f(step, rank) for f in bound)

    def __str__(self) -> str:
        return " + ".join(_describe(part) for part in self.parts) or "no delay"


def total(*specs: Seconds) -> Total:
    """The sum of several: numbers, distributions or functions."""
    return Total(specs)


random, rotating = RandomRanks, Rotating
exponential, lognormal, pareto, bimodal, uniform = Exponential, LogNormal, Pareto, Bimodal, Uniform


_TIME = r"(-?[0-9]*\.?[0-9]+ ?[a-zµ]+)"
_NUMBER = r"(-?[0-9]*\.?[0-9]+)"
_FORMS: tuple[tuple[str, Callable[..., Distribution]], ...] = (
    (rf"(-?[0-9]+) ranks? {_TIME}", lambda k, t: RandomRanks(int(k), _s(t))),
    (rf"ranks? ([0-9]+(?: ?, ?[0-9]+)*) {_TIME}", lambda r, t: constant(_s(t), map(int, r.split(",")))),
    (rf"{_NUMBER} ?% {_TIME}", lambda p, t: stalls(float(p) / 100, _s(t))),
    (rf"{_TIME} ?\.\. ?{_TIME} rotating", lambda t, u: Rotating(_s(t), _s(u))),
    (rf"exponential {_TIME}", lambda t: Exponential(_s(t))),
    (rf"lognormal {_TIME} {_NUMBER}", lambda t, sigma: LogNormal(_s(t), float(sigma))),
    (rf"pareto {_TIME} {_NUMBER}", lambda t, alpha: Pareto(_s(t), float(alpha))),
)
_ACCEPTED = (
    "none, '2 ranks 320ms', 'rank 3 30ms', 'ranks 1,3 30ms', '10% 100ms', '50ms..400ms rotating', "
    "'exponential 100ms', 'lognormal 100ms 0.5' or 'pareto 100ms 1.8', several joined by +"
)


def parse(text: str) -> Distribution | None:
    """The delays a phrase stands for, such as ``2 ranks 320ms`` or ``10% 100ms + rank 3 30ms``; ``none`` is None."""
    if text.strip().lower() == "none":
        return None
    parts = [_parse_one(part, text) for part in text.split("+")]
    return parts[0] if len(parts) == 1 else total(*parts)


def _parse_one(part: str, text: str) -> Distribution:
    phrase = " ".join(part.lower().replace("μ", "µ").split())
    for pattern, make in _FORMS:
        if match := re.fullmatch(pattern, phrase):
            try:
                return make(*match.groups())
            except ValueError as error:
                raise ValueError(f"the delay {text!r} cannot be used: {error}") from None
    raise ValueError(f"the delay {text!r} is not understood; use {_ACCEPTED}")


def _s(text: str) -> float:
    """A duration; a negative one is read, so that whoever uses it can say what is wrong with it."""
    return -parse_seconds(text[1:]) if text.startswith("-") else parse_seconds(text)


def _words(seconds: float) -> str:
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "µs"))
    return f"{seconds / unit:.4g} {name}" if seconds else "0 s"


def _describe(part: Seconds) -> str:
    if isinstance(part, (int, float)):
        return f"every rank {_words(part)}"
    return str(part) if isinstance(part, Distribution) else f"the function {getattr(part, '__name__', repr(part))}"


def _seconds_ok(seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} s is not a time to wait; use a finite number of seconds, 0 or more")


def _range_ok(low: float, high: float) -> None:
    _seconds_ok(low)
    _seconds_ok(high)
    if low > high:
        raise ValueError(f"{low} s to {high} s runs backwards; give the smaller one first")


def _probability_ok(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise ValueError(f"{probability} is not a probability; use 0 to 1 (0% to 100%)")
