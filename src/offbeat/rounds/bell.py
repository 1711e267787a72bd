"""When the bell of a round rings: counting, without I/O, clock or thread."""

from __future__ import annotations

from collections import Counter


class Rope:
    """Counts who is through a round."""

    def __init__(self) -> None:
        self._pulls: Counter[int] = Counter()

    def pull(self, r: int, enough: int) -> bool:
        """One more worker is through its batch of round ``r``. Whether the bell rings now: for the ``enough``-th.

        Rounds before it are over, so that nothing of them needs to be kept.
        """
        self._pulls[r] += 1
        if self._pulls[r] != enough:
            return False
        self._pulls = Counter({later: count for later, count in self._pulls.items() if later >= r})
        return True
