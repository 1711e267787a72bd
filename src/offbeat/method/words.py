"""Settings as words: ``period=4``, ``codec=int8``. What a word means, the annotations of the method's function say."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from offbeat.tensors import codec

_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")

Kinds = Mapping[str, tuple[Any, ...]]  # for each setting, the types it may have


def kinds_of(make: Callable[..., object]) -> Kinds:
    """The types that each setting of a method may have."""
    hints = typing.get_type_hints(make)
    hints.pop("return", None)
    return {key: _members(hint) for key, hint in hints.items()}


def unknown_setting(name: str, key: str, known: Iterable[str]) -> str:
    """The sentence for a setting that a method does not have."""
    known = list(known)
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{name} has no setting {key!r}; {hint}it has {', '.join(known) or 'none'}"


def read_settings(name: str, kinds: Kinds, pairs: Iterable[str]) -> dict[str, object]:
    """The settings of the method called ``name`` that words such as ``period=4`` stand for."""
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ValueError(
                f"the setting {pair.strip()!r} is not understood; write it as name=value, such as period=8"
            )
        if key in given:
            raise ValueError(given_twice(key, given[key], value))
        given[key] = value
    return {key: _read(name, key, value, kinds) for key, value in given.items()}


def given_twice(key: str, first: object, second: object) -> str:
    """The sentence for a setting that was given in two places."""
    return f"{key} is given twice, as {first!r} and {second!r}; leave one of them out"


def codec_of(value: object, kind: tuple[Any, ...]) -> object:
    """A codec for its name, where a setting of these types may be one; what is no name stays what it is."""
    if not isinstance(value, str) or codec.Codec not in kind or value in _choices(kind):
        return value
    try:
        return codec.parse(value)
    except ValueError as error:
        raise ValueError("".join([str(error), *(f", or {choice}" for choice in _choices(kind))])) from None


def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(hint) for member in _members(part))
    return (hint,)


def _read(name: str, key: str, text: str, kinds: Kinds) -> object:
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
    if codec.Codec in kind or str in kind:
        return text  # the method itself reads a codec's name
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
