"""A clock that is set, in place of a server's."""

from __future__ import annotations


class Clock:
    """As a module ``time`` it has ``monotonic`` alone."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s
