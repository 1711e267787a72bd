"""``offbeat demo``: the main job. Real processes, embedded data, stragglers; DDP against others' methods and ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat import delays, tasks
from offbeat.basics.units import format_seconds
from offbeat.cli.options import Json, Seed, TraceFile, check_count
from offbeat.cli.output import Outputs, show, show_slow
from offbeat.cli.screen import screen
from offbeat.cli.settings import label, plain_settings
from offbeat.delays import Seconds
from offbeat.live.job.launch import LiveRun, launch_all
from offbeat.live.job.survival import Killing, kill_one
from offbeat.live.job.worker import Job
from offbeat.method.strategy import Method
from offbeat.report import page
from offbeat.report.folder import Recording
from offbeat.report.table import Record
from offbeat.strategies import named

METHODS: tuple[str, ...] = (
    "adaptive",
    "dasgd",
    "eager:wait=0.5,grace=0",
    "wagma:merge=correct",
    "nonblocking:scale_lr=true",
    "self_clocked",
)
FIXED, SHARED = ", fixed", ", shared"
CHRONIC: tuple[str, ...] = (f"allreduce{SHARED}", f"self_clocked{FIXED}", f"self_clocked{SHARED}")
WORKERS, STEPS = 4, 100
KILL_STEPS = 600  # long enough for a process to be killed, and to come back
COMPUTE_S, LATE_S = 0.02, 0.1
LR, MOMENTUM = 0.1, 0.8  # the same for all; more momentum and late gradients do not go together
DDP = "DDP (torch)"
POINTS, FIFTH = 0.02, 0.2


@dataclass
class Act:
    """Runs under the same delays: one table, one page. ``rows``: a label and a method (None: DDP) each."""

    late: Seconds
    injected: str
    rows: Sequence[tuple[str, Method | None]]
    recordings: list[Recording] = field(default_factory=list)


def demo(
    chronic: Annotated[
        bool, typer.Option("--chronic", help="Only the second part: one worker is always slow.")
    ] = False,
    kill: Annotated[
        bool, typer.Option("--kill", help="Another demo: a worker is killed in the middle, and comes back.")
    ] = False,
    workers: Annotated[str, typer.Option(metavar="N", help="Processes.")] = str(WORKERS),
    steps: Annotated[str, typer.Option(metavar="N", help="Batches for each worker, on average.")] = str(STEPS),
    seed: Seed = "0",
    report: Annotated[Path, typer.Option("--report", metavar="DIR", help="The folder of the report.")] = Path(
        "runs/demo"
    ),
    json: Json = None,
    trace: TraceFile = None,
) -> None:
    """Train handwritten digits in 4 processes, some of them late: torch's own DDP, then the methods of five papers.

    Last comes `self_clocked`, which combines their ideas and is the default of `ob.attach`.
    In a second part one worker is slow in every step. There the job ends with that worker's last batch, unless work
    is shared and the others take its batches. All runs use the same number of samples. The demo takes about two
    minutes, and ends with a table and an HTML report for each part. Ctrl-C ends it and shows the runs so far.

    `offbeat demo`

    With --kill a worker of DDP is killed, and then one of `self_clocked`, whose others go on; it comes back, and every
    batch is used once. This takes about a minute, and writes no report.

    `offbeat demo --chronic --report runs/chronic`

    `offbeat demo --kill`
    """
    Outputs(json, report, trace).check()
    count = check_count("--workers", workers, 2)
    length = check_count("--steps", steps, 1)
    number = check_count("--seed", seed, 0)
    if kill:
        _killed(count, length * KILL_STEPS // STEPS, number)
        return
    acts = [_always(count)] if chronic else [_now_and_then(count), _always(count)]
    task = tasks.digits(lr=LR, momentum=MOMENTUM)
    places = [(act, name, made) for act in acts for name, made in act.rows]
    jobs = [
        Job(made or "ddp", task, length, number, act.late, COMPUTE_S, shared=name.endswith(SHARED))
        for act, name, made in places
    ]
    common = f"{count} processes, {count * length} batches of 32 digits in all; seed {number}"
    try:
        with screen([name for _, name, _ in places], count, length) as watcher:

            def done(index: int, run: LiveRun) -> None:
                act, name, made = places[index]
                act.recordings.append(_recording(run, name, made, str(act.late)))
                watcher.done(act.recordings[-1].record)

            launch_all(jobs, count, watcher.watch, done)
    finally:
        for act in acts:
            if act.recordings:
                # Beside the first part's page: a table of both would compare times under different delays.
                _end(act, f"{common}\ndelay: {act.late}", report if act is acts[0] else report / "chronic")
        if recordings := [recording for act in acts for recording in act.recordings]:
            Outputs(json, None, trace).write(recordings, common)


def _killed(workers: int, steps: int, seed: int) -> None:
    """Three jobs, one after the other; what their launcher and their workers say comes between."""
    console, task = Console(), tasks.digits(lr=LR, momentum=MOMENTUM)
    table = Table("job", "time", "accuracy", box=None, pad_edge=False)
    told: list[str] = []
    for name, made, victim in (
        (f"{DDP}, rank {workers - 1} is killed", None, workers - 1),
        (f"self_clocked, rank {workers - 1} is killed", named("self_clocked"), workers - 1),
        ("self_clocked, nobody is killed", named("self_clocked"), None),
    ):
        console.print(Text(f"\n{name}", style="bold"))
        run = kill_one(Killing(made or "ddp", task, steps, seed, COMPUTE_S, victim, steps // 4), workers)
        last = next(iter(run.ended.values()), None)
        accuracy = next((one.metrics["accuracy"] for one in run.ended.values() if "accuracy" in one.metrics), None)
        table.add_row(
            name,
            format_seconds(run.seconds) if last else "ended by the death",
            "–" if accuracy is None else f"{accuracy:.1%}",
        )
        told += [f"{name}: {' '.join([*last.of_work, *last.of_deaths])}"] if last else []
    console.print()
    console.print(f"{workers} processes, {workers * steps} batches of 32 digits in all; seed {seed}", soft_wrap=True)
    console.print(table)
    for sentence in told:
        console.print(Text(sentence))


def _now_and_then(workers: int) -> Act:
    made = [named(words) for words in METHODS]
    cut = "nonblocking cuts its batches, so it feels both in every micro-batch; the others feel them before the batch."
    return Act(
        delays.random(1, LATE_S),
        f"{_settings(made)} {_injected('one worker, another one each step, is slow', workers)} {cut}",
        [(DDP, None), *((one.name, one) for one in made)],
    )


def _always(workers: int) -> Act:
    rows = [(words, named(words.partition(",")[0])) for words in CHRONIC]
    shares = (
        "Fixed: each worker has its own batches. Shared: all take from one supply of batches, whoever is free the "
        "next; DDP cannot, as all must step."
    )
    return Act(
        delays.chronic(workers - 1, LATE_S),
        f"{_settings([])} {_injected(f'rank {workers - 1} is slow in every step', workers)} {shares}",
        [(DDP, None), *rows],
    )


def _end(act: Act, heading: str, report: Path) -> None:
    records = [recording.record for recording in act.recordings]
    show(records, heading)
    console = Console()
    console.print()
    console.print(Text(act.injected))
    for sentence in judged(records):
        console.print(Text(sentence))
    for recording in act.recordings:
        for sentence in page.done_early(recording):
            console.print(Text(f"{recording.record.label}: {sentence}"))
    show_slow(act.recordings[:1])
    console.print()
    Outputs(report=report).write(act.recordings, f"{heading}\n{act.injected}")


def _settings(made: Sequence[Method]) -> str:
    """What the rows have in common, and which methods have settings other than their defaults."""
    special = ", ".join(words for one in made if (words := label(one)) != one.name)
    return f"All: SGD, learning rate {LR}, momentum {MOMENTUM}{'; ' if special else ''}{special}."


def _injected(who: str, workers: int) -> str:
    return (
        f"Injected: {who}, by {format_seconds(LATE_S)} of sleep. Each step also sleeps {format_seconds(COMPUTE_S)}, "
        f"which stands for a larger model, so that the {os.cpu_count()} cores of this machine serve {workers} workers."
    )


def judged(records: Sequence[Record]) -> list[str]:
    """What is not as it should be: accuracy within two points of the first run's, waiting at most a fifth of it."""
    sentences = []
    base = records[0]
    for record in records[1:]:
        if base.accuracy is not None and record.accuracy is not None and base.accuracy - record.accuracy > POINTS:
            gap = 100 * (base.accuracy - record.accuracy)
            sentences.append(f"{record.label} ends {gap:.1f} points of accuracy below {base.label}.")
        share = record.wait_fraction * record.seconds / (base.wait_fraction * base.seconds or 1.0)
        if share > FIFTH:
            sentences.append(f"{record.label} still waits {share:.0%} of what {base.label} waits{_why(record)}.")
    return sentences


