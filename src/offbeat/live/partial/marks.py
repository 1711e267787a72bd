"""When a GPU has come so far: a thread waits for that, so that whoever wants to know can do something else meanwhile.

A worker's second thread hears answers while it is to say what its worker has handed in, as soon as that is there. If it
waited for the GPU itself, the answers would wait, too; if it looked again and again, it would take the interpreter from
the worker each time. So this one waits, and wakes it.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from typing import Any

LEAVE_S = 5.0


class Marks:
    """``wakes``: where to write what was waited for. One thread asks, the other waits; they share the queue alone."""

    def __init__(self, wakes: int) -> None:
        self._wakes = wakes
        self._marks: queue.SimpleQueue[tuple[Any, bytes] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait_for(self, mark: Any, word: bytes) -> None:
        """Write ``word`` when ``mark`` is there; None: it is."""
        if mark is None:
            os.write(self._wakes, word)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="offbeat-marks", daemon=True)
            self._thread.start()
        self._marks.put((mark, word))

    def _run(self) -> None:
        while (found := self._marks.get()) is not None:
            mark, word = found
            with suppress(RuntimeError):  # a GPU that has failed: whoever is woken finds out
                mark.synchronize()
            os.write(self._wakes, word)

    def end(self) -> bool:
        """Let the thread end. False: it waits on, for a GPU that does not come so far."""
        if self._thread is None:
            return True
        self._marks.put(None)
        self._thread.join(LEAVE_S)
        return not self._thread.is_alive()
