"""Simulated workers: each by itself, and those who take their steps together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from offbeat.method.effects import Effect
from offbeat.method.replica import Replica
from offbeat.sim.exchanges import Pending
from offbeat.tensors.vector import Vec

Seconds = Callable[[int, int], float]  # of (step, rank)
Piece = tuple[int, int, int, int]  # batch, from row, to row, round


@dataclass(frozen=True)
class Work:
    """What computing takes and gives.

    ``ask``: a worker begins to compute the gradient of its batch; ``gradient``: it is there. ``rows``: how many samples
    a batch has; ``union``: the sum of the gradients of some of them.
    """

    compute_s: Seconds
    delay_s: Seconds
    ask: Callable[[int, int], None]
    gradient: Callable[[int], Vec]
    rows: Callable[[int, int], int]
    union: Callable[[int, list[Piece]], Vec]


class Worker:
    """One simulated worker: its coroutine and what it is waiting for."""

    __slots__ = (
        "asked_s",
        "away_s",
        "coroutine",
        "counts_in",
        "done",
        "ended",
        "finished_s",
        "handed_in_s",
        "idle",
        "in_flight",
        "is_cut",
        "is_dead",
        "known",
        "lost",
        "me",
        "missed",
        "rank",
        "seq",
        "spent_s",
        "taken",
        "waits",
    )

    def __init__(self, me: Replica, coroutine: Coroutine[Effect[Any], Any, None]) -> None:
        self.me, self.rank, self.coroutine = me, me.rank, coroutine
        self.seq = 0  # mixes asked for so far: the k-th meets everybody's k-th
        self.taken = 0  # gradients begun, by its twin where it was not there
        self.missed = 0  # of these, those begun by another one
        self.in_flight: list[Pending] = []  # begun, and not finished
        self.known: deque[Pending] = deque()  # what its twin had begun, and knows what came of
        self.counts_in: list[Crowd] = []  # as one that is done
        self.idle = self.done = self.ended = self.is_dead = self.is_cut = False
        self.finished_s = self.asked_s = 0.0
        self.spent_s = 0.0  # of its own, since its method asked last
        self.handed_in_s = 0.0  # when what came of the step it is in is others', inf: not yet
        self.lost: int | None = None  # the step that died with it
        self.away_s: float | None = None  # since when the one before it has been dead, until this one is there
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
