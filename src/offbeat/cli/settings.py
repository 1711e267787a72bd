"""Strategies as words: ``local_sgd:period=4,codec=qsgd8``. What a word means, the factory's annotations say."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.method.strategy import Strategy, unknown_setting
from offbeat.strategies import STRATEGIES, strategy
from offbeat.tensors import codec

_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")


def read_strategy(words: str, more: Sequence[str] = (), codec_name: str | None = None) -> Strategy:
    """The strategy that ``NAME`` or ``NAME:setting=value,setting=value`` stands for.

    ``more`` are further ``setting=value`` pairs (``--set``), ``codec_name`` is short for one of them.
    """
    name, _, inline = words.partition(":")
    name = name.strip()
    if name not in STRATEGIES:
        strategy(name)  # raises the sentence that names those there are
    pairs = [pair for pair in inline.split(",") if pair.strip()] + list(more)
    if codec_name is not None:
        pairs.append(f"codec={codec_name}")
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ValueError(
                f"the setting {pair.strip()!r} is not understood; write it as name=value, such as period=8"
            )
        if key in given:
            raise ValueError(f"{key} is given twice, as {given[key]!r} and {value!r}; leave one of them out")
        given[key] = value
    kinds = _kinds(name)
    return strategy(name, **{key: _read(name, key, value, kinds) for key, value in given.items()})


def defaults(name: str) -> dict[str, object]:
    """The settings of a method, with the values they have if nothing is said."""
    return {p.name: p.default for p in inspect.signature(STRATEGIES[name].make).parameters.values()}


def label(made: Strategy) -> str:
    """The strategy with the settings that are not the method's defaults."""
    usual = defaults(made.name)
    other = [f"{key}={shown(value)}" for key, value in made.settings.items() if value != usual.get(key)]
    return " ".join([made.name, *other])


def shown(value: object) -> str:
    """A setting as it is written on the command line."""
    return str(plain(value)) if value is not None else "none"


def plain(value: object) -> object:
    """A setting as JSON holds it: a codec by its name, a graph as a list of edges."""
    if isinstance(value, codec.Codec):
        return value.name
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def plain_settings(settings: Mapping[str, object]) -> dict[str, object]:
    return {key: plain(value) for key, value in settings.items()}


def _kinds(name: str) -> dict[str, tuple[Any, ...]]:
    """For each setting, the types it may have."""
    hints = typing.get_type_hints(STRATEGIES[name].make)
    hints.pop("return", None)
    return {key: _members(hint) for key, hint in hints.items()}


def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(hint) for member in _members(part))
    return (hint,)


def _read(name: str, key: str, text: str, kinds: Mapping[str, tuple[Any, ...]]) -> object:
    if key not in kinds:
        raise ValueError(unknown_setting(name, key, kinds))
    kind, word = kinds[key], text.lower()
    if types.NoneType in kind and word == "none":
        return None
    choices = _choices(kind)
    if text in choices:
        return text
    if bool in kind and word in _YES + _NO:
        return word in _YES
    for number in (int, float):
        if number in kind:
            try:
                return number(text)
            except ValueError:
                continue
    if codec.Codec in kind:
        return codec.parse(text)
    if str in kind:
        return text
    others = [other for other in kinds if text in _choices(kinds[other])]
    hint = f"; did you mean {others[0]}={text}?" if len(others) == 1 else ""
    raise ValueError(f"{name}: {key} is {text!r}, but must be {_wanted(kind, choices)}{hint}")


def _choices(kind: tuple[Any, ...]) -> list[object]:
    """The words that a setting of these types may be."""
    return [choice for k in kind if typing.get_origin(k) is typing.Literal for choice in typing.get_args(k)]


def _wanted(kind: tuple[Any, ...], choices: Sequence[object]) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "none"}
    words = [names[k] for k in kind if k in names and not (k is int and float in kind)]
    *rest, last = [*map(str, choices), *words] or ["something else"]
    return f"{', '.join(rest)} or {last}" if rest else last
