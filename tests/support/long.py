"""The longer run, ``make long``, has everything; the one at every change leaves out what is there by another row.

Left out are rows that differ from others by their carrier or their number of workers alone, second products of a
table, and most of what is drawn. A whole test, or a row in ``parametrize``, that is left out is marked ``long``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

LONG = os.environ.get("OFFBEAT_TESTS") == "long"
C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")

long = pytest.mark.long


def unless_long(few: T, many: T) -> T:
    """``few`` at every change, ``many`` in the longer run."""
    return many if LONG else few


def every_or_in_turns(rows: Iterable[R], *columns: Sequence[C]) -> list[tuple[R, C]]:
    """Every row with every column; at every change, each row with one of each group of columns, which take turns."""
    if LONG:
        return [(row, column) for row in rows for group in columns for column in group]
    return [(row, group[(number + 1) % len(group)]) for number, row in enumerate(rows) for group in columns]
