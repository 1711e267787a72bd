"""``offbeat simulate``, ``train`` and ``compare``: runs, one after the other, and the table they make."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from offbeat import delays, tasks
from offbeat.cli.asked import Files, LiveOptions, SimulatedOptions, Tuning, grouped, members
from offbeat.cli.options import MethodName, ReplayFolder, SaveFolder, Scene, check_save
from offbeat.cli.output import Outputs, show, show_slow
from offbeat.cli.progress import Meter, meters
from offbeat.cli.settings import label, plain_settings
from offbeat.live.job.launch import launch
from offbeat.live.job.worker import Job, joined, take_part
from offbeat.method.strategy import Method
from offbeat.replaying import apart, method_of
from offbeat.replaying import replay as replay_run
from offbeat.report.folder import Recording
from offbeat.report.table import Record
from offbeat.runs import order as orders
from offbeat.runs.result import LiveRun, Run
from offbeat.sim import simulate as run_simulation
from offbeat.strategies import DEFAULT, named

USUAL = (DEFAULT, "allreduce", "local_sgd", "eager", "wagma", "ad_psgd")

OneRun = Callable[[Method, Scene, bool, Meter], Run | LiveRun | None]


@grouped
def simulate(
    *,
    method: MethodName = None,
    ask: SimulatedOptions,
    tuning: Tuning,
    replay: ReplayFolder = None,
    files: Files,
) -> None:
    """Run a method in virtual time, with any number of workers (8 by default).

    The gradients are real, the clock is not: 1,024 workers fit into this process. With `--task none` only time
    is simulated, for a model of any size. The default method is `self_clocked`.

    `offbeat simulate --delay "1 rank 300ms"`

    `offbeat simulate local_sgd --workers 64 --delay "2 ranks 320ms"`

    `offbeat simulate dasgd --set delay=2 --task none --parameters 25.6M --bandwidth 1Gbps`

    `offbeat simulate --replay DIR` repeats a run that `offbeat train --save DIR` kept, in the order of its events.
    """
    files.check()
    if replay is not None:
        _again(replay, method, ask, files)
    else:
        _run_all([tuning.method(method)], ask.scene(), _simulated, files)


@grouped
def train(
    *, method: MethodName = None, ask: LiveOptions, tuning: Tuning, save: SaveFolder = None, files: Files
) -> None:
    """Train with real processes: N of this machine (4 by default), or as a member of a larger job.

    Torchrun's own code starts the processes. If torchrun, or another launcher that sets RANK and WORLD_SIZE,
    has already started this command, it takes part in that job, and rank 0 shows the table. Without a
    method it is `self_clocked`, as in `ob.attach`.

    `offbeat train local_sgd --workers 4 --delay "1 rank 100ms"`

    `torchrun --nnodes 2 --nproc-per-node 4 … -m offbeat train dasgd`
    """
    files.check()
    check_save(save)
    _run_live([tuning.method(method)], ask.scene(), files, save)


@grouped
def compare(
    *,
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD", help=f"Names of methods, with settings or without.  [default: {' '.join(USUAL)}]"
        ),
    ] = None,
    live: Annotated[bool, typer.Option("--live/--simulated", help="With real processes, or in virtual time.")] = False,
    ask: SimulatedOptions,
    files: Files,
) -> None:
    """Run several methods with the same seed and the same delays. The speed-up is over the first.

    In virtual time with 8 workers by default, or `--live` with 4 processes. Live, --compute is a sleep in addition
    to the real computation, by default none.

    `offbeat compare --delay "2 ranks 320ms"`

    `offbeat compare --live allreduce local_sgd:period=4 local_sgd:period=16,codec=qsgd8`
    """
    files.check()
    made = [named(words) for words in methods or USUAL]
    scene = ask.scene(live)
    if live:
        _run_live(made, scene, files)
    else:
        _run_all(made, scene, _simulated, files)


def _again(folder: Path, method: str | None, ask: SimulatedOptions, outputs: Outputs) -> None:
    """A run that was kept, once more; its scene is the record's, but for what is virtual."""
    given = {"METHOD": method, **{f"--{n}": getattr(ask, n) for n in ("workers", "steps", "samples", "seconds")}}
    given["--fixed-shares"] = "" if ask.fixed_shares else None
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{f'{name} {value}'.strip()} is for the record to say; with --replay, leave it out")
    order = orders.read(folder)
    about = order.about
    task = tasks.named(about.task or ask.task)
    steps = about.steps or max(own.gradients for own in order.told)
    scene = replace(ask.scene(), workers=about.workers, seed=about.seed, task=task, steps=steps)
    apart_by = []

    def replayed(made: Method, scene: Scene, spans: bool, meter: Meter) -> Run:
        run = replay_run(folder, task, made, compute_s=scene.compute_s or 0.0, network=scene.network, spans=spans)
        apart_by.append(apart(run, folder))
        return run

    _run_all([method_of(about)], scene, replayed, outputs)
    for largest in apart_by:
        same = "bit for bit" if largest == 0 else f"to {largest:.1g}"
        print(f"it ended with the weights of the run in {folder}, {same}")


