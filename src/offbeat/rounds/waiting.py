"""Who must be there before a partial round may start."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

from offbeat.basics import draw


class Wait(Protocol):
    """A rule: may round ``version`` start, given who has arrived and who is still training?"""

    @property
    def name(self) -> str: ...

    def satisfied(self, version: int, arrived: Set[int], training: Set[int], size: int, seed: int) -> bool:
        """``arrived`` is never empty and a part of ``training``: workers that have finished do not count."""
        ...


@dataclass(frozen=True)
class First:
    """The first to arrive starts the round for everybody (the papers' *solo*)."""

    name: str = "first"

    def satisfied(self, version: int, arrived: Set[int], training: Set[int], size: int, seed: int) -> bool:
        return True


@dataclass(frozen=True)
class Majority:
    """A worker drawn for each round, alike on all, starts it when it arrives.

    A majority in expectation only: on average (P + 1)/2 workers have arrived then, but it can be one. If the drawn
    worker has finished, the first to arrive starts the round.
    """

    name: str = "majority"

    def initiator(self, version: int, size: int, seed: int) -> int:
        return draw.below(size, seed, version, 0x6D616A)

    def satisfied(self, version: int, arrived: Set[int], training: Set[int], size: int, seed: int) -> bool:
        chosen = self.initiator(version, size, seed)
        return chosen in arrived or chosen not in training


@dataclass(frozen=True)
class AtLeast:
    """A hard quorum: a number of workers, or a fraction of all (rounded up). Fewer only when fewer still train."""

    quorum: int | float

    @property
    def name(self) -> str:
        return f"at_least({self.quorum})"

    def count(self, size: int) -> int:
        return self.quorum if isinstance(self.quorum, int) else math.ceil(self.quorum * size - 1e-9)

    def satisfied(self, version: int, arrived: Set[int], training: Set[int], size: int, seed: int) -> bool:
        return len(arrived) >= min(self.count(size), len(training))


def at_least(quorum: int | float) -> AtLeast:
    """A quorum of ``quorum`` workers, or of that fraction of them: ``at_least(3)``, ``at_least(1/4)``."""
    number = isinstance(quorum, int) and not isinstance(quorum, bool) and quorum >= 1
    if not number and not (isinstance(quorum, float) and 0 < quorum <= 1):
        raise ValueError(f"a quorum of {quorum!r} means nothing; use a number of workers, or a fraction in (0, 1]")
    return AtLeast(quorum)


first, majority, everyone = First(), Majority(), AtLeast(1.0)


def rule(wait: str | int | float | Wait) -> Wait:
    """A rule from its short form: "first", "majority", "everyone", a number of workers, or a fraction of them."""
    named: dict[str, Wait] = {"first": first, "solo": first, "majority": majority, "everyone": everyone}
    if isinstance(wait, str):
        if wait not in named:
            raise ValueError(f"nobody waits {wait!r}; use 'first', 'majority', 'everyone', a number or a fraction")
        return named[wait]
    return at_least(wait) if isinstance(wait, int | float) else wait
