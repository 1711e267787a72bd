"""Vectors as places in memory, for a hub that keeps what workers share: trays, results and weights, but no tensor.

A vector is a *stack* of places to be added up. A worker that may go on is told what to add, and does it itself,
together with the others who were told at the same moment. So a worker that computes, sleeps or has been stopped is not
needed: what it has laid down lies where the others can read it.

What may be overwritten when:

- A slot that holds a deposit belongs to the sum that took it. Its owner may write to it again when it has seen that sum
  complete, or when it is told here that nothing will read it any more. Where vectors are long, no more slots are used
  than are needed at a time (``pooled``): a worker that has none asks for one, and gives back what it has too many.
- A slot that holds a sum is free when nobody needs the sum: nobody has it to hand out, no worker that was given it can
  still be reading or adding (it has come again since), no vector stands on it. These are exactly the references that
  this process holds to the `Sum`; when the last one goes, so does the claim on the slot.
"""

from __future__ import annotations

import itertools
import marshal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.live.transport.hub import Frame, Letter, Word
from offbeat.rounds.seat import Event

SEEN, READS = 1, 2  # what a worker says of a sum that it was given
VECTORS = 6  # at most, that a replica consists of: the weights, and what an optimiser remembers for each of them
DEPOSITS = 16  # the first slots of a shelf are its worker's, the others the hub's

Home = tuple[int, int]  # in whose shelf, and which slot there
_SHELF = 1 << 32


def number_of(home: Home) -> int:
    """A place as one number, as frames have room for it."""
    return home[0] * _SHELF + home[1]


def home_of(number: int) -> Home:
    return divmod(number, _SHELF)


class Deposited:
    """A deposit, where its worker has put it. When nothing refers to it any more, ``free`` is told of its place."""

    __slots__ = ("_free", "home", "sums", "told", "worker")

    def __init__(self, worker: int, home: Home, free: Callable[[Home], None]) -> None:
        self.worker, self.home, self._free = worker, home, free
        self.sums = 0  # that are to be made of it; last weights can be in several
        self.told = False  # the worker knows by itself when it may write here again

    def __del__(self) -> None:
        if not self.told:
            self._free(self.home)


class Sum:
    """What a round comes to: who adds what, and where."""

    __slots__ = ("_free", "complete", "divisor", "home", "number", "private", "summers", "terms", "version")

    def __init__(self, version: int, terms: list[Stack], divisor: int) -> None:
        self.version, self.divisor, self.number = version, divisor, -1
        self.terms: list[Stack] = terms
        for place in self.deposits:
            place.sums += 1
        self.home: Home | None = None
        self.summers: tuple[int, ...] = ()
        self.private = self.complete = False
        self._free: Callable[[Home], None] | None = None

    def assign(
        self,
        home: Home,
        number: int,
        summers: tuple[int, ...],
        private: bool,
        free: Callable[[Home], None],
    ) -> None:
        self.home, self.number, self.summers, self.private, self._free = home, number, summers, private, free

    @property
    def deposits(self) -> Iterable[Deposited]:
        """Those that are to be added up, each once."""
        return {id(p): p for term in self.terms for p, _ in term.refs if isinstance(p, Deposited)}.values()

    def seen(self) -> None:
        """It is there: what it was made of is no longer needed."""
        for place in self.deposits:
            place.sums -= 1
        self.complete, self.terms = True, []

    def __del__(self) -> None:
        for place in self.deposits:
            place.sums -= 1
        if self._free is not None and self.home is not None:
            self._free(self.home)


class Spare:
    """A replica that a worker has laid down: its vectors, and what it says of them."""

    __slots__ = ("said", "stack")

    def __init__(self, sums: Sequence[Sum], said: bytes) -> None:
        self.stack, self.said = Stack((one, 1.0) for one in sums), said


class Stack:
    """A vector as a list of places to be added up. It does what a tray asks of one."""

    __slots__ = ("refs",)

    def __init__(self, refs: Iterable[tuple[Deposited | Sum, float]] = ()) -> None:
        self.refs = tuple(refs)

    def clone(self) -> Stack:
        return Stack(self.refs)

    def __mul__(self, factor: float) -> Stack:
        return Stack((place, f * factor) for place, f in self.refs)

    def __sub__(self, other: Stack) -> Stack:
        return Stack(self.refs).add_(other, -1.0)

    def put_into(self, target: Stack, scale: float = 1.0) -> Stack:
        target.refs = (self * scale).refs
        return target

    def copy_(self, other: Stack) -> Stack:
        self.refs = other.refs
        return self

    def add_(self, other: Stack, alpha: float = 1.0) -> Stack:
        factors: dict[Deposited | Sum, float] = {}
        for place, f in (*self.refs, *(other * alpha).refs):
            factors[place] = factors.get(place, 0.0) + f
        self.refs = tuple((place, f) for place, f in factors.items() if f)
        return self


