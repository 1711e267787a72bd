"""When a worker stops adding micro-batches to a round: the bell, a deadline, or its batch is done."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Stop:
    """The rule of a round. One's own batch done always ends one's own part.

    ``workers``: the bell rings for all when so many workers have done their whole batch (None: never).
    ``deadline_s``: one stops by oneself when so long has passed since one began the round.
    ``at_least``: micro-batches that one does in any case.
    """

    workers: int | None = 1
    deadline_s: float | None = None
    at_least: int = 1

    def is_over(self, done: int, micro: int, rung: bool, elapsed_s: float) -> bool:
        """After ``done`` of ``micro`` micro-batches: is this worker's part of the round over?"""
        if done >= micro:
            return True
        if done < self.at_least:
            return False
        return rung or (self.deadline_s is not None and elapsed_s >= self.deadline_s)


def learned_deadline_s(times_s: Sequence[float], k: float = 3.0) -> float | None:
    """Median plus ``k`` median absolute deviations of the times whole batches took; None while none is known.

    Robust against up to half of the workers being slow. With no spread at all the deadline is 10 % over the median, so
    that noise alone stops nobody.
    """
    if not times_s:
        return None
    middle = statistics.median(times_s)
    spread = statistics.median(abs(t - middle) for t in times_s)
    return max(middle + k * spread, 1.1 * middle)


def cuts(rows: int, pieces: int) -> list[tuple[int, int]]:
    """``rows`` cut into at most ``pieces`` runs of consecutive rows, as equal as possible, none of them empty."""
    pieces = max(1, min(pieces, rows))
    bounds = [rows * k // pieces for k in range(pieces + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def cuts_by_cost(costs: Sequence[float], pieces: int) -> list[tuple[int, int]]:
    """Runs of consecutive rows of about equal cost, none of them empty."""
    rows, total = len(costs), float(sum(costs))
    if total <= 0:
        return cuts(rows, pieces)
    pieces = max(1, min(pieces, rows))
    bounds, spent, row = [0], 0.0, 0
    for k in range(1, pieces):
        while row < rows - (pieces - k) and (spent + costs[row] / 2 < total * k / pieces or row <= bounds[-1] - 1):
            spent += costs[row]
            row += 1
        if row <= bounds[-1]:
            spent += costs[row]
            row = bounds[-1] + 1
        bounds.append(row)
    return list(zip([*bounds], [*bounds[1:], rows], strict=True))


MOST_PIECES = 64


def adapted_micro(micro: int, fewest: int) -> int:
    """How many micro-batches to cut a batch into, after a round in which the slowest worker did ``fewest``.

    The others wait for one micro-batch of the slowest worker at most, so it should do at least 8 in a round: then the
    wait is within an eighth of it. More than 16 only cost overhead. With nobody late the number stays at 8 … 16.
    """
    if fewest < 8:
        return min(MOST_PIECES, 2 * micro)
    return max(8, micro // 2) if fewest > 16 else micro


Weighting = Literal["samples", "workers"]
