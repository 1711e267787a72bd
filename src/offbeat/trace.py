"""What happened when. Both worlds write it; reports read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Doing = Literal["compute", "delay", "wait", "communicate"]


class Span(NamedTuple):
    """One worker doing one thing for a while."""

    rank: int
    step: int
    doing: Doing
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange: who began it, whose newest work was in it, how old the rest was, how long each one waited."""

    version: int
    started_by: int
    fresh: tuple[int, ...]
    staleness: Mapping[int, int]
    waited_s: Mapping[int, float]
    end_s: float = 0.0


@dataclass
class Trace:
    """The record of a run. ``spans`` are kept only when asked for: they grow with workers × steps."""

    rounds: list[Round] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    keep_spans: bool = True
    keep_rounds: bool = True

    def span(self, rank: int, step: int, doing: Doing, start_s: float, end_s: float) -> None:
        if self.keep_spans and end_s > start_s:
            self.spans.append(Span(rank, step, doing, start_s, end_s))
