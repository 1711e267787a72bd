"""Who averages with whom, where a round is made of those who have handed something in: no schedule, nobody answered for.

What everybody knows reaches everybody only if groups change. So whoever has waited longest meets those that it has met
longest ago. Where all who are there have met lately, they wait for somebody else, but only while there is one about:
somebody who has been in a round after they were.

    four alike, one after the other   0 1 meet; 2 3 meet; 0 1 are there again, and wait for 2: 0 2 meet, 1 3 meet
    two quick ones beside a slow one  0 1 meet; 0 1 are there again: nobody else has met since, so they meet again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set


class Pool:
    """Those who have handed something in, and are in no round with it yet."""

    def __init__(self, size: int, group: int) -> None:
        self._group = group
        self._waiting: list[int] = []  # in the order in which they came
        remembered = (group - 1) * (size - 1).bit_length()
        self._lately: list[deque[int]] = [deque(maxlen=remembered) for _ in range(size)]  # whom it met, newest last
        self._last = [-1] * size  # the round it was in last

    def come(self, rank: int) -> None:
        if rank not in self._waiting:
            self._waiting.append(rank)

    def leave(self, rank: int) -> None:
        if rank in self._waiting:
            self._waiting.remove(rank)

    def gather(self, version: int, training: Set[int]) -> tuple[int, ...] | None:
        """Take those who meet in round ``version`` out of the pool; None if nobody does yet."""
        members = self._choose(training)
        if members is None:
            return None
        for rank in members:
            self._waiting.remove(rank)
            self._last[rank] = version
            self._lately[rank].extend(other for other in members if other != rank)
        return members

    def _choose(self, training: Set[int]) -> tuple[int, ...] | None:
        count = min(self._group, len(training))
        if not self._waiting or len(self._waiting) < count:
            return None
        for rank in self._waiting:
            others = self._longest_ago(rank, count - 1)
            if any(other not in self._lately[rank] for other in others):
                return tuple(sorted((rank, *others)))
        first = self._waiting[0]
        members = first, *self._longest_ago(first, count - 1)
        last = max(self._last[rank] for rank in members)
        if any(self._last[rank] > last for rank in training.difference(self._waiting)):
            return None
        return tuple(sorted(members))

    def _longest_ago(self, rank: int, count: int) -> list[int]:
        lately = {other: age for age, other in enumerate(self._lately[rank])}
        others = sorted((lately.get(other, -1), place) for place, other in enumerate(self._waiting) if other != rank)
        return [self._waiting[place] for _, place in others[:count]]
