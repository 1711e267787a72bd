"""What came out, as tables in words, and as plain values for JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from offbeat.basics.units import format_bytes, format_seconds
from offbeat.experiments.experiment import Case, Experiment, Size
from offbeat.experiments.figures import Figures
from offbeat.experiments.judging import SAID, Verdict, judge
from offbeat.experiments.trying import TUNING_SEED, Found, Trial, never_waiting
from offbeat.strategies import METHODS

SMALL = "This is the small version: its figures show that the experiment runs, and are no result."


@dataclass(frozen=True)
class Telling:
    """One experiment as it was run: with which command, when, on what."""

    experiment: Experiment
    size: Size
    cases: Sequence[Case]
    found: Mapping[str, Mapping[str, Found]]
    quick: bool
    command: str
    made: str
    versions: Mapping[str, str]
    folder: Path | None = None

    @property
    def verdicts(self) -> list[Verdict]:
        return judge(self.experiment.claims, self.cases, self.found)

    @property
    def with_losses(self) -> list[Case]:
        """The cases that have losses on the way."""
        work = self.size.workload
        return [case for case in self.cases if case.learns and work is not None and work.has_losses]

    def text(self) -> str:
        """The whole table, as Markdown that is readable as it is."""
        about = self.experiment
        papers = "; ".join(
            f"{METHODS[name].paper.title} ({METHODS[name].paper.year}, arXiv:{METHODS[name].paper.arxiv})"
            for name in about.papers[:1]
        )
        lines = [f"# {about.name}", "", *([SMALL, ""] if self.quick else [])]
        lines += [f"The paper: {papers}.", f"Its claim: {about.claim}.", f"Here: {about.here}", self._how(), ""]
        lines += [
            f"`{self.command}`",
            "",
            f"{self.made}; {', '.join(f'{k} {v}' for k, v in self.versions.items())}",
            "",
        ]
        for case in self.cases:
            lines += [f"## {case.title}", "", *self._case(case), ""]
        lines += ["## Claims", "", *_aligned(self._claims()), ""]
        return "\n".join(lines)

    def json(self) -> dict[str, object]:
        """Every figure, with the search that went before it."""
        return {
            "experiment": self.experiment.name,
            "quick": self.quick,
            "command": self.command,
            "made": self.made,
            "versions": dict(self.versions),
            "claim": self.experiment.claim,
            "here": self.experiment.here,
            "cases": [
                {
                    "case": case.name,
                    "injected": case.injected,
                    "methods": [
                        {
                            "label": label,
                            "method": self.experiment.methods[label],
                            "tried": {f"{rate:g}": _plain(loss) for rate, loss in found.tried.items()},
                            "figures": [_plain(_without_curve(figures)) for figures in found.figures],
                        }
                        for label, found in self.found[case.name].items()
                    ],
                }
                for case in self.cases
            ],
            "claims": [
                {
                    "case": verdict.case,
                    "method": verdict.method,
                    "over": list(verdict.claim.over),
                    "measure": SAID[verdict.claim.measure],
                    "paper": verdict.claim.paper,
                    "goal": verdict.claim.goal,
                    "values": _plain(verdict.values),
                    "met": verdict.met,
                    "missed_by": 0.0 if verdict.met else _plain(verdict.missed_by),
                }
                for verdict in self.verdicts
            ],
        }

    def curves(self) -> dict[str, object]:
        """The training losses on the way, or the scores: (seconds, loss), by case, method and seed."""
        return {
            case: {label: {f.seed: _plain(f.reached or f.curve) for f in of.figures} for label, of in found.items()}
            for case, found in self.found.items()
        }

    def _how(self) -> str:
        size = self.size
        if size.workload is None or not any(case.learns for case in self.cases):
            return f"Measured: {_seeds(size.timed_seeds)}, medians; {size.timed_steps} steps of each worker."
        last = TUNING_SEED + size.tuning_seeds - 1
        seeds = f"seed {last}" if size.tuning_seeds == 1 else f"seeds {TUNING_SEED} to {last}"
        rates = ", ".join(f"{rate:g}" for rate in size.workload.rates)
        by = "SGD" if not size.workload.adam else "at rates that are searched"
        judged = "held-out loss" if size.workload.has_losses else "score"
        momentum = f", momentum {size.workload.momentum:g}" if size.workload.momentum else ""
        drops = " and ".join(f"{share:.0%}" for share in size.workload.drops)
        falls = f", a tenth of the rate after {drops} of the run" if drops else ""
        timed = (
            f" Time alone: {size.timed_steps} steps, {_seeds(size.timed_seeds)}."
            if any(not case.learns for case in self.cases)
            else ""
        )
        return (
            f"Trained: {size.workload.said}, {by}{momentum}{falls}, batches of {size.batch}, {size.steps} steps of "
            f"each worker on average.{timed} Tuned: every method alike, rates {rates} and up to two further where the "
            f"best is at an end, by the {judged} of {seeds}, once for each number of workers. Measured: "
            f"{_seeds(size.seeds)}, which the search has not seen; medians (least … most)."
        )

    def _case(self, case: Case) -> list[str]:
        found = self.found[case.name]
        first = next(iter(found.values()))
        rows = [self._heads(case)]
        rows += [self._row(case, label, of, first) for label, of in found.items()]
        lines = _aligned(rows)
        base = statistics.median(run.seconds for run in first.figures)
        taken = statistics.median(run.gradients for run in first.figures)
        if case.ends == "samples" and (case.delays is not None or case.compute_s is not None or case.by_content):
            least_s = never_waiting(Trial("", case, self.size, first.figures[0].seed, folder=self.folder), taken)
            lines += [
                "",
                f"If nobody ever waited: {format_seconds(least_s)}, {base / least_s:.2f}× as fast as the first.",
            ]
        return lines

    def _heads(self, case: Case) -> list[str]:
        heads = ["method", "time", "speed-up", "waiting", "sent"]
        work = self.size.workload
        if not case.learns or work is None:
            return heads
        losses = ["held-out loss", "accuracy"] if work.has_losses else []
        losses = losses if work.reached else ["training loss", *losses]
        return [*heads, "rate", *losses, *([work.score[0]] if work.score is not None else [])]

    def _row(self, case: Case, label: str, found: Found, first: Found) -> list[str]:
        runs, work = found.figures, self.size.workload
        base = statistics.median(run.seconds for run in first.figures)
        seconds = statistics.median(run.seconds for run in runs)
        row = [
            label,
            format_seconds(seconds),
            f"{base / seconds:.2f}×" if case.ends == "samples" else "–",
            f"{statistics.median(run.waiting for run in runs):.1%}",
            format_bytes(statistics.median(run.sent for run in runs)),
        ]
        if not case.learns or work is None:
            return row
        row.append(f"{found.rate:g}")
        if work.has_losses:
            for of in ([] if work.reached else [run.training_loss for run in runs], [run.loss for run in runs]):
                row += [_spread([math.inf if x is None else x for x in of])] if of else []
            accuracies = [100 * run.accuracy for run in runs if run.accuracy is not None]
            low, high = min(accuracies, default=0.0), max(accuracies, default=0.0)
            row.append(f"{statistics.median(accuracies):.1f} % ({low:.1f} … {high:.1f})" if accuracies else "–")
        if work.score is not None:
            row.append(_spread([run.score or 0.0 for run in runs]))
        return row

    def _claims(self) -> list[list[str]]:
        rows = [["case", "what", "ours", "over", "the paper", "to reach", "here", ""]]
        for verdict in self.verdicts:
            claim, spread = verdict.claim, f"({_short(min(verdict.values))} … {_short(max(verdict.values))})"
            outcome = "met" if verdict.met else missed(claim.measure, verdict.missed_by)
            over = " and ".join(claim.over) if len(claim.over) < 3 else "the best of the others"
            what = SAID[claim.measure]
            here = f"{_short(verdict.figure)} {spread}".replace(DIVERGED, not_there(claim.measure))
            rows.append([verdict.case, what, verdict.method, over or "–", claim.paper, claim.goal, here, outcome])
        return rows


def _without_curve(figures: Figures) -> dict[str, object]:
    return {name: value for name, value in asdict(figures).items() if name not in ("curve", "reached")}


def _spread(values: Sequence[float]) -> str:
    return f"{_short(statistics.median(values))} ({_short(min(values))} … {_short(max(values))})"


DIVERGED, NEVER = "diverged", "never"


def not_there(measure: str) -> str:
    """What a measure says that has no number: a time that did not come, or a loss that was none any more."""
    return NEVER if measure.startswith("time to") else DIVERGED


def missed(measure: str, by: float | None) -> str:
    """By how much a claim was missed, as far as that has a number."""
    return f"missed by {by:.3g}" if by is not None and math.isfinite(by) else f"missed: {not_there(measure)}"


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else DIVERGED if value > 0 else "–"


def _seeds(count: int) -> str:
    return "seed 1" if count == 1 else f"seeds 1 to {count}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns stand under each other."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "| " + " | ".join("-" * max(width, 3) for width in widths) + " |", *lines[1:]]


def _plain(value: object) -> object:
    """As JSON holds it: five digits, and null for what is not a number any more."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
