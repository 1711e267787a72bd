"""What answers for a worker: its tray, and the snapshot a round takes of it.

A tray is written by its worker and read by its worker's clerk. A snapshot carries the record of what was in it, so that
"fresh" and "stale" are known, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.rounds import Absent, CatchUp
from offbeat.vector import Vec


@dataclass(frozen=True, slots=True)
class Piece:
    """One deposit: the worker's own step (−1: none), and how many results its weights contained."""

    step: int
    base: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one worker contributes to one round."""

    value: Vec | None
    pieces: tuple[Piece, ...]
    deposits: int  # how many deposits the worker had made by then

    def staleness(self, version: int) -> int | None:
        """Of its oldest piece; None if it contributes nothing."""
        return max((version - p.base for p in self.pieces), default=None)

    def fresh(self, version: int, catch_up: CatchUp) -> bool:
        """Is a step in it that was begun with all results before this round (or, step for round, this round's step)?

        Older pieces beside it change nothing; weights that answer before the first step, or after the last, are not.
        """
        if catch_up == "every_step":
            return any(p.step == version for p in self.pieces)
        return any(p.step >= 0 and p.base == version for p in self.pieces)


@dataclass
class Tray:
    """One worker's tray. Not safe by itself: the live world holds a lock around each method."""

    absent: Absent
    value: Vec | None = None
    pieces: list[Piece] = field(default_factory=list)
    deposits: int = 0
    lost: list[Piece] = field(default_factory=list)
    spare: list[Vec] = field(default_factory=list)  # memory that nobody reads any more: fresh pages are slow

    def deposit(self, x: Vec, piece: Piece) -> None:
        """Add a gradient to what is owed, a step to shared weights, or put newer weights in place of the old ones.

        ``x`` is copied.
        """
        self.deposits += 1
        if self.absent in ("carry", "shared") and self.value is not None:
            self.value.add_(x)
            self.pieces.append(piece)
            return
        if self.absent == "drop":
            self.lost += self.pieces
        if self.value is None:
            self.value = self._copy(x)
        else:
            self.value.copy_(x)
        self.pieces = [piece]

    def _copy(self, x: Vec | None) -> Vec | None:
        if x is None or not self.spare:
            return x.clone() if x is not None else None
        return self.spare.pop().copy_(x)

    def discard(self, piece: Piece) -> None:
        """A gradient that came too late, where late ones are dropped."""
        self.deposits += 1
        self.lost.append(piece)

    def snapshot(self, version: int, made_for_it: bool) -> Snapshot:
        """What the worker gives to round ``version``; gradients leave the tray, weights stay in it.

        ``made_for_it``: whether the newest piece was made for this round (else it is lost where late ones are dropped).
        """
        if self.absent == "last":
            return Snapshot(self._copy(self.value), tuple(self.pieces), self.deposits)
        value, pieces = self.value, self.pieces
        self.pieces = []
        if self.absent == "shared":
            return Snapshot(self._copy(value), tuple(pieces), self.deposits)
        self.value = None
        if self.absent == "drop" and pieces and not made_for_it:
            self.lost += pieces
            value, pieces = None, []
        return Snapshot(value, tuple(pieces), self.deposits)

    def adopt(self, sent: Snapshot, mean: Vec) -> None:
        """Shared weights follow the round: what was sent becomes the mean, and what was added since stays on top.

        So the sum over all workers changes only by what they add, whoever was late.
        """
        assert self.value is not None, "shared weights are there from the beginning"
        assert sent.value is not None, "and so they are in every snapshot"
        if self.deposits == sent.deposits:
            self.value.copy_(mean)
        else:
            self.value.add_(mean - sent.value)

    def put_back(self, snapshot: Snapshot) -> None:
        """The round failed: what was taken is owed again, or lost if something newer has taken its place."""
        if self.absent in ("last", "shared") or snapshot.value is None:
            return
        if self.absent == "drop" and self.value is not None:
            self.lost += snapshot.pieces
            return
        self.value = snapshot.value if self.value is None else snapshot.value.add_(self.value)
        self.pieces = [*snapshot.pieces, *self.pieces]
