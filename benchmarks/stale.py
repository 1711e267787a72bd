"""What to do with a gradient that came too late: ``eager`` with ``stale="carry"``, ``"fade"`` and ``"drop"``.

    python benchmarks/stale.py [--workers 8] [--seeds 3] [--keep FILE] [--json FILE] [--quick]

Digits (hidden layer of 32, batch of 16 each), 100 median steps of virtual time, messages next to free. Each rule has
its own best learning rate: of four, each twice the one before, with seed 0, and further by twice or half while the best
lies at the end of those tried, twice at most. Figures are of other seeds: the loss on held-out data, its mean with the
least and the most, over the mean of ``carry``; and which share of the gradients were dropped, or came late.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Literal

import torch
from harness import Report, arguments

import offbeat as ob
from offbeat.delays import Seconds

UNITS, HIDDEN, BATCH, FURTHER = 100.0, 32, 16, 2
TIMES: dict[str, Seconds] = {
    "another is late each step (log-normal 0.5)": ob.delays.lognormal(1.0, 0.5),
    "always the same is 2.5 times slower": lambda step, rank: 2.5 if rank == 0 else 1.0,
}
RATES = {
    "SGD": (0.1, 0.2, 0.4, 0.8),
    "momentum": (0.025, 0.05, 0.1, 0.2),
    "AdamW": (0.0025, 0.005, 0.01, 0.02),
}
WAITS: tuple[str | float, ...] = ("first", 0.5)
Stale = Literal["carry", "fade", "drop"]
STALES: tuple[Stale, ...] = ("carry", "fade", "drop")


@dataclass(frozen=True)
class Case:
    times: str
    optimiser: str
    wait: str | float
    stale: Stale
    workers: int
    rate: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    loss: float
    late: float  # the share of the gradients that came too late for their round


def run(case: Case) -> Outcome:
    task = ob.tasks.digits(batch=BATCH, hidden=HIDDEN, lr=case.rate, seed=case.seed)
    if case.optimiser == "momentum":
        task = replace(task, optimizer=partial(torch.optim.SGD, lr=case.rate, momentum=0.9))
    if case.optimiser == "AdamW":
        task = replace(task, optimizer=partial(torch.optim.AdamW, lr=case.rate, fused=True))
    done = ob.simulate(
        ob.eager(case.wait, stale=case.stale, sync="bounded", staleness=20, grace=0),
        task,
        case.workers,
        seconds=UNITS,
        seed=case.seed,
        compute_s=TIMES[case.times],
        network=ob.Network(latency_s=1e-4, bandwidth_Bps=1e12),
    )
    fresh = sum(len(one.fresh) for one in done.trace.rounds)
    loss = done.metrics["loss"]
    return Outcome(loss if math.isfinite(loss) else 1e9, 1 - fresh / sum(done.gradients))


class Kept:
    """Every outcome in a file, so that what was interrupted goes on where it was."""

    def __init__(self, file: str | None) -> None:
        self._file = Path(file) if file else None
        lines = self._file.read_text().splitlines() if self._file is not None and self._file.exists() else []
        self._found = {Case(**case): Outcome(**outcome) for case, outcome in map(json.loads, lines)}

    def __call__(self, case: Case) -> Outcome:
        if case not in self._found:
            self._found[case] = outcome = run(case)
            if self._file is not None:
                with self._file.open("a") as out:
                    out.write(json.dumps([asdict(case), asdict(outcome)]) + "\n")
        return self._found[case]


def best_rate(first: Case, outcome: Kept) -> float:
    tried = {rate: outcome(replace(first, rate=rate)).loss for rate in RATES[first.optimiser]}
    for _ in range(FURTHER):
        best = min(tried, key=tried.__getitem__)
        if best not in (min(tried), max(tried)):
            break
        rate = best * (0.5 if best == min(tried) else 2.0)
        tried[rate] = outcome(replace(first, rate=rate)).loss
    return min(tried, key=tried.__getitem__)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", metavar="FILE", help="keep every run here, and go on from what it holds")
    parser.add_argument("--only", choices=list(RATES), help="one optimiser")
    parser.add_argument("--quick", action="store_true", help="one cell, one seed: does it run?")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(f"late gradients of eager: {chosen.workers} workers, {UNITS:g} median steps of time", chosen)
    outcome, seeds = Kept(chosen.keep), range(1, 2 if chosen.quick else chosen.seeds + 1)
    cells = [(times, optimiser, wait) for times in TIMES for optimiser in RATES for wait in WAITS]
    cells = [cell for cell in cells if chosen.only in (None, cell[1])]
    for times, optimiser, wait in cells[:1] if chosen.quick else cells:
        carried = math.nan
        for stale in STALES:
            first = Case(times, optimiser, wait, stale, chosen.workers, 0.0, 0)
            rate = best_rate(first, outcome)
            found = [outcome(replace(first, rate=rate, seed=seed)) for seed in seeds]
            losses = [one.loss for one in found]
            carried = mean(losses) if stale == "carry" else carried
            report.row(
                f"{times.partition(' (')[0]}, {optimiser}, wait {wait}: {stale} at {rate:g}",
                f"{mean(losses):.4f} ({min(losses):.3f} … {max(losses):.3f})  {mean(losses) / carried:.2f} of carry, "
                f"late {mean([one.late for one in found]):.0%}",
                **asdict(first),
                best=rate,
                losses=[round(x, 4) for x in losses],
                late=round(mean([one.late for one in found]), 3),
            )
    report.close()


if __name__ == "__main__":
    main()
