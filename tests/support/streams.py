"""A stream without a GPU: it comes as far as it is told to."""

from __future__ import annotations

import threading

SOON_S = 10.0


class Mark:
    """Somewhere in a stream, which comes there when it is told to."""

    def __init__(self) -> None:
        self.reached, self.waited_for = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self.reached.wait(SOON_S)

    def query(self) -> bool:
        return self.reached.is_set()