def _why(record: Record) -> str:
    reasons = {
        "allreduce": ": it takes every step with everybody, so nobody is ever free to take more",
        "adaptive": ": it avoids messages, not the slowest worker, and meets everybody every few steps",
        "dasgd": ": it hides an average behind one step, and a late worker takes several",
        "eager": ": every now and then a round is full, and waits for everybody",
        "wagma": ": every now and then a round is full, and waits for everybody",
        "nonblocking": ": a round ends with the micro-batch that the slow worker is in",
    }
    return reasons.get(record.method, "")


def _recording(run: LiveRun, label: str, made: Method | None, late: str) -> Recording:
    last = run.losses[-1].item() if run.losses.numel() else None
    record = Record(
        method=made.name if made else "ddp",
        label=label,
        mode="live",
        task="digits",
        workers=run.workers,
        steps=run.steps,
        seconds=run.seconds,
        wait_fraction=run.wait_fraction,
        wire_bytes=run.wire_bytes,
        loss=run.metrics.get("loss", last),
        accuracy=run.metrics.get("accuracy"),
        train_loss=last,
        seed=run.seed,
        delay=late,
        settings=plain_settings(made.settings) if made else {},
        talking=run.talking,
    )
    return Recording(record, run.trace, run.finished_s, run.wait_s)
