"""What a hub answers to a worker, as the worker keeps it: sums to be made, and results that stand on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offbeat.live.partial.stacks import Home
from offbeat.rounds.seat import Event
from offbeat.tensors.vector import Vec

Ref = tuple[int, int, float]  # (member, slot, factor), or (−1, which sum of the list, factor)


class Recipe(NamedTuple):
    """A sum as the hub tells of it."""

    home: Home
    number: int
    complete: bool
    private: bool  # each adder makes all of it for itself; the first of them where all can read it, too
    summers: tuple[int, ...]
    divisor: int
    terms: list[list[Ref]]

    @property
    def parts(self) -> range:
        """The stretches that make it up, where all can read it."""
        return range(1 if self.private else len(self.summers))


class Answer(NamedTuple):
    """What the hub answers."""

    how: str
    about: Any
    sums: list[Any]
    results: list[tuple[list[Ref], Any]]
    free_then: list[tuple[int, Home]]  # (which sum, a slot of mine that is free when it is complete)
    freed: list[Home]
    gone: list[Home]  # slots of mine that the hub has taken back: nothing reads them, and nor do I
    news: list[Any]
    events: list[Event]


@dataclass
class Delivery:
    """An answer, the sums it tells of, those that this worker has for itself, and memory that holds such."""

    answer: Answer
    sums: list[Recipe]
    since_s: float
    read: bool | None = True  # None: not yet; True: it may be read now; False: it is read no longer
    is_made: bool = False  # as far as this worker has a part in it
    parts: set[int] = field(default_factory=set)  # sums of which this worker makes one; on a GPU it may be at it still
    made: dict[int, Vec] = field(default_factory=dict)
    memory: list[Vec] = field(default_factory=list)
    lent: list[int] = field(init=False)  # sums that the hub keeps for me: the same ones in the same order as there

    def __post_init__(self) -> None:
        self.lent = list(range(len(self.sums)))

    @property
    def results(self) -> set[int]:
        """The sums that are results themselves; others only go into them."""
        return {k for refs, _ in self.answer.results for member, k, _ in refs if member < 0}

    @property
    def deposits(self) -> set[Home]:
        """Slots that are to be added to a sum to make a result: its worker's own, nobody else's lie there."""
        return {(member, slot) for refs, _ in self.answer.results for member, slot, _ in refs if member >= 0}
