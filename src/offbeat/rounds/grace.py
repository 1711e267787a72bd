"""How long a round that may start waits for those who are about to come: the grace window.

A round that has begun when the one before it started, and in which the a-th has come after t seconds, brings a/t
contributions a second that are in time. It is worth waiting for one more until (a + 1)/s is no more than that, so until
s = t (a + 1)/a; and where results are late, so that nobody waits for them yet, until the first of those who are there
comes again. When another one comes is not known, but when it came the last times is. So nobody is waited for who
usually comes later than that, of whom nothing is known, or whose work is too old to be in time; nobody longer than half
as long again as it usually takes, and nobody for longer than would pay if all the others came at that moment.

Times are given, in seconds of any clock: the simulator's, or the first host process's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from typing import Literal

Window = float | Literal["auto"]

REMEMBERED = 5  # times between two arrivals of a worker, of which the middle one is what it usually takes
MORE = 1.5  # of that, until it is given up where waiting would pay for longer


def checked_window(grace: Window) -> Window:
    """A window that can be waited for."""
    if grace == "auto" or (
        isinstance(grace, int | float) and not isinstance(grace, bool) and 0 <= grace < float("inf")
    ):
        return grace
    raise ValueError(f"a grace of {grace!r} means nothing; use seconds, 0 or more, or 'auto'")


def worth_waiting_until_s(
    now_s: float,
    begun_s: float,
    came_s: Iterable[float],
    others_s: Iterable[tuple[float, float]],
    free_s: float = 0.0,
) -> float:
    """Until when to wait so that as many as possible arrive in a second.

    ``came_s``: when those came who are there; ``others_s``: when each other one usually comes, and when it is given
    up. ``free_s``: until when nobody minds.
    """
    took_s = [max(s - begun_s, 0.0) for s in sorted(came_s)]
    # What each of them would take if they had come as evenly as the best of them.
    each_s = min((s / k for k, s in enumerate(took_s, 1)), default=0.0)
    until_s = now_s
    for count, (usual_s, last_s) in enumerate(sorted(o for o in others_s if o[1] > now_s), len(took_s) + 1):
        pays_s = max(free_s, begun_s + count * each_s)
        if max(usual_s, now_s) < pays_s:
            until_s = max(until_s, min(last_s, pays_s))
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

    def forget(self, rank: int) -> None:
        """It is another process now, and may take another time."""
        self._came_s[rank] = None
        self._between_s[rank].clear()

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
        others = [times for rank in missing if (times := self._expected_s(rank)) is not None]
        again = [times[0] for rank in arrived if (times := self._expected_s(rank)) is not None]
        free_s = min(again) if self._late and len(again) == len(arrived) else now_s
        came = [s for rank in arrived if (s := self._came_s[rank]) is not None]
        return worth_waiting_until_s(now_s, self._begun_s, came, others, free_s)

    def _expected_s(self, rank: int) -> tuple[float, float] | None:
        """When it usually comes again, and when it is given up."""
        came_s, between = self._came_s[rank], sorted(self._between_s[rank])
        if came_s is None or not between:
            return None
        usual_s = between[len(between) // 2]
        return came_s + usual_s, came_s + MORE * usual_s
