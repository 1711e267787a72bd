"""When a GPU has come so far: a thread waits for that, so that whoever wants to know can do something else meanwhile.

A worker's second thread hears answers while it is to say what its worker has handed in, as soon as that is there. If it
waited for the GPU itself, the answers would wait, too; if it looked again and again, it would take the interpreter from
the worker each time. So this one waits, and calls.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LEAVE_S = 5.0

Call = Callable[[], object]


class Marks:
    """What is waited for, in its order. One thread asks, the other waits; they share the queue alone."""

    def __init__(self) -> None:
        self._marks: queue.SimpleQueue[tuple[Any, Call] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait_for(self, mark: Any, then: Call) -> None:
        """Call ``then`` when ``mark`` is there; None: it is."""
        if mark is None:
            then()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="offbeat-marks", daemon=True)
            self._thread.start()
        self._marks.put((mark, then))

    def _run(self) -> None:
        while (found := self._marks.get()) is not None:
            mark, then = found
            with suppress(RuntimeError):  # a GPU that has failed: whoever is called finds out
                mark.synchronize()
            then()
            del found, mark, then  # else they are kept until the next one comes

    def end(self) -> bool:
        """Let the thread end. False: it waits on, for a GPU that does not come so far."""
        if self._thread is None:
            return True
        self._marks.put(None)
        self._thread.join(LEAVE_S)
        return not self._thread.is_alive()
