"""Who averages with whom, where a round is made of those who have handed in: no schedule, nobody answered for.

What everybody knows reaches everybody only if groups change. So whoever has waited longest meets those that it has met
longest ago, or not lately: a drawn one of these. Where all who are there have met lately, they wait for somebody else,
but only while there is one about: somebody who has been in a round after they were. "Lately" reaches back over half as
many as there are. With less, sixteen who always came in the same order would make two circles that never meet.

    four alike, one after the other   0 1 meet; 2 3 meet; 0 1 are there again, and wait for 2: 0 2 meet, 1 3 meet
    two quick ones beside a slow one  0 1 meet; 0 1 are there again: nobody else has met since, so they meet again

**Drawing.** Where messages are quick, whoever comes finds nobody there: the others compute. With ``draws`` it then
meets one of these, and after that another, each time one that it has not met lately, and of these the one that has been
in no round for longest. Messages are quick while at most an eighth of all are in a round. Nobody is in two rounds at
once, so that one that is stopped holds up those that it was in a round with, and nobody else. Without that:

    A comes, draws B, is stopped       the sum of A and B waits for A
    B comes; C is there: B and C meet  behind the round of A and B
    C is not through; D draws C        and so on

For the same reason every member says for itself that its exchange is over. After all have stood nobody draws before a
step is over: each has asked how many rounds it has a part in, and one more would end in the middle of their average.
"""

from __future__ import annotations

from collections.abc import Set

from offbeat.basics import draw

QUICK = 0.125  # of all workers may be in a round where somebody draws


class Pool:
    """Those who have handed something in, and are in no round with it yet."""

    def __init__(self, size: int, group: int, seed: int, draws: int = 0) -> None:
        self._group, self._seed, self._draws, self._most = group, seed, draws, QUICK * size
        self._waiting: list[int] = []  # in the order in which they came
        self._lately: list[list[int]] = [[] for _ in range(size)]  # whom it met, newest last
        self._remembered = max(1, size // 2)
        self._last = [-1] * size  # the round it was in last
        self._in_rounds = [0] * size  # how many rounds it is in that are not over, where there are draws
        self._busy: set[int] = set()  # those who are in one
        self._may_draw: dict[int, int] = {}  # those who have come and met somebody, and how many more they may draw

    def come(self, rank: int) -> None:
        if rank not in self._waiting:
            self._waiting.append(rank)
            self._may_draw.pop(rank, None)

    def leave(self, rank: int) -> None:
        if rank in self._waiting:
            self._waiting.remove(rank)
        self._may_draw.pop(rank, None)

    def over(self, rank: int) -> None:
        """A round that it was in is over."""
        self._in_rounds[rank] -= 1
        if not self._in_rounds[rank]:
            self._busy.discard(rank)

    def begin_anew(self, rank: int) -> None:
        """It is another process now, which was in none of the rounds there have been."""
        self._in_rounds[rank] = 0
        self._busy.discard(rank)

    def gather(
        self, version: int, training: Set[int], quorum: bool = True, still: bool = False
    ) -> tuple[int, ...] | None:
        """Take those who meet in round ``version`` out of the pool; None if nobody does yet.

        Without a ``quorum`` only who draws another meets anybody. ``still``: nobody draws, and those who are there meet
        now, whatever else they are in: later would be too late.
        """
        members = self._choose(version, training, set() if still else self._busy) if quorum else None
        if members is None and not still:
            members = self._draw(version, training)
        if members is None:
            return None
        for rank in members:
            if rank in self._waiting:
                self._waiting.remove(rank)
            self._last[rank] = version
            met = [other for other in self._lately[rank] if other not in members]
            self._lately[rank] = [*met, *(other for other in members if other != rank)][-self._remembered :]
        if self._draws:
            self._busy.update(members)
            for rank in members:
                self._in_rounds[rank] += 1
        return members

    def _draw(self, version: int, training: Set[int]) -> tuple[int, ...] | None:
        """One who is there, or was a moment ago, and one who computes."""
        if not self._draws or len(self._busy) > self._most:
            return None
        free = sorted(training - self._busy - set(self._waiting))
        turn = draw.below(len(free), self._seed, version, 0x64726177) if free else 0
        for rank in [*self._waiting, *self._may_draw]:
            others = [other for other in free[turn:] + free[:turn] if other != rank]
            if rank in self._busy or rank not in training or not others:
                continue
            left = self._draws if rank in self._waiting else self._may_draw.pop(rank)
            if left > 1:
                self._may_draw[rank] = left - 1
            other = min(others, key=lambda other: (other in self._lately[rank], self._last[other]))
            return (rank, other) if rank < other else (other, rank)
        return None

    def _choose(self, version: int, training: Set[int], busy: Set[int]) -> tuple[int, ...] | None:
        count = min(self._group, len(training))
        here = [rank for rank in self._waiting if rank not in busy]
        if not here or len(here) < count:
            return None
        if count == 1:
            return (here[0],)
        for rank in here:
            others = self._longest_ago(rank, here, count - 1, version)
            if any(other not in self._lately[rank] for other in others):
                return tuple(sorted((rank, *others)))
        members = here[0], *self._longest_ago(here[0], here, count - 1, version)
        last = max(self._last[rank] for rank in members)
        if any(self._last[rank] > last for rank in training - set(self._waiting)):
            return None
        return tuple(sorted(members))

    def _longest_ago(self, rank: int, here: list[int], count: int, version: int) -> list[int]:
        lately = {other: age for age, other in enumerate(self._lately[rank])}
        others = [other for other in here if other != rank]
        turn = draw.below(len(others), self._seed, version, 0x706F6F6C)
        return sorted(others[turn:] + others[:turn], key=lambda other: lately.get(other, -1))[:count]
