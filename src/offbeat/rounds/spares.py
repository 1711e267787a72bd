"""Spare replicas: what a worker takes over that has missed many rounds, instead of a result for each of them.

Replicas that apply the same results in the same order are equal, so one of them, as it is after v results, stands for
the first v of them (`Seat.replace`). While somebody misses many, one that comes, and lacks nothing, is asked to lay
down a copy of its own. Nobody waits for it: not the one that is asked, who lays it down in its own time; nor the one
that sleeps, who finds what is there when it comes: a replica and the results behind it, or all of them.

- *Who is asked may be stopped before it has laid anything down.* Then the others are asked, each when it comes and as
  soon as ``MORE`` results wait. A round is started by one that comes and is in time: who has been asked in vain starts
  one more round at most. So no more wait than ``MANY + MORE`` and one for each worker.
- *A replica that comes late* says how many results it holds. Those that its reader has been told of, or that are in a
  newer one, it does not take the place of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.rounds.seat import Seat

MANY = 8  # results that wait for one worker: from then on a replica is asked for
MORE = 4  # so many beyond that, anybody is asked; until then who laid one down last, whose memory is there already


class Spares:
    """Who is asked for a replica, among workers that can lay one down and take one over."""

    def __init__(self) -> None:
        self._able: set[int] = set()
        self._asked: set[int] = set()
        self._last: int | None = None

    def can(self, rank: int) -> None:
        """This worker can lay one down, and take one over."""
        self._able.add(rank)

    def cannot(self, rank: int) -> None:
        """This one cannot lay one down after all."""
        self._able.discard(rank)
        self._asked.discard(rank)

    def asks(self, rank: int, seats: Mapping[int, Seat]) -> bool:
        """``rank`` has come: is it to lay a replica down? If so, it is asked only once until it has."""
        seat = seats[rank]
        if rank not in self._able or rank in self._asked or seat.place.taken < seat.results - seat.rules.late:
            return False
        others = [one for other, one in seats.items() if one.kept >= MANY and other != rank and other in self._able]
        waiting = max((one.waiting for one in others), default=0)
        if waiting < (MANY if self._last in (None, rank) else MANY + MORE):
            return False
        self._asked.add(rank)
        self._last = rank
        return True

    def laid(self, rank: int, upto: int, seats: Mapping[int, Seat]) -> list[Seat]:
        """``rank`` has laid one down that holds ``upto`` results: for whom it takes the place of many."""
        self._asked.discard(rank)
        others = [one for other, one in seats.items() if other != rank and other in self._able]
        return [one for one in others if one.waiting >= MANY and one.heard_of < upto]
