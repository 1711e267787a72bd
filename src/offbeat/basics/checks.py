"""What an argument must be: each check answers a value that is not with a sentence, and hands on one that is.

What these do not cover is refused by a plain ``raise ValueError`` whose sentence names the value and the way out.
"""

from __future__ import annotations


def whole(name: str, value: object, least: int) -> int:
    """A whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least {least}")
    return value


def between(name: str, value: object, low: float, high: float) -> float:
    """A number from ``low`` to ``high``, both included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, but must lie between {low:g} and {high:g}")
    return float(value)


def one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}")


def workers(count: object) -> int:
    """How many workers a run has."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{count!r} workers cannot train; use 1 or more")
    return count
