"""``offbeat demo``: the main job. Real processes, embedded data, stragglers; DDP against others' methods and ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from offbeat import delays, tasks
from offbeat.basics.units import format_seconds
from offbeat.cli.options import Json, Seed, TraceFile, check_count
from offbeat.cli.output import Outputs, show, show_slow
from offbeat.cli.screen import screen
from offbeat.cli.settings import label, plain_settings
from offbeat.live.job.launch import LiveRun, launch_all
from offbeat.live.job.worker import Job
from offbeat.method.strategy import Method
from offbeat.report.folder import Recording
from offbeat.report.table import Record
from offbeat.strategies import named

METHODS: tuple[str, ...] = (
    "adaptive",
    "dasgd",
    "eager:wait=0.5",
    "wagma:merge=correct",
    "nonblocking:scale_lr=true",
    "self_clocked",
)
WORKERS, STEPS = 4, 100
COMPUTE_S, LATE_S = 0.02, 0.1
LR, MOMENTUM = 0.1, 0.8  # the same for all; more momentum and late gradients do not go together
DDP = "DDP (torch)"
POINTS, FIFTH = 0.02, 0.2


def demo(
    chronic: Annotated[bool, typer.Option("--chronic", help="One worker is slow in every step.")] = False,
    workers: Annotated[str, typer.Option(metavar="N", help="Processes.")] = str(WORKERS),
    steps: Annotated[str, typer.Option(metavar="N", help="Batches that each worker learns from.")] = str(STEPS),
    seed: Seed = "0",
    report: Annotated[Path, typer.Option("--report", metavar="DIR", help="Where the report goes.")] = Path("runs/demo"),
    json: Json = None,
    trace: TraceFile = None,
) -> None:
    """Train handwritten digits in 4 processes, some of them late: torch's own DDP, then the methods of five papers.

    Last comes `self_clocked`, which puts their ideas together, and which `ob.attach` uses where no method is named. All
    learn from the same number of samples under the same delays. It takes a minute or two, and ends with a table and an
    HTML report. Ctrl-C ends it; what was done by then is shown.

    `offbeat demo`

    `offbeat demo --chronic --report runs/chronic`
    """
    outputs = Outputs(json, report, trace)
    outputs.check()
    count = check_count("--workers", workers, 2)
    length = check_count("--steps", steps, 1)
    number = check_count("--seed", seed, 0)
    late = delays.chronic(count - 1, LATE_S) if chronic else delays.random(1, LATE_S)
    made: list[Method | None] = [None, *(named(words) for words in METHODS)]
    task = tasks.digits(lr=LR, momentum=MOMENTUM)
    jobs = [Job(one or "ddp", task, length, number, late, COMPUTE_S, shared=chronic) for one in made]
    labels = [one.name if one else DDP for one in made]
    heading = f"{count} processes, {count * length} batches of 32 digits in all; seed {number}\ndelay: {late}"
    recordings: list[Recording] = []
    try:
        with screen(labels, count, length) as watcher:

            def done(index: int, run: LiveRun) -> None:
                recordings.append(_recording(run, labels[index], made[index], str(late)))
                watcher.done(recordings[-1].record)

            launch_all(jobs, count, watcher.watch, done)
    finally:
        if recordings:
            _end(recordings, heading, f"{_settings(made)} {_injected(chronic, count)}", outputs)


def _end(recordings: Sequence[Recording], heading: str, injected: str, outputs: Outputs) -> None:
    show([recording.record for recording in recordings], heading)
    console = Console()
    console.print()
    console.print(Text(injected))
    for sentence in judged([recording.record for recording in recordings]):
        console.print(Text(sentence))
    show_slow(recordings[:1])
    outputs.write(recordings, f"{heading}\n{injected}")


def _settings(made: Sequence[Method | None]) -> str:
    """What the rows have in common, and which methods have settings other than their defaults."""
    special = ", ".join(words for one in made if one and (words := label(one)) != one.name)
    return f"All: SGD, learning rate {LR}, momentum {MOMENTUM}; {special}."


def _injected(chronic: bool, workers: int) -> str:
    who = f"rank {workers - 1} is slow in every step" if chronic else "one worker, another one each step, is slow"
    return (
        f"Injected: {who}, by {format_seconds(LATE_S)} of sleep. Each step also sleeps {format_seconds(COMPUTE_S)}, "
        f"which stands for a larger model, so that the {os.cpu_count()} cores of this machine serve {workers} workers. "
        "nonblocking cuts its batches, so it feels both in every micro-batch; the others feel them before the batch."
        + (" All but DDP share one supply of batches, of which a fast worker takes more." if chronic else "")
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
