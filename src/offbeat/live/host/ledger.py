"""Which slot holds what: vectors as sum expressions, and slots that are free when nothing refers to them.

The host process knows no number of a vector. What a worker has submitted is a slot; a tray, a result, shared weights
are *expressions*: slots with factors, to be added up. A round's result is a `Sum`: an expression that the adders will
make, in a slot of its own, if anybody takes it.

Nobody counts who refers to a slot. When one is needed and none is free, everything that may still be read is walked
through, from its roots: trays and results at the seats, answers that workers have not released, what the adders are at.
A slot that is not met on the way is free. So nothing can be freed twice, and a reference that is kept by mistake keeps
memory, and never loses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class Written:
    """A slot that a worker has written."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot


class Sum:
    """A sum of expressions, divided, which is made when somebody needs it.

    ``slot``: where it lies, or is being made; None: nobody has needed it yet.
    """

    __slots__ = ("divisor", "is_made", "slot", "terms")

    def __init__(self, terms: Sequence[Expression], divisor: int = 1) -> None:
        self.terms, self.divisor = tuple(terms), divisor
        self.slot: int | None = None
        self.is_made = False

    def unmade(self, found: list[Sum]) -> list[Sum]:
        """This one and those it is made of, as far as they are still to be made: what others need comes first."""
        if not self.is_made and self not in found:
            for term in self.terms:
                for place, _ in term.refs:
                    if isinstance(place, Sum):
                        place.unmade(found)
            found.append(self)
        return found

    def made(self) -> None:
        """It lies in its slot: what it was made of is needed no longer."""
        self.is_made, self.terms = True, ()


class Decoded(Sum):
    """What several hosts have summed together. It is not added up here: ``put`` writes it into a slot.

    ``then`` is called when it is there.
    """

    __slots__ = ("_then", "put")

    def __init__(self, put: Callable[[int], None], then: Callable[[], None]) -> None:
        super().__init__(())
        self.put, self._then = put, then

    def made(self) -> None:
        super().made()
        self._then()


class Expression:
    """Slots and totals with factors. It does what a seat asks of a vector."""

    __slots__ = ("refs",)

    def __init__(self, refs: Iterable[tuple[Written | Sum, float]] = ()) -> None:
        self.refs = tuple(refs)

    def clone(self) -> Expression:
        return Expression(self.refs)

    def __mul__(self, factor: float) -> Expression:
        return Expression((place, f * factor) for place, f in self.refs)

    def __sub__(self, other: Expression) -> Expression:
        return Expression(self.refs).add_(other, -1.0)

    def put_into(self, target: Expression, scale: float = 1.0) -> Expression:
        target.refs = (self * scale).refs
        return target

    def copy_(self, other: Expression) -> Expression:
        self.refs = other.refs
        return self

    def add_(self, other: Expression, alpha: float = 1.0) -> Expression:
        factors: dict[Written | Sum, float] = {}
        for place, f in (*self.refs, *(other * alpha).refs):
            factors[place] = factors.get(place, 0.0) + f
        self.refs = tuple((place, f) for place, f in factors.items() if f)
        return self

    @property
    def totals(self) -> list[Sum]:
        return [place for place, _ in self.refs if isinstance(place, Sum)]

    @property
    def slots(self) -> list[tuple[int, float]]:
        """Where its parts lie, when all totals in it are made."""
        out = []
        for place, f in self.refs:
            assert place.slot is not None
            out.append((place.slot, f))
        return out


class Roots(Protocol):
    """What may still be read or written: expressions, and slots by themselves."""

    def __call__(self) -> tuple[Iterable[Expression], Iterable[int]]: ...


class Slots:
    """The slots of one channel. ``new`` gives one that was never used."""

    def __init__(self, new: Callable[[], int], roots: Roots) -> None:
        self._new, self._roots = new, roots
        self.all: list[int] = []
        self._free: list[int] = []

    def take(self) -> int:
        """One that nothing refers to. Whoever takes it is a root from now on."""
        if not self._free:
            self._free = self._unreached()
        if self._free:
            return self._free.pop()
        slot = self._new()
        self.all.append(slot)
        return slot

    @property
    def in_use(self) -> int:
        """How many something refers to."""
        return len(self.all) - len(self._unreached())

    def _unreached(self) -> list[int]:
        expressions, slots = self._roots()
        reached, seen = set(slots), set[int]()
        stack = [place for one in expressions for place, _ in one.refs]
        while stack:
            place = stack.pop()
            if place.slot is not None:
                reached.add(place.slot)
            if isinstance(place, Sum) and id(place) not in seen:
                seen.add(id(place))
                stack += [inner for term in place.terms for inner, _ in term.refs]
        return [slot for slot in self.all if slot not in reached]
