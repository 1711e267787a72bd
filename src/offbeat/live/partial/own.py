"""Which slots are a worker's own: those that it may write to, and those that somebody may still be reading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable

from offbeat.live.partial.stacks import DEPOSITS, Home
from offbeat.live.partial.told import Recipe, Ref


class OwnSlots:
    """A worker's own slots. ``pooled``: it begins with one, and has others for a time; ``returns``: those that it has
    written to go back to the hub without a word.

    A worker's second thread hears of slots that are free, too. ``_books`` protects the sets: without it, one that
    becomes free between two lines of the other thread would be forgotten, or given to two.
    """

    def __init__(self, rank: int, pooled: bool, returns: bool, is_there: Callable[[Recipe], bool]) -> None:
        self._is_there, self._returns = is_there, returns
        self._free = {(rank, slot) for slot in range(1 if pooled else DEPOSITS)}
        # On a GPU a slot is memory only when its owner has written there: until then nobody else may have it.
        self._untouched = set(self._free)
        self._busy: set[Home] = set()
        self._until_seen: list[tuple[Recipe, Home]] = []  # slots that are free when this sum is complete
        self._books = threading.Lock()

    def are_free(self, homes: Iterable[Home]) -> None:
        """The hub says so, or nobody has heard of what lies there."""
        with self._books:
            self._are_free(homes)

    def _are_free(self, homes: Iterable[Home]) -> None:
        self._busy.difference_update(homes)
        self._free.update(homes)

    def free_when_there(self, slots: Iterable[tuple[Recipe, Home]]) -> None:
        with self._books:
            self._until_seen += slots

    def look(self) -> int:
        """See which have become free; how many have not."""
        with self._books:
            there = [(recipe, home, self._is_there(recipe)) for recipe, home in self._until_seen]
            self._are_free([home for _, home, complete in there if complete])
            self._until_seen = [(recipe, home) for recipe, home, complete in there if not complete]
            return len(self._busy)

    def one(self, but_not: Callable[[], Collection[Home]]) -> Home | None:
        """One that is free, and none of those which ``but_not`` names; from now on it is written to.

        Asked inside the books: what a result stands on was told before it became free.
        """
        with self._books:
            found = min(self._free.difference(but_not()) if self._free else (), default=None)
            if found is not None:
                self._written_to(found)
            return found

    def written_to(self, home: Home) -> None:
        """Somebody may read there from now on."""
        with self._books:
            self._written_to(home)

    def _written_to(self, home: Home) -> None:
        self._free.discard(home)
        self._untouched.discard(home)
        if not self._returns:
            self._busy.add(home)

    def are_gone(self, homes: Iterable[Home]) -> None:
        """The hub has taken them back."""
        with self._books:
            self._free.difference_update(homes)
            self._busy.difference_update(homes)

    def set_aside(self, home: Home) -> None:
        """Nobody else reads there, and it is not to be given away."""
        with self._books:
            self._free.discard(home)
            self._busy.discard(home)

    def without_need(self, but_not: Callable[[], Collection[Home]], keeps: int = 0) -> list[Home]:
        """Those that are free, and none of those which ``but_not`` names: no longer this worker's own.

        ``keeps``: so many of them stay, for what it will lay down next.
        """
        with self._books:
            spare = sorted(self._free - self._untouched - {*but_not()})[keeps:]
            self._free.difference_update(spare)
            return spare

    @property
    def untaken(self) -> list[Ref]:
        """Those that are in no sum this worker knows of."""
        with self._books:
            taken = {home for _, home in self._until_seen}
            return [(*home, 1.0) for home in sorted(self._busy - taken)]
