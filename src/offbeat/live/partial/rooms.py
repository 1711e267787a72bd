"""Who waits for a slot to lay something down in, and for how long.

Where all come at the same moment, each lays down something new beside what still answers for it. Most of these slots
would be idle a moment later. So where memory has become scarce, and somebody is at work whose next word will free some,
the others wait for that word. Nobody waits where nobody is at work, nor longer than that work may take; and a worker
that was waited for in vain (it may have been stopped) is not waited for again before it has spoken. This is about
memory alone: what is in a round, and who may go on, is decided elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from offbeat.rounds.rules import Rules

if TYPE_CHECKING:
    from offbeat.live.partial.stacks import Slots

FOR_SUMS = 1  # slots that are left for them: a sum is never waited for, and frees what it was made of


def enough(rules: Rules, size: int) -> int:
    """So many slots as all workers together should need."""
    return (3 if rules.late or rules.absent == "shared" else 2) * size - 1


class Rooms:
    """Those who wait for a slot. ``at_work``: the workers whose next word will free something, and comes soon."""

    def __init__(self, slots: Slots, rules: Rules, size: int, at_work: Callable[[], Iterable[int]]) -> None:
        self._slots, self._at_work = slots, at_work
        self._enough = enough(rules, size)
        self._waiting: dict[int, float] = {}  # until when
        self._in_vain: set[int] = set()  # those who were waited for, and have not spoken since

    def hears(self, worker: int) -> None:
        """It speaks."""
        self._in_vain.discard(worker)

    def puts_off(self, worker: int) -> bool:
        """Whether it waits for a slot, from now on or as before."""
        if self._is_scarce and (others := self._waits_for(worker)):
            until_s = self._waiting.setdefault(worker, time.monotonic() + self._slots.grace_s)
            if time.monotonic() < until_s:
                return True
            self._in_vain |= others
        self.waits_no_more(worker)
        return False

    def waits_no_more(self, worker: int) -> None:
        """It has one."""
        self._waiting.pop(worker, None)

    @property
    def _is_scarce(self) -> bool:
        return self._slots.pooled and self._slots.in_use + 1 + FOR_SUMS > self._enough

    def _waits_for(self, worker: int) -> set[int]:
        return set(self._at_work()) - self._in_vain - set(self._waiting) - {worker}

    @property
    def waiting(self) -> list[int]:
        """Those who do, who has waited longest first."""
        return list(self._waiting)

    @property
    def pause_s(self) -> float | None:
        """How long the first of them will wait."""
        if not self._waiting:
            return None
        return max(0.0, min(self._waiting.values()) - time.monotonic())
