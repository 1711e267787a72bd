"""Simulated workers: each by itself, and those who take their steps together."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from offbeat.method.effects import Effect
from offbeat.method.replica import Replica


class Worker:
    """One simulated worker: its coroutine and what it is waiting for."""

    __slots__ = ("asked_s", "coroutine", "done", "ended", "finished_s", "idle", "me", "rank", "seq", "taken", "waits")

    def __init__(self, me: Replica, coroutine: Coroutine[Effect[Any], Any, None]) -> None:
        self.me, self.rank, self.coroutine = me, me.rank, coroutine
        self.seq = 0  # mixes asked for so far: the k-th meets everybody's k-th
        self.taken = 0  # gradients begun
        self.idle = self.done = self.ended = False
        self.finished_s = self.asked_s = 0.0
        self.waits = ""


class Crowd:
    """Those who take their steps together: all workers, those of a node, or one by itself."""

    __slots__ = ("done", "idlers", "reached", "size")

    def __init__(self, size: int) -> None:
        self.size, self.done = size, 0
        self.reached = -1  # the last step that one of them took with data
        self.idlers: list[tuple[Worker, int]] = []  # and the step each would take

    @property
    def is_through(self) -> bool:
        return self.done == self.size
