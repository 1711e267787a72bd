"""What a simulated run's numbers were when: loss, spread of the replicas, period. Looks, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from offbeat.method.replica import Replica
from offbeat.runs.trace import Point, Trace
from offbeat.sim.fleet import Fleet
from offbeat.sim.workers import Piece
from offbeat.tensors.vector import Vec

LOOKS = 100


class Observer:
    """Sits where gradients are asked for, and notes when each step's were there.

    ``now`` is the clock. The replicas are compared about a hundred times in a run whose length is known, and once for
    every eight gradients of each worker in others.
    """

    def __init__(self, fleet: Fleet, replicas: Sequence[Replica], trace: Trace, gradients: int | None) -> None:
        self._fleet, self._replicas, self._trace = fleet, replicas, trace
        self._every = max(gradients // LOOKS if gradients else 8 * len(replicas), 1)
        self._seen = self._samples = 0
        self._at: dict[int, tuple[float, int]] = {}  # step → when its last gradient was there, samples by then
        self.now: Callable[[], float] = lambda: 0.0
        self.step: Callable[[int], int] = lambda rank: 0

    def gradient(self, rank: int) -> Vec:
        step = self.step(rank)
        self._note(step, self._fleet.rows(rank, step))
        return self._fleet.gradient(rank)

    def union(self, rank: int, pieces: list[Piece]) -> Vec:
        samples = sum(hi - lo for _, lo, hi, _ in pieces)
        if pieces:
            self._note(pieces[-1][3], samples)
        return self._fleet.union(rank, pieces)

    def _note(self, step: int, samples: int) -> None:
        self._samples += samples
        self._at[step] = (self.now(), self._samples)
        self._seen += 1
        if self._seen % self._every == 0:
            apart = sum(float((part - part.mean(dim=0)).square().sum()) for part in self._fleet.X)
            self._add("spread", apart / len(self._replicas))
            if (period := self._replicas[0].reported.period) is not None:
                self._add("period", period)

    def _add(self, name: str, value: float) -> None:
        self._trace.series.setdefault(name, []).append(Point(self.now(), self._samples, value))

    def close(self, losses: Tensor) -> None:
        """The losses are known at the end of the run; they get the moments of their steps."""
        points = [Point(*self._at[step], loss) for step, loss in enumerate(losses.tolist()) if step in self._at]
        if points:
            self._trace.series["loss"] = points