class Loan:
    """A sum that a worker was told of. ``results``: what it was told of for, to make them; none: it is one itself."""

    __slots__ = ("one", "results")

    def __init__(self, one: Sum, results: tuple[Sum, ...]) -> None:
        self.one: Sum | None = one
        self.results = results

    def end_if_made(self) -> None:
        """What goes into results is not read any more when they are there, nor written when it is there itself."""
        if self.results and self.one is not None and self.one.complete and all(r.complete for r in self.results):
            self.one, self.results = None, ()


@dataclass
class Guest:
    """A worker at the hub. ``reuse``: whoever is to have a slot of its deposits that nothing reads any more; else
    that is the worker itself."""

    rank: int
    log: list[Event] | None = None
    reuse: Callable[[Home], None] | None = None
    freed: list[Home] = field(default_factory=list)  # its slots that nothing will read any more
    gone: list[Home] = field(default_factory=list)  # such as it does not have any more
    lent: list[Loan] = field(default_factory=list)  # what it may be reading or adding
    news: list[tuple[object, ...]] = field(default_factory=list)  # what it is told beside, for its records

    def put(self, place: int) -> Any:
        """What lies in this place, as a vector."""
        return Stack([(Deposited(self.rank, home_of(place), self.reuse or self.freed.append), 1.0)])

    def comes_again(self, said: bytes) -> None:
        """Of each sum it was given: whether it has seen it complete, and whether it still reads it."""
        told, self.lent = self.lent[: len(said)], self.lent[len(said) :]
        for loan, flags in zip(told, said, strict=False):
            one = loan.one
            if one is None:
                continue
            if one.private:
                one.summers = tuple(r for r in one.summers if r != self.rank)
            if flags & SEEN and not one.complete and not (one.private and one.summers):
                one.seen()
        self.lent = [loan for loan, flags in zip(told, said, strict=False) if flags & READS] + self.lent

    def merge(self, stack: Stack | None, place: int, merged: set[Home]) -> bool:
        """The worker has added up some of its slots, if they are all still in ``stack``."""
        refs = () if stack is None else stack.refs
        mine = {id(p): p.home for p, _ in refs if isinstance(p, Deposited) and p.worker == self.rank}
        if stack is None or not merged <= set(mine.values()):
            return False
        rest = [(p, f) for p, f in refs if mine.get(id(p)) not in merged]
        stack.refs = (*rest, *self.put(place).refs)
        return True


class Reply:
    """One answer in the making: ``results`` are vectors to be given, each with what is said of it.

    ``adds``: this worker has come for it. Others hear of it while they compute, and may be long in coming.
    """

    __slots__ = ("about", "adds", "chair", "given", "how", "results", "sums", "tray")

    def __init__(
        self,
        chair: Guest,
        how: str,
        about: object,
        results: Sequence[tuple[Any, Any]],
        tray: Stack | None,
        adds: bool = True,
    ) -> None:
        self.chair, self.how, self.about, self.results, self.tray = chair, how, about, results, tray
        self.adds = adds
        self.sums = _needed(stack for stack, _ in results)
        self.given = tuple(p for stack, _ in results for p, _ in stack.refs if isinstance(p, Sum))


