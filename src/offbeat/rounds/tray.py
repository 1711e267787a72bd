"""What answers for a worker: its tray, and the snapshot a round takes of it.

A snapshot carries the record of what was in the tray, so that "fresh" and "stale" are known, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.rounds.rules import Absent, CatchUp

if TYPE_CHECKING:
    from offbeat.tensors.vector import Vec


@dataclass(frozen=True, slots=True)
class Deposit:
    """One deposit: the worker's own step (−1: none), and how many results its weights contained."""

    step: int
    base: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one worker contributes to one round."""

    value: Vec | None
    pieces: tuple[Deposit, ...]
    deposits: int  # how many deposits the worker had made by then

    def staleness(self, version: int) -> int | None:
        """Of its oldest piece; None if it contributes nothing."""
        if len(self.pieces) == 1:  # nearly always, in thousands of workers and rounds
            return version - self.pieces[0].base
        return version - min(p.base for p in self.pieces) if self.pieces else None

    def fresh(self, version: int, catch_up: CatchUp) -> bool:
        """Is a step in it that was begun with all results before this round (or, step for round, this round's step)?

        Older pieces beside it change nothing; weights that answer before the first step, or after the last, are not.
        """
        if catch_up == "every_step":
            return any(p.step == version for p in self.pieces)
        return any(p.step >= 0 and p.base == version for p in self.pieces)


@dataclass
class Tray:
    """One worker's tray."""

    absent: Absent
    value: Vec | None = None
    pieces: list[Deposit] = field(default_factory=list)
    deposits: int = 0
    lost: list[Deposit] = field(default_factory=list)
    _is_out: bool = False  # a snapshot of shared weights is on its way
    _since: Vec | None = None  # what was added to them meanwhile

    def deposit(self, x: Vec, piece: Deposit, weight: float = 1.0) -> None:
        """Add a gradient to what is owed, a step to shared weights, or put newer weights in place of the old ones.

        ``x`` is copied; a gradient counts ``weight``.
        """
        self.deposits += 1
        if self.absent == "shared" and self.value is not None:
            self._add(x)
            self.pieces.append(piece)
            return
        if self.absent == "carry" and self.value is not None:
            self.value.add_(x, alpha=weight)
            self.pieces.append(piece)
            return
        if self.absent == "drop":
            self.lost += self.pieces
        if self.value is not None:
            x.put_into(self.value, weight)
        else:
            self.value = x.clone() if weight == 1.0 else x * weight
        self.pieces = [piece]

    def _add(self, step: Vec) -> None:
        assert self.value is not None
        if not self._is_out:
            self.value.add_(step)
        elif self._since is None:
            self._since = step.clone()
        else:
            self._since.add_(step)

    def discard(self, piece: Deposit) -> None:
        """What came too late: a gradient that is dropped, or something that its worker makes anew for a later round."""
        self.deposits += 1
        if self.absent == "drop":
            self.lost.append(piece)

    def snapshot(self, version: int, made_for_it: bool) -> Snapshot:
        """What the worker gives to round ``version``; gradients leave the tray, weights stay in it.

        ``made_for_it``: whether the newest piece was made for this round (else it is lost where late ones are dropped).
        """
        value, pieces = self.value, tuple(self.pieces)
        if self.absent in ("last", "shared"):
            if self.absent == "shared":
                self.pieces, self._is_out = [], True
            return Snapshot(None if value is None else value.clone(), pieces, self.deposits)
        self.value, self.pieces = None, []
        if self.absent == "drop" and pieces and not made_for_it:
            self.lost += pieces
            value, pieces = None, ()
        return Snapshot(value, pieces, self.deposits)

    def adopt(self, mean: Vec) -> None:
        """Shared weights follow the round: what was sent becomes the mean, and what was added since stays on top.

        So the sum over all workers changes only by what they add, whoever was late.
        """
        assert self.value is not None, "shared weights are there from the beginning"
        self.value.copy_(mean)
        if self._since is not None:
            self.value.add_(self._since)
        self._is_out, self._since = False, None

    def clear(self) -> None:
        """Nothing answers for the worker any more."""
        self.value, self._since, self.pieces = None, None, []

    def shown(self) -> Vec:
        """Shared weights, with everything that was added."""
        assert self.value is not None, "shared weights are there from the beginning"
        return self.value.clone() if self._since is None else self.value.clone().add_(self._since)

    @property
    def values(self) -> list[Vec]:
        """All vectors that lie in it."""
        return [one for one in (self.value, self._since) if one is not None]

    def owed(self) -> Vec | None:
        """A copy of the gradients in the tray."""
        return None if self.value is None else self.value.clone()
