"""A thread that makes sums among hosts, one after the other, while the worker computes.

Such a sum has steps of its own between its parts, which nobody takes while the worker's thread is in its forward pass.
All ranks ask for the same sums in the same order, so their porters meet in each. What the two threads share: the
queue, and an event for each errand; what an errand works on is the porter's from ``send`` until it is over. An error
ends all errands, also those to come: whoever waits for one hears of it, and nobody waits for a porter that has ended.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from queue import SimpleQueue

from offbeat.live.transport.errors import OffbeatError, PeerFailed
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter

LEAVE_S = 5.0


class Errand:
    """One sum under way."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Callable[[], None] | None = run
        self.over = threading.Event()
        self.failure: BaseException | None = None

    def within(self, seconds: float) -> bool:
        if not self.over.wait(seconds):
            return False
        if isinstance(self.failure, OffbeatError):
            raise self.failure
        if self.failure is not None:
            raise PeerFailed(f"a sum among hosts failed: {self.failure}") from self.failure
        return True


class Porter:
    """The thread, from its first errand to the end of the run. ``waiter`` is for its sums alone."""

    def __init__(self, board: Board) -> None:
        self.waiter = Waiter(board, math.inf)  # it may wait while others compute; the worker's patience counts
        self._errands: SimpleQueue[Errand | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, run: Callable[[], None]) -> Errand:
        """Let the porter ``run`` this, after all that it was sent for before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="offbeat-porter", daemon=True)
            self._thread.start()
        errand = Errand(run)
        self._errands.put(errand)
        return errand

    def _run(self) -> None:
        failure: BaseException | None = None
        while (errand := self._errands.get()) is not None:
            try:
                if failure is None and errand.run is not None:
                    errand.run()
            except BaseException as error:
                failure = error
            errand.run, errand.failure = None, failure  # nothing of it is held until the next
            errand.over.set()
            del errand

    def close(self, give_up: bool = False) -> None:
        """End the thread: when all errands are done, or, giving up, soon."""
        if self._thread is None:
            return
        if give_up:
            self.waiter.give_up()
        self._errands.put(None)
        self._thread.join(LEAVE_S)
        self._thread = None
