"""How long a round that may start waits for those who are about to come: the grace window.

A round that has begun when the one before it started, and for which ``a`` have arrived after ``t`` seconds, brings a/t
contributions a second that are in time. It is worth waiting for one more until the time s if (a + 1)/s is more than
that; and where results are late, so that nobody waits for them yet, until the first of those who are there comes
again. When another one comes is not known, but when it came the last times is. So nobody is waited for of whom nothing
is known or whose work is too old to be in time, nobody longer than it usually takes and a tenth more, and nobody for
longer than would pay if all the others came at that moment.

Times are given, in seconds of any clock: the simulator's, or the first host process's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from typing import Literal

Window = float | Literal["auto"]

REMEMBERED = 5  # times between two arrivals of a worker, of which the middle one is what it usually takes
MORE = 1.1  # of that, until it is given up


def checked_window(grace: Window) -> Window:
    """A window that can be waited for."""
    if grace == "auto" or (
        isinstance(grace, int | float) and not isinstance(grace, bool) and 0 <= grace < float("inf")
    ):
        return grace
    raise ValueError(f"a grace of {grace!r} means nothing; use seconds, 0 or more, or 'auto'")


def worth_waiting_until_s(
    now_s: float, begun_s: float, arrived: int, expected_s: Iterable[float], free_s: float = 0.0
) -> float:
    """Until when to wait so that as many as possible arrive in a second; ``expected_s``: when each other one comes.

    ``free_s``: until when nobody minds.
    """
    until_s = now_s
    best = arrived / (now_s - begun_s) if now_s > begun_s else float("inf")
    for more, comes_s in enumerate(sorted(s for s in expected_s if s > now_s), 1):
        in_a_second = (arrived + more) / (comes_s - begun_s)
        if comes_s <= free_s or in_a_second > best:
            best, until_s = max(best, in_a_second), comes_s
    return until_s


class Grace:
    """The window of one channel, and what is measured for it."""

    def __init__(self, size: int, window: Window, late: int = 0) -> None:
        self._window, self._late = window, late
        self._came_s: list[float | None] = [None] * size
        self._between_s: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(size)]
        self._begun_s: float | None = None  # when the last round started
        self._quorum_s: float | None = None  # since when the next one may

    def came(self, rank: int, now_s: float) -> None:
        """It has deposited something, in time or not."""
        before_s, self._came_s[rank] = self._came_s[rank], now_s
        if before_s is not None:
            self._between_s[rank].append(now_s - before_s)

    def started(self, now_s: float) -> None:
        self._begun_s, self._quorum_s = now_s, None

    def not_yet(self) -> None:
        """The quorum is not there, or no longer."""
        self._quorum_s = None

    def until_s(self, now_s: float, arrived: Set[int], missing: Iterable[int]) -> float:
        """When a round that may start now starts at the latest; it may before, if all come.

        ``missing``: those who would be in time.
        """
        if self._quorum_s is None:
            self._quorum_s = now_s
        if self._window != "auto":
            return self._quorum_s + self._window
        if self._begun_s is None:
            return now_s
        expected = [s for rank in missing if (s := self._expected_s(rank, MORE)) is not None]
        again = [s for rank in arrived if (s := self._expected_s(rank)) is not None]
        free_s = min(again) if self._late and len(again) == len(arrived) else now_s
        return worth_waiting_until_s(now_s, self._begun_s, len(arrived), expected, free_s)

    def _expected_s(self, rank: int, times: float = 1.0) -> float | None:
        came_s, between = self._came_s[rank], sorted(self._between_s[rank])
        return None if came_s is None or not between else came_s + times * between[len(between) // 2]
