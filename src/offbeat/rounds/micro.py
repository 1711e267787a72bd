"""When a worker stops adding micro-batches to a round, and where its batches are cut."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Weighting = Literal["samples", "workers"]

USUAL_PIECES, ENOUGH_PIECES, MOST_PIECES = 8, 16, 64
LATE_SHARE, IN_TIME_SHARE = 0.75, 0.9  # of its batch that a slow worker does at most, and one in time at least
ROUNDS_TO_ADAPT = 5


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

    def is_over(self, done: int, pieces: int, rung: bool, elapsed_s: float) -> bool:
        """After ``done`` of ``pieces`` micro-batches: is this worker's part of the round over?"""
        if done >= pieces:
            return True
        if done < self.at_least:
            return False
        return rung or (self.deadline_s is not None and elapsed_s >= self.deadline_s)


def learned_deadline_s(times_s: Sequence[float], k: float = 3.0) -> float | None:
    """Median plus ``k`` median absolute deviations of the times whole batches take; None while none is known.

    Robust against up to half of the workers being slow. With no spread at all the deadline is 10 % over the median, so
    that noise alone stops nobody.
    """
    if not times_s:
        return None
    middle = statistics.median(times_s)
    spread = statistics.median(abs(t - middle) for t in times_s)
    return max(middle + k * spread, 1.1 * middle)


def adapted_micro(micro: int, parts: Sequence[tuple[int, int]]) -> int:
    """Into how many micro-batches a worker should cut its batch, after rounds in which it did (so many, of so many).

    The others wait for the one it is in when the bell rings. A worker that is usually stopped cuts so finely that it
    does 16 in a round: then that wait is within a sixteenth of it, and half of that on average. One that is usually
    through, or nearly, goes back to 8: more only cost overhead. The median of several rounds decides, so that one stall
    changes nothing.
    """
    done = statistics.median(did for did, _ in parts)
    share = statistics.median(did / of for did, of in parts)
    if share <= LATE_SHARE and done < ENOUGH_PIECES:
        while micro < MOST_PIECES and micro * share < ENOUGH_PIECES:
            micro *= 2
        return micro
    return max(USUAL_PIECES, micro // 2) if share >= IN_TIME_SHARE and micro > USUAL_PIECES else micro


def cuts(rows: int, pieces: int) -> list[tuple[int, int]]:
    """``rows`` cut into at most ``pieces`` runs of consecutive rows, as equal as possible, none of them empty."""
    pieces = max(1, min(pieces, rows))
    return list(pairwise(rows * k // pieces for k in range(pieces + 1))) if rows else []


def checked(costs: Sequence[float]) -> Sequence[float]:
    """Costs that can be compared and added."""
    for cost in costs:
        if not math.isfinite(cost) or cost < 0:
            raise ValueError(f"a sample cannot cost {cost}; let cost= give a number of 0 or more")
    return costs


def cuts_by_cost(costs: Sequence[float], pieces: int) -> list[tuple[int, int]]:
    """Runs of consecutive rows of about equal cost, none of them empty; a cut comes where the row's middle would."""
    rows, total = len(costs), math.fsum(checked(costs))
    if total <= 0:
        return cuts(rows, pieces)
    pieces = max(1, min(pieces, rows))
    bounds, spent, row = [0], 0.0, 0
    for k in range(1, pieces):
        last = rows - (pieces - k)  # every later run needs a row
        while row < last and (row <= bounds[-1] or spent + costs[row] / 2 < total * k / pieces):
            spent += costs[row]
            row += 1
        bounds.append(row)
    return list(pairwise([*bounds, rows]))


class Leftover:
    """What is left of a batch: its rows from ``lo`` on, cut anew whenever the number of micro-batches changes."""

    def __init__(self, rows: int, costs: Sequence[float] | None = None) -> None:
        self.rows, self.lo, self._costs = rows, 0, costs if costs is None else checked(costs)
        self._micro, self._ends = 0, list[int]()

    def _cut(self, micro: int) -> list[int]:
        if micro != self._micro:
            runs = cuts(self.rows, micro) if self._costs is None else cuts_by_cost(self._costs, micro)
            self._micro, self._ends = micro, [hi for _, hi in runs]
        return self._ends

    def whole(self, micro: int) -> int:
        """How many micro-batches the whole batch makes."""
        return len(self._cut(micro))

    def pieces(self, micro: int) -> int:
        """How many micro-batches are left."""
        return sum(hi > self.lo for hi in self._cut(micro))

    def first(self, micro: int) -> tuple[int, int]:
        """The rows of the next micro-batch. Setting ``lo`` to their end takes it."""
        return self.lo, next(hi for hi in self._cut(micro) if hi > self.lo)

    @property
    def left(self) -> int:
        """Rows that are left."""
        return self.rows - self.lo


class Supply:
    """A worker's batches in order, from the ``first`` on: it runs on where it stopped, whatever the rounds do."""

    def __init__(self, first: int = 0) -> None:
        self._waiting: list[Leftover] = []
        self._added = first  # the number of the next one

    def add(self, rows: int, costs: Sequence[float] | None = None) -> None:
        """Put a batch behind what is waiting."""
        self._waiting.append(Leftover(rows, costs))
        self._added += 1

    @property
    def left(self) -> int:
        """Samples that were not reached yet."""
        return sum(batch.left for batch in self._waiting)

    @property
    def batches(self) -> int:
        """How many of them have something left."""
        return len(self._waiting)

    def pieces(self, micro: int) -> int:
        """How many micro-batches wait."""
        return sum(batch.pieces(micro) for batch in self._waiting)

    def quota(self, micro: int) -> int:
        """How many make a round: ``micro``, or fewer where the batch in front has fewer samples than that."""
        return min(micro, self._waiting[0].whole(micro)) if self._waiting else 0

    def enough(self, micro: int) -> bool:
        """Whether what waits makes a round by itself."""
        return bool(self._waiting) and self.pieces(micro) >= self.quota(micro)

    def is_through(self, done: int, at_most: int) -> bool:
        """Whether a round is over for want of micro-batches: a short batch behind leftovers may not make one."""
        return done >= at_most or not self._waiting

    def first(self, micro: int) -> tuple[int, int, int]:
        """The next micro-batch: the number of its batch, its first row, and the row behind its last."""
        return self._added - len(self._waiting), *self._waiting[0].first(micro)

    def whole(self, micro: int) -> int:
        """How many micro-batches the batch in front makes, or made."""
        return self._waiting[0].whole(micro)

    @property
    def front(self) -> Leftover:
        """The batch in front."""
        return self._waiting[0]

    def take(self, hi: int) -> bool:
        """The next micro-batch, up to row ``hi``, is done. Whether that was the end of its batch."""
        self._waiting[0].lo = hi
        if self._waiting[0].left:
            return False
        del self._waiting[0]
        return True