def _run_live(made: Sequence[Method], scene: Scene, outputs: Outputs, save: Path | None = None) -> None:
    if members() is None:
        run_one: OneRun = _launched
        around, silent = None, False
    else:
        run_one, around, silent = _taken_part, joined(), os.environ["RANK"] != "0"
    _run_all(made, scene, run_one if save is None else partial(_saved, run_one, save), outputs, around, silent)


def _saved(
    run_one: OneRun, save: Path, method: Method, scene: Scene, spans: bool, meter: Meter
) -> Run | LiveRun | None:
    run = run_one(method, replace(scene, record=True), spans, meter)
    if isinstance(run, LiveRun) and run.order is not None:
        run.order.write(save)
        print(f"wrote {save}: offbeat simulate --replay {save}", file=sys.stderr)
    return run


def _run_all(
    made: Sequence[Method],
    scene: Scene,
    run_one: OneRun,
    outputs: Outputs,
    around: AbstractContextManager[None] | None = None,
    silent: bool = False,
) -> None:
    """Run one after the other. Those that were done before a failure or Ctrl-C are still shown and written."""
    recordings: list[Recording] = []
    total = scene.samples if scene.samples is not None else scene.steps
    if not scene.live and scene.steps is not None:
        total = scene.steps * scene.workers
    try:
        with meters(silent) as board, around or nullcontext():
            for number, method in enumerate(made, 1):
                place = f"{number}/{len(made)} " if len(made) > 1 else ""
                with board.meter(f"{place}{label(method)}", total) as meter:
                    run = run_one(method, scene, outputs.wants_spans, meter)
                if run is not None:
                    record = record_of(run, method, scene)
                    recordings.append(Recording(record, run.trace, run.finished_s, run.wait_s))
    finally:
        if recordings:
            show([recording.record for recording in recordings], scene.heading)
            if scene.live or scene.faults is not None:
                show_slow(recordings)
            outputs.write(recordings, scene.heading)


def _simulated(method: Method, scene: Scene, spans: bool, meter: Meter) -> Run:
    compute_s = delays.bind(scene.compute_s, seed=scene.seed, workers=scene.workers, what="--compute")

    def counted(step: int, rank: int) -> float:
        meter.add_one()
        return compute_s(step, rank)

    by_all = scene.steps is not None and not scene.fixed
    return run_simulation(
        method,
        scene.task,
        scene.workers,
        None if by_all else scene.steps,
        samples=(scene.steps or 0) * scene.workers if by_all else scene.samples,
        seconds=scene.seconds,
        seed=scene.seed,
        compute_s=counted,
        delays=scene.delays,
        network=scene.network,
        parameters=scene.parameters,
        spans=spans,
        rounds=spans,
        faults=scene.faults,
    )


def _launched(method: Method, scene: Scene, spans: bool, meter: Meter) -> LiveRun:
    assert scene.task is not None
    assert scene.steps is not None
    meter.note("starting processes")
    return launch(
        method,
        scene.task,
        workers=scene.workers,
        steps=scene.steps,
        seed=scene.seed,
        delays=scene.delays,
        compute_s=scene.compute_s,
        progress=meter.at,
        shared=not scene.fixed,
        record=scene.record,
    )


def _taken_part(method: Method, scene: Scene, spans: bool, meter: Meter) -> LiveRun | None:
    assert scene.task is not None
    assert scene.steps is not None
    job = Job(method, scene.task, scene.steps, scene.seed, scene.delays, scene.compute_s, not scene.fixed, scene.record)
    return take_part(job, meter.at)


def record_of(run: Run | LiveRun, method: Method, scene: Scene) -> Record:
    last = run.losses[-1].item() if run.losses.numel() else None
    loss = run.metrics.get("loss", last)
    return Record(
        method=method.name,
        label=label(method),
        mode="live" if scene.live else "simulated",
        task=scene.task.name if scene.task else None,
        workers=run.workers,
        steps=run.steps,
        seconds=run.seconds,
        wait_fraction=run.wait_fraction,
        wire_bytes=run.wire_bytes,
        loss=loss,
        accuracy=run.metrics.get("accuracy"),
        train_loss=None if last is None else float(last) if math.isfinite(last) else math.nan,
        seed=run.seed,
        delay=scene.delay_text,
        settings=plain_settings(method.settings),
        carriers=run.carriers if isinstance(run, LiveRun) else (),
        foreign=run.foreign if isinstance(run, LiveRun) else (),
        talking=run.talking,
        absences=run.absences if isinstance(run, Run) else (),
    )
