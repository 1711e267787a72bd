"""When the bell of a round rings: counting, without I/O, clock or thread."""

from __future__ import annotations

from collections import Counter


class Rope:
    """Counts who is through a round."""

    def __init__(self, workers: int) -> None:
        self._workers = workers  # who can pull
        self._pulls: Counter[int] = Counter()
        self._enough: dict[int, int] = {}
        self._rung = -1

    def pull(self, r: int, enough: int) -> bool:
        """One more worker is through its batch of round ``r``. Whether the bell rings now: for the ``enough``-th.

        Rounds before it are over, so that nothing of them needs to be kept.
        """
        self._pulls[r] += 1
        self._enough[r] = min(enough, self._enough.get(r, enough))
        return self._rings(r)

    def one_less(self) -> list[int]:
        """Somebody can pull no more. The rounds whose bell rings now: all who are left have pulled."""
        self._workers -= 1
        return [r for r in sorted(self._enough) if self._rings(r)]

    def one_more(self, r: int) -> None:
        """Somebody else can pull, who is in no round up to ``r``."""
        self._enough = {one: min(enough, self._workers) if one <= r else enough for one, enough in self._enough.items()}
        self._workers += 1

    def _rings(self, r: int) -> bool:
        if r <= self._rung or self._pulls[r] < min(self._enough[r], self._workers):
            return False
        self._rung = r
        self._pulls = Counter({later: count for later, count in self._pulls.items() if later > r})
        self._enough = {later: enough for later, enough in self._enough.items() if later > r}
        return True
