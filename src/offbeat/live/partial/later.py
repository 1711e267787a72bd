"""What a worker says of memory while it computes, where work ends later than the call that asks for it: on a GPU.

A worker that waits for its rounds has read its results when its stream has come so far. It does not wait for that: a
thread does, and says then that they are read no longer, and gives back the slots that the worker does not need. Before
the worker speaks to the hub about its work again it says `hush`: from then on what it says is about newer results.
"""

from __future__ import annotations

import threading
from typing import Any

from offbeat.live.carriers.shelves import Shelves
from offbeat.live.partial.marks import Marks
from offbeat.live.partial.reading import Reader


class Later:
    """``_lock`` protects what is waited for; the thread holds it while it speaks, so that the worker does not speak of
    newer results meanwhile."""

    def __init__(self, reader: Reader, shelves: Shelves) -> None:
        self._reader, self._shelves = reader, shelves
        self._lock, self._marks = threading.Lock(), Marks()
        self._mark: Any = None
        self._is_broken = False

    def let_go(self) -> None:
        """The worker computes; nothing that it was given is read when all that it has asked for so far is done."""
        self._reader.give_back()  # what it has laid down: if that is in a sum that is there, nobody reads it
        with self._lock:
            if not self._reader.is_reading or self._mark is not None or self._is_broken:
                return
            mark = self._mark = self._shelves.mark()
        self._marks.wait_for(mark, lambda: self._is_there(mark))

    def hush(self) -> None:
        """The worker is about to speak to the hub itself."""
        with self._lock:
            self._mark = None

    def _is_there(self, mark: Any) -> None:
        with self._lock:
            if self._mark is not mark:
                return
            self._mark = None
            try:
                self._reader.let_go(settled=False)
            except BaseException:  # the worker finds out itself that the line is broken
                self._is_broken = True

    def end(self) -> bool:
        """Say nothing any more. False: the thread works on."""
        self.hush()
        return self._marks.end()
