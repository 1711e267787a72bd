"""What a delay is, and what may stand for one."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias


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
        return number if 0.0 <= number < math.inf else refuse(what, step, rank, value)

    return checked


def refuse(what: str, step: int, rank: int, value: object) -> float:
    raise ValueError(f"{what} gave {value!r} for step {step}, rank {rank}; use a finite number of seconds, 0 or more")


def words(seconds: float) -> str:
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "µs"))
    return f"{seconds / unit:.4g} {name}" if seconds else "0 s"


def seconds_ok(seconds: float) -> None:
    if not isinstance(seconds, numbers.Real):
        raise ValueError(
            f"{seconds!r} is no number of seconds; use one, such as 0.32, or delays.parse, which reads text"
        )
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} s is not a time to wait; use a finite number of seconds, 0 or more")


def range_ok(low: float, high: float) -> None:
    seconds_ok(low)
    seconds_ok(high)
    if low > high:
        raise ValueError(f"{low} s to {high} s runs backwards; give the smaller one first")


def probability_ok(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise ValueError(f"{probability} is not a probability; use 0 to 1 (0% to 100%)")


def describe(part: Seconds) -> str:
    if isinstance(part, (int, float)):
        return f"every rank {words(part)}"
    return str(part) if isinstance(part, Distribution) else f"the function {getattr(part, '__name__', repr(part))}"
