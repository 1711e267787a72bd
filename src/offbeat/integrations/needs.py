"""A trainer that is missing, or too old, gets a sentence."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def needed(package: str, at_least: str, extra: str) -> None:
    """Refuse to go on without ``package``, in a version that has what we use."""
    way_out = f"pip install 'offbeat[{extra}]'"
    try:
        seen = version(package)
    except PackageNotFoundError:
        raise ImportError(
            f"offbeat.integrations.{extra} needs {package} {at_least} or newer, which is not installed; {way_out}"
        ) from None
    if _numbers(seen) < _numbers(at_least):
        raise ImportError(f"offbeat.integrations.{extra} needs {package} {at_least} or newer, not {seen}; {way_out}")


def trainer(module: str, package: str, at_least: str, extra: str) -> Any:
    """The module of a trainer, of any type: Offbeat is checked without it."""
    needed(package, at_least, extra)
    return importlib.import_module(module)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
