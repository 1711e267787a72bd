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
    """Waits for works; counts the seconds spent."""

    def __init__(self, board: Board, patience_s: float) -> None:
        self._board, self._patience_s = board, patience_s
        self.waited_s = 0.0

    def wait(self, works: Iterable[Work], t: int, what: str) -> None:
        """Until all are done. ``t`` is this worker's step if it has data (the idle ones need to know), else −1."""
        start = time.monotonic()
        if t >= 0 and self._board.someone_is_done:
            self._board.reach(t)
        for work in works:
            slice_ = FIRST_SLICE
            while not self._done(work, slice_, what):
                slice_ = SLICE
                self._board.check()
                if t >= 0 and self._board.look_for_done():
                    self._board.reach(t)
                if time.monotonic() - start > self._patience_s:
                    raise PeerFailed(f"waited {self._patience_s:.0f} s for {what}; a peer is stuck or gone")
        self.waited_s += time.monotonic() - start

    def _done(self, work: Work, slice_: timedelta, what: str) -> bool:
        try:
            work.wait(slice_)
        except RuntimeError as error:
            if not work.is_completed():
                return False
            self._board.check()  # the peer's own words, if it left any
            # A peer that raised posts its message before it closes its sockets, but one that was killed posts none.
            lost = f"lost a peer during {what}: {str(error).splitlines()[0]}"
            self._board.fail(lost)
            raise PeerFailed(f"rank {self._board.rank} {lost}") from error
        return True

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Poll the board until ``ready``."""
        start = next_check = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now >= next_check:
                self._board.check()
                next_check = now + SLICE.total_seconds()
            if now - start > self._patience_s:
                raise PeerFailed(f"waited {self._patience_s:.0f} s for {what}; a peer is stuck or gone")
            time.sleep(POLL_S)
