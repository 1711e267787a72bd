"""A worker's chair at a desk: its seat, and what the desk knows of its worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from offbeat.live.partial.stacks import Guest, Home, Stack
from offbeat.rounds.held import NEVER
from offbeat.rounds.seat import Event, Seat


class SeatTaken(Guest):
    """A chair with a seat, and the worker that waits there."""

    def __init__(self, rank: int, seat: Seat, log: list[Event] | None, reuse: Callable[[Home], None] | None) -> None:
        super().__init__(rank, log, reuse)
        self.seat, self.wanted, self.told_lost = seat, 0, 0
        self.wake: Callable[[], None] | None = None
        self.looks_ahead = False  # it computes, and hears of results as they come
        self.put_off = self.stops = False  # its deposit waits for a result; it wants to hear of no more after that
        self.lays = False  # something down, in a slot that it was given
        self.came = False  # and has not been answered: it reads nothing

    @property
    def waits_for(self) -> int:
        """How many results it needs to go on; 0: it needs none."""
        if self.wake is None or self.looks_ahead:
            return 0
        return self.wanted if self.seat.rules.pool is None else NEVER

    @property
    def is_reading(self) -> bool:
        """Whether it adds up or reads what it has come for, and will soon say that it has."""
        if not self.seat.rules.late:
            return bool(self.lent)
        lent = (loan.one for loan in self.lent)
        return any(one is not None and not one.complete and self.rank in one.summers for one in lent)

    @property
    def tray(self) -> Stack | None:
        return cast("Stack | None", self.seat.tray.value)

    @property
    def waiting(self) -> list[Stack]:
        """The results that wait for it, but for a replica."""
        results: list[Any] = list(self.seat.untold)
        return [one for one in results if isinstance(one, Stack)]
