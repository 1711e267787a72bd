"""An experiment, as data: a paper's claim, the scene it was made in, the rivals, and what ours must come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from offbeat.delays import Seconds
from offbeat.experiments.workloads import Workload
from offbeat.sim import Network

Measure = Literal["speed-up", "speed-up to the same training loss", "bytes", "loss", "training loss", "points lost",
                  "efficiency", "work", "score lost", "time to the best score"]  # fmt: skip
ALL_IN_ONE = "self_clocked"


@dataclass(frozen=True)
class Case:
    """Workers, how long their steps take, who is late, and what a message costs.

    ``step_s``: a step that nobody delays; ``compute_s`` stands in its place where steps are uneven by themselves, and
    ``uneven`` says by what. ``by_content``: a step takes as long as the workload says of its batch, this on average.
    ``injected``: who is made late here, in words. ``message_bytes``: the model of the paper whose messages are to cost
    what they cost there; ours is smaller, and the network slower by as much. ``learns``: with gradients, or time alone.
    ``ends``: when all together have taken their gradients, or at the time that those would take if nobody were late.
    ``quick``: whether the small version has it, too.
    """

    name: str
    workers: int
    step_s: float
    compute_s: Seconds | None = None
    uneven: str = ""
    by_content: bool = False
    delays: Seconds | None = None
    injected: str = ""
    network: Network = field(default_factory=Network)
    message_bytes: float | None = None
    learns: bool = True
    ends: Literal["samples", "time"] = "samples"
    quick: bool = True

    @property
    def title(self) -> str:
        uneven = f"uneven: {self.uneven}; " if self.uneven else ""
        return f"{self.name}; {uneven}{f'injected: {self.injected}' if self.injected else 'nothing injected'}"


@dataclass(frozen=True)
class Size:
    """How much is run. ``steps``: gradients of each worker, on average; ``timed_steps``: where only time is simulated.

    ``seeds``: how many the figures are of, and ``timed_seeds`` those of time alone (1, where nothing is drawn);
    ``tuning_seeds`` are those of the search for a learning rate. None is in both.
    """

    steps: int
    seeds: int
    workload: Workload | None = None
    batch: int = 16
    timed_steps: int = 64
    timed_seeds: int = 1
    tuning_seeds: int = 1
    points: int = 40


@dataclass(frozen=True)
class Claim:
    """What ours must come to, on the median over seeds: ``at_least`` or ``at_most``.

    ``paper``: what the paper has there. ``of``: our methods, each of which is judged by itself. ``over``: the rivals,
    by the one of whom a seed counts against which ours looks worst; for the time to the best score, by the one with the
    highest. ``among``: cases whose names contain this.
    """

    paper: str
    measure: Measure
    of: tuple[str, ...]
    over: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    among: str = ""
    learning: bool = True

    @property
    def goal(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


@dataclass(frozen=True)
class Experiment:
    """A row of the papers' claims. ``papers``: by the names of the methods; ``methods``: labels, and methods in words.

    The first of the methods is the one whose time counts as 1×.
    """

    name: str
    papers: tuple[str, ...]
    claim: str
    here: str
    methods: Mapping[str, str]
    cases: tuple[Case, ...]
    claims: tuple[Claim, ...]
    full: Size
    quick: Size

    @property
    def needs(self) -> str:
        """What a full run needs that does not come with the package."""
        work = self.full.workload
        return "nothing" if work is None else " and ".join(work.needs) or "nothing"
