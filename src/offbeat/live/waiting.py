"""Waiting for the network without going deaf.

A blocked wait would swallow Ctrl-C, and would not hear that a peer has failed. So every wait is cut into slices; in
between Python runs signal handlers, and the board is looked at. A slice that runs out leaves the operation untouched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from torch.distributed import Work

from offbeat.live.board import Board
from offbeat.live.errors import PeerFailed

FIRST_SLICE = timedelta(milliseconds=20)
SLICE = timedelta(milliseconds=100)
POLL_S = 0.001


class Waiter:
    """Waits for works; counts the seconds spent.

    ``t`` is the step this worker takes with data (those without need to know it), or −1.
    """

    def __init__(self, board: Board, patience_s: float) -> None:
        self._board, self._patience_s = board, patience_s
        self.waited_s = 0.0
        self.t = -1

    def give_up(self) -> None:
        """The run is given up here: a wait in another thread ends soon, with an error that nobody will read."""
        self._patience_s = 0.0

    def wait(self, works: Iterable[Work], what: str) -> None:
        """Until all are done."""
        start = time.monotonic()
        if self.t >= 0 and self._board.someone_is_done:
            self._board.reach(self.t)
        for work in works:
            slice_ = FIRST_SLICE
            while not self._done(work, slice_, what):
                slice_ = SLICE
                self._look(start, what)
        self.waited_s += time.monotonic() - start

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Poll the board until ``ready``."""
        start = time.monotonic()
        next_look = start + FIRST_SLICE.total_seconds()
        while not ready():
            if time.monotonic() >= next_look:
                self._look(start, what)
                next_look = time.monotonic() + SLICE.total_seconds()
            time.sleep(POLL_S)
        self.waited_s += time.monotonic() - start

    def _look(self, start_s: float, what: str) -> None:
        self._board.check()
        if self.t >= 0 and self._board.look_for_done():
            self._board.reach(self.t)
        if time.monotonic() - start_s > self._patience_s:
            raise PeerFailed(f"waited {self._patience_s:.0f} s for {what}; a peer is stuck or gone")

    def _done(self, work: Work, slice_: timedelta, what: str) -> bool:
        try:
            work.wait(slice_)
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait()  # it may have ended well just after the slice ran out
            except RuntimeError as error:
                # A peer that raised posts its own words before it closes its sockets; one that was killed posts none.
                self._board.check()
                self._board.fail(what, lost=True)
                raise self._board.lost(what) from error
        return True