class Slots:
    """The hub's slots in everybody's shelf, and who adds up what there.

    ``shares``: several workers make a sum together; else one does, for all. ``small``: in vectors so short, each of
    them adds up all, instead of waiting for another's part. ``pooled``: deposits and sums lie in the same slots, which
    are named when they are needed. ``grace_s``: what laying down, adding or reading a vector may take.
    """

    def __init__(
        self, size: int, slots: int, small: bool, shares: bool, pooled: bool = False, grace_s: float = 0.02
    ) -> None:
        self._small, self._shares, self.pooled, self.grace_s = small, shares, pooled, grace_s
        self._handed_out = size  # slots that are not new any more; each worker begins with one
        # Sums are numbered when they are given a slot: a slot's flags only grow, and an older round's sum may come to
        # lie where a newer one's lay, if nobody has needed it before.
        self._numbers = itertools.count()
        self._new: list[list[int]] = [list(range(slots - 1, DEPOSITS - 1, -1)) for _ in range(size)]
        # Those that have held a sum, and are free again. Memory that was written to stays: so these come first, in
        # whosever shelf they are, since every worker can write to all.
        self._free: list[Home] = []
        # On a GPU a slot is memory only when its owner has written there: until then nobody else may have it.
        self._unwritten: set[Home] = set()

    def letters(self, answers: Sequence[Reply]) -> list[Letter]:
        """The answers as letters; whoever is answered now adds up what nobody has added up yet."""
        for answer in answers:
            for total in answer.sums:
                if total.home is None:
                    told = [a for a in answers if total in a.sums]
                    self._assign(total, sorted(a.chair.rank for a in [a for a in told if a.adds] or told))
        return [self._letter(answer) for answer in answers]

    def _assign(self, total: Sum, takers: list[int]) -> None:
        if not self._shares:
            takers = takers[:1]
        private = self._small and self._shares
        home = self._slot(takers[0], own=private)
        if home is None:
            raise MemoryError(f"no slot is free for round {total.version}: too many results wait for a worker")
        total.assign(home, next(self._numbers), tuple(takers), private, self.give_back)

    def _slot(self, owner: int, own: bool = False) -> Home | None:
        """A free one; ``own``: in this worker's shelf."""
        k = next((k for k in reversed(range(len(self._free))) if not own or self._free[k][0] == owner), None)
        if k is not None:
            return self._free.pop(k)
        if not self._new[owner]:
            return None
        self._handed_out += 1
        return owner, self._new[owner].pop()

    @property
    def in_use(self) -> int:
        """Slots that somebody has, or that hold something; where they are ``pooled``."""
        return self._handed_out - len(self._free)

    def room(self, owner: int, version: int) -> list[Sum] | None:
        """Slots for a replica that this worker is to lay down; None: there are too few."""
        if len(self._new[owner]) < 2 * VECTORS:
            return None
        out = []
        for _ in range(VECTORS):
            new, one, home = not self._free, Sum(version, [], 1), self._slot(owner)
            assert home is not None
            if new:
                self._unwritten.add(home)
            one.assign(home, next(self._numbers), (), False, self.give_back)
            one.complete = True  # nobody is told of it before it is
            out.append(one)
        return out

    def for_deposit(self, worker: int) -> Home:
        """One for what this worker is about to lay down."""
        home = self._slot(worker)
        if home is None:
            raise MemoryError(f"no slot is free for a deposit of worker {worker}: too many results wait for a worker")
        return home

    def were_written(self, replica: Iterable[Sum]) -> None:
        """These slots hold one; others of its room may not have been needed."""
        self._unwritten.difference_update(one.home for one in replica if one.home is not None)

    def give_back(self, home: Home) -> None:
        """Nobody reads or writes there any more."""
        if home in self._unwritten:
            self._unwritten.discard(home)
            self._new[home[0]].append(home[1])
            self._handed_out -= 1
        else:
            self._free.append(home)

    def _letter(self, answer: Reply) -> Letter:
        chair, sums = answer.chair, answer.sums
        index = {id(one): k for k, one in enumerate(sums)}
        chair.lent += [Loan(one, () if one in answer.given else answer.given) for one in sums]
        recipes = [
            (s.home, s.number, s.complete, s.private, s.summers, s.divisor, [_refs(term, index) for term in s.terms])
            for s in sums
        ]
        reply: Any = (
            answer.how,
            answer.about,
            recipes,
            [(_refs(stack, index), said) for stack, said in answer.results],
            _free_when_complete(answer),
            chair.freed,
            chair.gone,
            chair.news,
            chair.log or (),
        )
        data = marshal.dumps(reply)
        for told_now in (chair.freed, chair.gone, chair.news, chair.log or []):
            told_now.clear()
        return chair.rank, Frame(Word.ANSWER, 0, data=data)


def _free_when_complete(answer: Reply) -> list[tuple[int, Home]]:
    """(which sum, a slot of this worker's that is free when that sum is complete)."""
    return [(k, home) for k, one in enumerate(answer.sums) for home in _let_go(one, answer.chair.rank, answer.tray)]


def _let_go(total: Sum, worker: int, tray: Stack | None) -> list[Home]:
    """This worker's slots that are free when the sum is complete; from now on it knows that by itself.

    Not those that are in another sum, which nobody may have made yet.
    """
    kept = set() if tray is None else {id(place) for place, _ in tray.refs}
    found = []
    for place in total.deposits:
        mine = place.worker == worker and not place.told and place.sums == 1
        if mine and not total.private and id(place) not in kept:
            place.told = True
            found.append(place.home)
    return found


def taken_by(stacks: Iterable[Stack], worker: int, tray: Stack | None) -> list[tuple[Home, Home, int, int]]:
    """Slots of this worker's that are in sums it has not been told of: the slot, the sum's, its number, its parts."""
    return [
        (home, one.home, one.number, len(one.summers))
        for one in _needed(stacks)
        if one.home is not None and not one.complete
        for home in _let_go(one, worker, tray)
    ]


def _needed(stacks: Iterable[Stack]) -> list[Sum]:
    """All sums that these vectors stand on and that may have to be made, those that others need first."""
    found: list[Sum] = []
    for stack in stacks:
        _visit(stack, found)
    return found


def _visit(stack: Stack, found: list[Sum]) -> None:
    # Not a function inside the other: one that calls itself keeps itself alive, and with it all that it has found.
    for place, _ in stack.refs:
        if isinstance(place, Sum) and place not in found:
            for term in place.terms:
                _visit(term, found)
            found.append(place)


def places(stack: Stack) -> list[tuple[int, int, float]]:
    """Those of its slots that hold deposits."""
    return [(*place.home, f) for place, f in stack.refs if isinstance(place, Deposited)]


def _refs(stack: Stack, index: dict[int, int]) -> list[tuple[int, int, float]]:
    """(−1, which sum of the list, factor), or (member, slot, factor)."""
    return [(-1, index[id(place)], f) if isinstance(place, Sum) else (*place.home, f) for place, f in stack.refs]
