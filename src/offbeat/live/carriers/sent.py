"""An exchange under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.live.worker.waiter import Work
from offbeat.method.effects import Ticket
from offbeat.tensors.vector import Vec


class Sent(Ticket[Vec]):
    """What an exchange waits for, and how the result is put together then."""

    __slots__ = ("_result", "works")

    def __init__(self, works: Sequence[Work], result: Callable[[], Vec]) -> None:
        self.works, self._result = works, result

    def result(self) -> Vec:
        """Call once, when all works are done."""
        return self._result()

    def keep(self) -> Vec:
        """The result, now; `result` will answer the same."""
        value = self._result()
        self.works, self._result = (), lambda: value
        return value
