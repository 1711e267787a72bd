"""Methods and settings as they are printed and written."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping

from offbeat.method.strategy import Method
from offbeat.strategies import METHODS
from offbeat.tensors import codec


def defaults(name: str) -> dict[str, object]:
    """The settings of a method, with the values they have if nothing is said."""
    return {p.name: p.default for p in inspect.signature(METHODS[name].make).parameters.values()}


def label(made: Method) -> str:
    """The method with the settings that are not the method's defaults."""
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
