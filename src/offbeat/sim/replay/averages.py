"""Averages of all workers in the middle of a run, where a record says that there were some.

A worker with data stands between two steps, when it had called for the average; one without data stands where it waits
for the others. When all stand, all are made equal, and everybody goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence


class Averages:
    """Who stands. ``due``: for each worker, the steps before which it calls for one."""

    def __init__(self, due: Sequence[Sequence[int]], size: int, make_equal: Callable[[], None]) -> None:
        self._due = [deque(own) for own in due]
        self._size, self._make_equal = size, make_equal
        self._parked: list[Callable[[], None]] = []  # workers with data: how each goes on
        self._stood, self._idle = set[int](), set[int]()

    def is_due(self, rank: int, step: int) -> bool:
        return bool(self._due[rank]) and self._due[rank][0] == step

    def park(self, rank: int, go_on: Callable[[], None]) -> None:
        """A worker with data has come; it ``stands`` when it has taken what was under way."""
        self._due[rank].popleft()
        self._parked.append(go_on)

    def stands(self, rank: int) -> None:
        self._stood.add(rank)
        self._go_on()

    def idle(self, ranks: set[int]) -> None:
        """These wait without data, and stand by that."""
        self._idle = ranks
        self._go_on()

    def _go_on(self) -> None:
        """Make all equal, if all stand."""
        if not self._parked or len(self._stood | self._idle) < self._size:
            return
        waiting, self._parked = self._parked, []
        self._stood.clear()
        self._make_equal()
        for go_on in waiting:
            go_on()
