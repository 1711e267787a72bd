"""Weights that others may average with at any moment: the protocol of a meeting, without I/O, clock or thread.

A meeting of i with j: i's weights travel to j (``depart``); j takes half the difference, s_i − s_j, into its own and
sends it back (``visited``); i takes the other half out of its own (``home``). Only differences are ever added, so what
either side adds in the meantime stays: the sum of all shared weights and of the halves in flight changes only by what
workers add.

What happens to one worker's shared weights happens in one order, which is all that decides a run: with a ``log`` it is
written down, and `offbeat.sim.replay` follows it. Not safe for two threads: a driver calls all of
them from one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.rounds.seat import Diary

if TYPE_CHECKING:
    from offbeat.tensors.vector import Vec


class SharedVec:
    """One worker's shared weights."""

    def __init__(self, x: Vec, log: Diary | None = None) -> None:
        self._y = x.clone()
        self._log = log
        self._departed = self._added = 0
        self.changed = 0  # how often others' weights have come in since the step under way began

    def depart(self) -> tuple[int, Vec]:
        """The number of this visit, and a copy to take along."""
        self._note("depart", self._departed)
        self._departed += 1
        return self._departed - 1, self._y.clone()

    def visited(self, visitor: int, theirs: Vec) -> Vec:
        """Somebody's weights are here; the answer is what the visitor is to take out of its own."""
        self._note("visited", visitor)
        half = (theirs - self._y) * 0.5
        self._y.add_(half)
        self.changed += 1
        return half

    def home(self, visit: int, half: Vec) -> int:
        """Back from a visit. Answers how many changes by others the step under way has not seen."""
        self._note("home", visit)
        self._y.add_(half, alpha=-1.0)
        self.changed += 1
        return self.changed - 1

    def add(self, delta: Vec) -> Vec:
        """The worker's step, on top of whatever its weights have become; what they are then, not to be changed."""
        self._note("add", self._added)
        self._added += 1
        self.changed = 0
        return self._y.add_(delta)

    @property
    def weights(self) -> Vec:
        """What they are; not to be changed."""
        return self._y

    def now(self) -> Vec:
        """A copy."""
        return self._y.clone()

    def empty(self) -> Vec:
        """Room for a visitor's weights."""
        return self._y.zeros_like()

    def stand(self) -> Vec:
        """A copy, when all workers stand between two steps, and no visit is under way."""
        self._note("stand", self._added)
        return self._y.clone()

    def shift(self, difference: Vec) -> None:
        """All have been made equal in the middle of a run, which is a difference, too: somebody may be here already."""
        self._note("shift", self._added)
        self._y.add_(difference)

    def _note(self, what: str, number: int) -> None:
        if self._log is not None:
            self._log.append((what, number))


class Retired:
    """Counts those who will change nobody's weights any more."""

    def __init__(self, size: int) -> None:
        self._left = size

    def one_more(self) -> bool:
        """Whether that was the last."""
        self._left -= 1
        return self._left == 0
