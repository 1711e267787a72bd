"""What happened when. Both worlds write it; reports read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from offbeat.topology.hierarchy import Nodes

Doing = Literal["compute", "delay", "wait", "communicate"]
DOINGS: tuple[Doing, ...] = ("compute", "delay", "wait", "communicate")


class Span(NamedTuple):
    """One worker doing one thing for a while."""

    rank: int
    step: int
    doing: Doing
    start_s: float
    end_s: float


class Point(NamedTuple):
    """A number at a moment of the run; ``samples`` is how many all workers had learnt from by then."""

    time_s: float
    samples: int
    value: float


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange: who began it, whose newest work was in it, how old the rest was, how long each one waited."""

    version: int
    started_by: int
    fresh: tuple[int, ...]
    staleness: Mapping[int, int]
    waited_s: Mapping[int, float]
    end_s: float = 0.0

    def spread_over(self, nodes: Nodes) -> Round:
        """A round of nodes as one of their workers."""
        if nodes.per_node == 1:
            return self
        return Round(
            self.version,
            nodes.leader(self.started_by) if self.started_by >= 0 else -1,
            tuple(rank for node in self.fresh for rank in nodes.ranks(node)),
            nodes.spread(self.staleness),
            nodes.spread(self.waited_s),
            self.end_s,
        )

    @classmethod
    def among(
        cls,
        nodes: Nodes,
        version: int,
        started_by: int,
        shares: Mapping[int, tuple[int, bool]],
        waited_s: Mapping[int, float],
        end_s: float,
    ) -> Round:
        """A partial round, from what each seat has said of its part: how old it was, and whether it was fresh."""
        fresh = tuple(rank for rank, (_, is_fresh) in shares.items() if is_fresh)
        ages = {rank: age for rank, (age, _) in shares.items()}
        return cls(version, started_by, fresh, ages, waited_s, end_s).spread_over(nodes)

    @property
    def members(self) -> tuple[int, ...]:
        """Everybody who is known to have taken part."""
        return tuple(sorted({*self.fresh, *self.staleness, *self.waited_s}))


@dataclass
class Trace:
    """The record of a run. ``spans`` are kept only when asked for: they grow with workers × steps.

    ``series`` are numbers over time: ``loss`` (of the training batches), ``spread`` (of the replicas: the mean of
    ‖x_i − x̄‖²), ``period`` (of adaptive averaging).
    """

    rounds: list[Round] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    keep_spans: bool = True
    keep_rounds: bool = True
    series: dict[str, list[Point]] = field(default_factory=dict)

    def span(self, rank: int, step: int, doing: Doing, start_s: float, end_s: float) -> None:
        if self.keep_spans and end_s > start_s:
            self.spans.append(Span(rank, step, doing, start_s, end_s))

    def busy_s(self, workers: int) -> list[list[float]]:
        """For each worker, the seconds of its own (late or computing) in each of its steps."""
        total: list[dict[int, float]] = [defaultdict(float) for _ in range(workers)]
        for rank, step, doing, start_s, end_s in self.spans:
            if rank < workers and doing in ("compute", "delay"):
                total[rank][step] += end_s - start_s
        return [[steps[step] for step in sorted(steps)] for steps in total]

    def wait_s(self, workers: int) -> list[float]:
        """For each worker, the seconds it waited or communicated in the open."""
        total = [0.0] * workers
        for rank, _, doing, start_s, end_s in self.spans:
            if rank < workers and doing in ("wait", "communicate"):
                total[rank] += end_s - start_s
        return total


def merged(rounds: list[list[Round]]) -> list[Round]:
    """Rounds that several workers recorded, each from its own side, as one list in the order of time."""
    together: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Round] = {}
    for recorded in rounds:
        for r in recorded:
            key = (r.version, tuple(sorted(r.staleness)), r.fresh)
            seen = together.get(key)
            if seen is not None:
                waited = {**seen.waited_s, **r.waited_s}
                r = Round(r.version, r.started_by, r.fresh, r.staleness, waited, max(seen.end_s, r.end_s))
            together[key] = r
    return sorted(together.values(), key=lambda r: (r.end_s, r.version))
