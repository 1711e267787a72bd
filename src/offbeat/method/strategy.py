"""A strategy as a value: a method with its settings, ready to run on a worker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.method.effects import Effect
from offbeat.method.paper import Paper
from offbeat.method.replica import Replica

Body = Callable[[Replica], Coroutine[Effect[Any], Any, None]]


@dataclass(frozen=True, eq=False)
class Strategy:
    """What ``ob.local_sgd(period=8)`` returns. Printing it gives back the call."""

    paper: Paper
    make: Callable[..., Strategy]
    settings: Mapping[str, object]
    body: Body

    @property
    def name(self) -> str:
        return self.paper.name

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={_shown(v)}' for k, v in self.settings.items())})"

    __repr__ = __str__

    def __reduce__(self) -> tuple[Callable[..., Strategy], tuple[object, ...]]:
        return _made, (self.make, dict(self.settings))  # a coroutine function cannot travel; its call can


def _made(make: Callable[..., Strategy], settings: Mapping[str, object]) -> Strategy:
    return make(**settings)


def _shown(value: object) -> str:
    name = getattr(value, "name", None)
    return str(name) if isinstance(name, str) else repr(value)


def whole(method: str, name: str, value: object, least: int) -> int:
    """Check that a setting is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{method}: {name} is {value!r}, but must be a whole number of at least {least}")
    return value


def between(method: str, name: str, value: float, low: float, high: float) -> float:
    """Check that a setting lies in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{method}: {name} is {value!r}, but must lie between {low:g} and {high:g}")
    return float(value)


def one_of(method: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that a setting is one of a few words."""
    if value not in choices:
        raise ValueError(f"{method}: {name} is {value!r}, but must be one of {', '.join(map(repr, choices))}")
