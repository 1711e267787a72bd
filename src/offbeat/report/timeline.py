"""The spans and rounds of the runs as the page's script wants them: columns of whole numbers, in order of time.

Behind a worker's last span comes a stretch without a step, from when it was done until the last one was; where it had
died, one until it was back.
"""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.report.folder import Recording
from offbeat.runs.trace import DOINGS, Round, Span

MOST_SPANS = 150_000  # of all runs together: about 4 MB of the page
MOST_ROUNDS = 6_000


def lanes(runs: Sequence[Recording]) -> list[dict[str, object]]:
    """For each run with spans: its lanes, and what was left out to keep the page small."""
    with_spans = [run for run in runs if run.trace.spans]
    each = MOST_SPANS // max(len(with_spans), 1)
    return [_run(run, each, MOST_ROUNDS // len(with_spans)) for run in with_spans]


def _run(run: Recording, most_spans: int, most_rounds: int) -> dict[str, object]:
    spans, workers = run.trace.spans, run.record.workers
    shown = min(workers, max(1, most_spans * workers // len(spans)))
    kept = sorted(s for s in spans if s.rank < shown)[:most_spans]
    columns = [(s.rank, s.start_s, s.end_s, s.step, DOINGS.index(s.doing)) for s in kept]
    for k, stretches in enumerate((run.idle, run.absent), len(DOINGS)):
        columns += [(rank, start_s, end_s, -1, k) for rank, start_s, end_s in stretches if rank < shown]
    columns.sort()
    rounds = [r for r in run.trace.rounds if len(r.members) > 1 and min(r.members) < shown]
    told = []
    if shown < workers:
        told.append(f"The first {shown} of {workers} workers are shown.")
    if len(rounds) > most_rounds:
        told.append(f"The first {most_rounds} of {len(rounds)} rounds are shown.")
    return {
        "label": run.record.label,
        "workers": shown,
        "note": " ".join(told),
        "rank": [rank for rank, *_ in columns],
        "step": [step for *_, step, _ in columns],
        "doing": [doing for *_, doing in columns],
        "start": [round(start_s * 1e6) for _, start_s, *_ in columns],
        "length": [round((end_s - start_s) * 1e6) for _, start_s, end_s, *_ in columns],
        "rounds": [_round(r, shown) for r in rounds[:most_rounds]],
        "window": _first_window(kept, shown),
    }


def _round(r: Round, shown: int) -> list[object]:
    members = [rank for rank in r.members if rank < shown]
    ages = [r.staleness.get(rank, -1) for rank in members]
    return [round(r.end_s * 1e6), r.version, r.started_by, members, [int(rank in r.fresh) for rank in members], ages]


def _first_window(spans: Sequence[Span], lanes_shown: int) -> float:
    """Where the first view ends: about twenty-five steps, fewer where there are many lanes."""
    steps = max(3, min(25, 400 // lanes_shown))
    ends = [s.end_s for s in spans if s.step < steps]
    return round(max(ends, default=1.0), 6)
