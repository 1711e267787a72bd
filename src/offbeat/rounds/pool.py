"""Who averages with whom, where a round is made of those who have handed in: no schedule, nobody answered for.

What everybody knows reaches everybody only if groups change. So whoever has waited longest meets those that it has met
longest ago, or not lately: a drawn one of these. Where all who are there have met lately, they wait for somebody else,
but only while there is one about: somebody who has been in a round after they were. "Lately" reaches back over half as
many as there are. With less, sixteen who always came in the same order would make two circles that never meet.

    four alike, one after the other   0 1 meet; 2 3 meet; 0 1 are there again, and wait for 2: 0 2 meet, 1 3 meet
    two quick ones beside a slow one  0 1 meet; 0 1 are there again: nobody else has met since, so they meet again
"""

from __future__ import annotations

from collections.abc import Set

from offbeat.basics import draw


class Pool:
    """Those who have handed something in, and are in no round with it yet."""

    def __init__(self, size: int, group: int, seed: int) -> None:
        self._group, self._seed = group, seed
        self._waiting: list[int] = []  # in the order in which they came
        self._lately: list[list[int]] = [[] for _ in range(size)]  # whom it met, newest last
        self._remembered = max(1, size // 2)
        self._last = [-1] * size  # the round it was in last

    def come(self, rank: int) -> None:
        if rank not in self._waiting:
            self._waiting.append(rank)

    def leave(self, rank: int) -> None:
        if rank in self._waiting:
            self._waiting.remove(rank)

    def gather(self, version: int, training: Set[int]) -> tuple[int, ...] | None:
        """Take those who meet in round ``version`` out of the pool; None if nobody does yet."""
        members = self._choose(version, training)
        if members is None:
            return None
        for rank in members:
            self._waiting.remove(rank)
            self._last[rank] = version
            met = [other for other in self._lately[rank] if other not in members]
            self._lately[rank] = [*met, *(other for other in members if other != rank)][-self._remembered :]
        return members

    def _choose(self, version: int, training: Set[int]) -> tuple[int, ...] | None:
        count = min(self._group, len(training))
        if not self._waiting or len(self._waiting) < count:
            return None
        if count == 1:
            return (self._waiting[0],)
        for rank in self._waiting:
            others = self._longest_ago(rank, count - 1, version)
            if any(other not in self._lately[rank] for other in others):
                return tuple(sorted((rank, *others)))
        first = self._waiting[0]
        members = first, *self._longest_ago(first, count - 1, version)
        last = max(self._last[rank] for rank in members)
        if any(self._last[rank] > last for rank in training - set(self._waiting)):
            return None
        return tuple(sorted(members))

    def _longest_ago(self, rank: int, count: int, version: int) -> list[int]:
        lately = {other: age for age, other in enumerate(self._lately[rank])}
        others = [other for other in self._waiting if other != rank]
        turn = draw.below(len(others), self._seed, version, 0x706F6F6C)
        return sorted(others[turn:] + others[:turn], key=lambda other: lately.get(other, -1))[:count]
