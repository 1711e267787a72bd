"""What a worker says of memory while it computes, where work ends later than the call that asks for it: on a GPU.

A worker that waits for its rounds has read its results when its stream has come so far. It does not wait for that: a
thread does, and says then that they are read no longer, and gives back the slots that the worker does not need. Before
the worker speaks to the hub about its work again it says `hush`: from then on what it says is about newer results.
"""

from __future__ import annotations

import threading
from typing import Any

from offbeat.live.carriers.shelves import Shelves
from offbeat.live.partial.reading import Reader

LEAVE_S = 5.0


class Later:
    """The thread. ``_lock`` protects what it is to wait for; it is held while it speaks, so that the worker does not
    speak of newer results meanwhile."""

    def __init__(self, reader: Reader, shelves: Shelves) -> None:
        self._reader, self._shelves = reader, shelves
        self._lock = threading.Condition()
        self._mark: Any = None
        self._ended = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def let_go(self) -> None:
        """The worker computes; nothing that it was given is read when all that it has asked for so far is done."""
        self._reader.give_back()  # what it has laid down: if that is in a sum that is there, nobody reads it
        with self._lock:
            if not self._reader.is_reading or self._mark is not None or self._failure is not None:
                return
            self._mark = self._shelves.mark()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="offbeat-later", daemon=True)
                self._thread.start()
            self._lock.notify_all()

    def hush(self) -> None:
        """The worker is about to speak to the hub itself."""
        with self._lock:
            self._mark = None

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._ended or self._mark is not None)
                    mark = self._mark
                if self._ended:
                    return
                mark.synchronize()
                with self._lock:
                    if self._mark is mark and not self._ended:
                        self._mark = None
                        self._reader.let_go(settled=False)
        except BaseException as error:  # the worker finds out itself that the line is broken
            self._failure = error

    def end(self) -> bool:
        """Let the thread end. False: it works on."""
        with self._lock:
            self._ended = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(LEAVE_S)
        self._failure = None
        return self._thread is None or not self._thread.is_alive()
