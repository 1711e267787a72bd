"""A method as a value, and the decorator that makes a method of a function."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec

from offbeat.method.card import Card, Paper
from offbeat.method.effects import Effect
from offbeat.method.facts import NOTHING_SAID, Facts
from offbeat.method.replica import Replica
from offbeat.method.words import Kinds, codec_of, kinds_of, unknown_setting

P = ParamSpec("P")

Body = Callable[[Replica], Coroutine[Effect[Any], Any, None]]


@dataclass(frozen=True, eq=False)
class Method:
    """What ``ob.local_sgd(period=8)`` returns. Printing it gives back the call."""

    paper: Paper
    make: Callable[..., Method]
    settings: Mapping[str, object]
    body: Body
    facts: Facts = NOTHING_SAID

    @property
    def name(self) -> str:
        return self.paper.name

    @property
    def card(self) -> Card:
        """What the method is, and when to use it."""
        return Card(self.paper, self.make)

    def written(self) -> dict[str, object]:
        """Its name and its settings as JSON holds them: what is no plain value by its name."""
        return {"name": self.name, "settings": {key: _plain(value) for key, value in self.settings.items()}}

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={_shown(v)}' for k, v in self.settings.items())})"

    __repr__ = __str__

    def __reduce__(self) -> tuple[Callable[..., Method], tuple[object, ...]]:
        return _made, (self.make, dict(self.settings))  # a coroutine function cannot travel; its call can


Strategy = Method  # its earlier name


def method(
    paper: Paper, facts: Facts | Callable[..., Facts] = NOTHING_SAID
) -> Callable[[Callable[P, Body]], Callable[P, Method]]:
    """Make a method of a function that takes the settings, checks them and returns the body.

    The decorated function returns a `Method`, whose settings are the function's arguments; a codec may be given by its
    name. A ``ValueError`` gets the method's name in front. ``facts`` may be a function of the settings; it is called
    with their names.

        @method(PAPER, Facts(meets="everyone", waits_where_it_begins=True))
        def local_sgd(period: int = 8) -> Body: ...
    """

    def declared(factory: Callable[P, Body]) -> Callable[P, Method]:
        checked: Callable[..., Body] = factory
        signature = inspect.signature(factory)
        if factory.__name__ != paper.name:
            raise ValueError(f"{factory.__name__} has the card of {paper.name!r}; give both the same name")

        @functools.wraps(factory)
        def make(*args: P.args, **kwargs: P.kwargs) -> Method:
            settings = _bound(paper.name, signature, args, kwargs)
            with _named(paper.name):
                kinds = _kinds(make)
                settings = {key: codec_of(value, kinds.get(key, ())) for key, value in settings.items()}
                body = checked(**settings)
            return Method(paper, make, settings, body, facts if isinstance(facts, Facts) else facts(**settings))

        make.__signature__ = signature.replace(return_annotation="Method")  # type: ignore[attr-defined]
        make.paper = paper  # type: ignore[attr-defined]  # so that one that was not called can be told
        return make

    return declared


def _bound(
    name: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """The settings by their names, defaults included."""
    for key in kwargs:
        if key not in signature.parameters:
            raise TypeError(unknown_setting(name, key, signature.parameters))
    try:
        given = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    given.apply_defaults()
    return {key: _kept(value) for key, value in given.arguments.items()}


@functools.cache
def _kinds(make: Callable[..., Method]) -> Kinds:
    try:
        return kinds_of(make)
    except NameError:  # annotations of names that are not at hand, as inside of a function, say nothing
        return {}


def _kept(value: object) -> object:
    """A setting that can be printed and sent: edges as tuples, whatever kind of list they came in."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(_kept(part) for part in value)
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


@contextmanager
def _named(method: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from None


def _made(make: Callable[..., Method], settings: Mapping[str, object]) -> Method:
    return make(**settings)


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return {"name": str(value)}  # JSON has no infinity
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [_plain(one) for one in value] if isinstance(value, tuple) else {"name": _shown(value)}


def _shown(value: object) -> str:
    name = getattr(value, "name", None)
    return str(name) if isinstance(name, str) else repr(value)
