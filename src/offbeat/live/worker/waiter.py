"""Waiting for the network without going deaf.

A blocked wait would swallow Ctrl-C, and would not hear that a peer has failed. So every wait is cut into slices; in
between Python runs signal handlers, and the board is looked at. A slice that runs out leaves the operation untouched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from torch.distributed import Work as Gloos

from offbeat.live.transport import elsewhere
from offbeat.live.transport.errors import PeerFailed
from offbeat.live.worker.board import Board

FIRST_SLICE = timedelta(milliseconds=20)
SLICE = timedelta(milliseconds=100)
LAST_SLICE = timedelta(milliseconds=300)


class OurWork(Protocol):
    """Something under way, of our own making."""

    def within(self, seconds: float) -> bool:
        """Whether it is over; waits no longer than that."""
        ...


Work = OurWork | Gloos


class Waiter:
    """Waits for works; counts the seconds spent.

    ``t`` is the step this worker takes with data (those without need to know it), or −1.
    """

    def __init__(self, board: Board, patience_s: float) -> None:
        self._board, self.patience_s = board, patience_s
        self.waited_s = 0.0
        self.t = -1

    def wait(self, works: Iterable[Work], what: str) -> None:
        """Until all are done."""
        start = since = time.monotonic()
        if self.t >= 0 and self._board.someone_is_done:
            self._board.reach(self.t)
        with self._board.waits_for(what):
            for work in works:
                slice_ = FIRST_SLICE
                while not self._done(work, slice_, what):
                    slice_ = SLICE
                    try:
                        since = self._look(since, what)
                    except PeerFailed:
                        self._let_end(work)
                        raise
        self.waited_s += time.monotonic() - start

    def until(self, ready: Callable[[], bool], what: str, bears: bool = False) -> None:
        """Until the board says so.

        ``bears``: others may train for as long as they like, and patience ends only with those who do not even answer.
        """
        start = since = time.monotonic()
        with self._board.waits_for(what):
            while not ready():
                since = self._look(since, what, bears)
                self._board.pause(FIRST_SLICE.total_seconds(), ready)
        self.waited_s += time.monotonic() - start

    def _look(self, since_s: float, what: str, bears: bool = False) -> float:
        """Look up from a wait. Answers since when patience is counted."""
        self._board.check(what)
        if self.t >= 0 and self._board.look_for_done():
            self._board.reach(self.t)
        if bears:
            return self._board.bear_with(since_s, self.patience_s, what)
        if time.monotonic() - since_s > self.patience_s:
            raise self._board.gave_up(self.patience_s, what)
        return since_s

    def _let_end(self, work: Work) -> None:
        """Give an operation that is given up a moment to end by itself: while it is pending, its memory is kept."""
        with suppress(RuntimeError):
            if isinstance(work, Gloos):
                elsewhere.plain_wait(work, LAST_SLICE)

    def _done(self, work: Work, slice_: timedelta, what: str) -> bool:
        if not isinstance(work, Gloos):
            return work.within(slice_.total_seconds())
        try:
            elsewhere.plain_wait(work, slice_)
        except RuntimeError as error:
            if not work.is_completed():
                return False
            try:
                elsewhere.plain_wait(work)  # it may have ended well just after the slice ran out
            except RuntimeError:
                raise self._board.lost(what) from error
        return True
