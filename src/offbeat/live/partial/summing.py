"""What a worker adds up: its parts of the sums that it is told of, and the vectors that it reads of them.

A sum's slot is written by its adders, each its own stretch, and a stretch is read after its flag is up. Whoever finds
that an adder does not get on (it may have been stopped) makes the sum itself, in memory of its own, from the same
deposits. They were still whole if that adder's flag is still down afterwards: their owners wait for it.

A worker's second thread makes sums while the worker reads others. ``_books`` protects the spare memory that both take
from: without it, one vector could be given to two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from offbeat.live.carriers.adding import Unadded, add_up, stretch
from offbeat.live.carriers.memory import nap
from offbeat.live.carriers.shelves import Shelves
from offbeat.live.partial.stacks import Home
from offbeat.live.partial.told import Delivery, Recipe, Ref
from offbeat.tensors.vector import Used, Vec

GRACE_S = 0.02  # for another adder, beside what the sum may take
SLOW_BYTES_S, DEVICE_BYTES_S = 0.5e9, 5e9
KEPT_BYTES = 1 << 20  # of a vector: longer ones are needed where an adder does not get on, and then seldom


class Sums:
    """One worker's adding and reading; ``rank`` is how the hub knows it.

    ``waits``: until a sum that it makes is there. On a GPU it is quicker not to; but then workers are at the same point
    of their steps more often, and need more memory at one time.
    """

    def __init__(self, shelves: Shelves, rank: int, waits: bool = False) -> None:
        self._shelves, self._rank, self._waits = shelves, rank, waits
        self._spare: list[Vec] = []
        self._under_way: dict[Home, int] = {}  # by slot, the last sum that I was at; on a GPU I may be still
        self._books = threading.Lock()

    def is_there(self, recipe: Recipe) -> bool:
        """Whether all parts of a sum are."""
        return recipe.complete or self._shelves.raised(*recipe.home, recipe.parts, recipe.number)

    def all_there(self, told: Delivery) -> bool:
        """Whether nobody else's part is missing."""
        return all(k in told.made or self.is_there(recipe) for k, recipe in enumerate(told.sums))

    # Adding.

    def make(self, told: Delivery) -> None:
        """My parts."""
        for k, recipe in enumerate(told.sums):
            if self._is_mine_to_make(recipe):
                self._make(k, told)

    def _is_mine_to_make(self, recipe: Recipe) -> bool:
        """Not a second time, if I am told again of a sum before I could say that it is there: its deposits may have
        been written over as soon as it was."""
        if recipe.complete or self._rank not in recipe.summers or self._under_way.get(recipe.home, -1) >= recipe.number:
            return False
        return not self._is_made(recipe)

    def _part(self, recipe: Recipe) -> int:
        return 0 if recipe.private else recipe.summers.index(self._rank)

    def _is_made(self, recipe: Recipe) -> bool:
        return self._shelves.raised(*recipe.home, [self._part(recipe)], recipe.number)

    def still_making(self, told: Delivery) -> set[int]:
        """Sums in whose slots I am still writing: on a GPU, work that was asked for comes later."""
        return {k for k in told.parts if not self._is_made(told.sums[k])}

    def _make(self, k: int, told: Delivery) -> None:
        """My part of a sum."""
        recipe = told.sums[k]
        member, slot = recipe.home
        owner = member == self._rank
        if recipe.private and not owner:
            out = told.made[k] = self._memory(told)
        else:
            out = self._shelves.vec(member, slot)
        terms = self._readable(recipe.terms, told)
        part, hands = self._part(recipe), self._shelves.hands
        for p, tensor in enumerate(out.parts):
            lo, hi = stretch(tensor.numel(), part, len(recipe.parts))
            add_up(tensor, [[(v.parts[p], f) for v, f in term] for term in terms], recipe.divisor, lo, hi, hands)
        used = self.used(recipe.terms, told.sums) if part == 0 else None
        if recipe.private and not owner:
            out.used = used
            return
        if part == 0:
            self._shelves.note_used(member, slot, used)
        self._under_way[recipe.home] = recipe.number
        self._shelves.raise_flag(member, slot, part, recipe.number, waits=self._waits)
        told.parts.add(k)
        if told.read and len(recipe.parts) == 1:  # whoever reads it asks for that behind this
            out.used = used
            told.made[k] = out

    def add(self, places: Sequence[Ref], out: Vec | None = None) -> Vec:
        """What these slots hold together, in ``out`` or in fresh memory."""
        out = self._like() if out is None else out
        for p, tensor in enumerate(out.parts):
            term = [(self._shelves.vec(m, k).parts[p], f) for m, k, f in places]
            add_up(tensor, [term], 1, hands=self._shelves.hands)
        out.used = self.used([places], [])
        return out

    def used(self, terms: Sequence[Sequence[Ref]], sums: Sequence[Recipe]) -> Used:
        """Which parameters at least one of these used."""
        return self._shelves.used([sums[k].home if m < 0 else (m, k) for term in terms for m, k, _ in term])

    # Reading.

    def read(self, told: Delivery) -> list[Vec]:
        """The vectors that were answered, to be read until I come again."""
        return [self.value(refs, told) for refs, _ in told.answer.results]

    def each(self, refs: Sequence[Ref], told: Delivery) -> list[Vec]:
        """The vectors of a replica, which are not to be added up."""
        return [self._sum(k, told) for _, k, _ in refs]

    def find(self, told: Delivery) -> None:
        """Look the results up that can be read now, so that whoever reads them later need not."""
        for k in told.results:
            if self.is_there(told.sums[k]):
                self._sum(k, told)

    def value(self, refs: Sequence[Ref], told: Delivery, plus: Vec | None = None) -> Vec:
        """One of them; ``plus`` is added to it. To be read before I lay down anything else."""
        if len(refs) == 1 and refs[0][0] < 0 and refs[0][2] == 1.0 and plus is None:
            return self._sum(refs[0][1], told)
        (term,) = self._readable([refs], told)
        if plus is not None:
            term.append((plus, 1.0))
        return Unadded(term, self.used([refs], told.sums), lambda: self._memory(told), self._shelves.hands)

    def _readable(self, terms: Sequence[Sequence[Ref]], told: Delivery) -> list[list[tuple[Vec, float]]]:
        return [[(self._sum(k, told) if m < 0 else self._shelves.vec(m, k), f) for m, k, f in term] for term in terms]

    def _sum(self, k: int, told: Delivery) -> Vec:
        """A sum that may be read: where all read it, or a copy of my own."""
        if k not in told.made:
            recipe = told.sums[k]
            if not self._comes(recipe, told.since_s):
                out = self._memory(told)
                self._fill(out, recipe, told)
                if not self.is_there(recipe):  # else what we have read may be newer than this sum
                    told.made[k] = out
                    return out
            told.made[k] = self._shelves.vec(*recipe.home)
            told.made[k].used = self._shelves.used([recipe.home])
        return told.made[k]

    def _comes(self, recipe: Recipe, since_s: float) -> bool:
        """Wait for the others' parts of a sum. False: somebody does not get on."""
        start = time.monotonic()
        deadline = since_s + GRACE_S + self._shelves.vector_bytes * len(recipe.terms) / SLOW_BYTES_S
        while not self.is_there(recipe):
            nap(start)
            if time.monotonic() > deadline:
                return False
        return True

    def _fill(self, out: Vec, recipe: Recipe, told: Delivery) -> None:
        read, hands = self._readable(recipe.terms, told), self._shelves.hands
        for p, tensor in enumerate(out.parts):
            add_up(tensor, [[(v.parts[p], f) for v, f in term] for term in read], recipe.divisor, hands=hands)
        out.used = self.used(recipe.terms, told.sums)

    # Memory of my own.

    def _like(self) -> Vec:
        return self._shelves.vec(self._rank, 0).zeros_like()

    def _memory(self, told: Delivery) -> Vec:
        """Some that may be read until I come again."""
        with self._books:
            spare = self._spare.pop() if self._spare else None
        told.memory.append(self._like() if spare is None else spare)
        return told.memory[-1]

    def take_back(self, read: Iterable[Delivery]) -> None:
        """Nothing of these is read any more: their memory may serve others."""
        if self._shelves.vector_bytes <= KEPT_BYTES:
            with self._books:
                for one in read:
                    self._spare, one.memory = [*self._spare, *one.memory][:2], []

    def forget(self) -> None:
        self._spare = []
