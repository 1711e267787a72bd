"""``offbeat simulate``, ``train`` and ``compare``: runs, one after the other, and the table they make."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

import typer

from offbeat import delays
from offbeat.cli.asked import Files, LiveOptions, SimulatedOptions, Tuning, grouped, members
from offbeat.cli.options import Scene, StrategyName
from offbeat.cli.output import Outputs, show, show_slow
from offbeat.cli.progress import Meter, meters
from offbeat.cli.settings import label, plain_settings, read_strategy
from offbeat.live.job.launch import launch
from offbeat.live.job.worker import Job, joined, take_part
from offbeat.method.strategy import Strategy
from offbeat.report.folder import Recording
from offbeat.report.table import Record
from offbeat.runs.result import LiveRun, Run
from offbeat.sim import simulate as run_simulation

USUAL = ("allreduce", "local_sgd", "adaptive", "dasgd")

OneRun = Callable[[Strategy, Scene, bool, Meter], Run | LiveRun | None]


@grouped
def simulate(*, strategy: StrategyName, ask: SimulatedOptions, tuning: Tuning, files: Files) -> None:
    """Run a strategy in virtual time, with any number of workers (8, if you do not say).

    The gradients are real, the clock is not: 1,024 workers fit into this process. With `--task none` only time
    is simulated, for a model of any size.

    `offbeat simulate local_sgd --workers 64 --delay "2 ranks 320ms"`

    `offbeat simulate dasgd --set delay=2 --task none --parameters 25.6M --bandwidth 1Gbps`
    """
    files.check()
    made = tuning.strategy(strategy)
    _run_all([made], ask.scene(), _simulated, files)


@grouped
def train(*, strategy: StrategyName, ask: LiveOptions, tuning: Tuning, files: Files) -> None:
    """Train with real processes: N of this machine (4, if you do not say), or as a member of a bigger job.

    The processes are started by torchrun's own machinery. Where torchrun, or anything that sets RANK and WORLD_SIZE,
    has already started this command, it takes part in that job instead, and rank 0 shows the table.

    `offbeat train local_sgd --workers 4 --delay "1 rank 100ms"`

    `torchrun --nnodes 2 --nproc-per-node 4 … -m offbeat train dasgd`
    """
    files.check()
    made = tuning.strategy(strategy)
    _run_live([made], ask.scene(), files)


@grouped
def compare(
    *,
    strategies: Annotated[
        list[str] | None,
        typer.Argument(metavar="STRATEGY", help=f"Names, with settings or without.  [default: {' '.join(USUAL)}]"),
    ] = None,
    live: Annotated[bool, typer.Option("--live/--simulated", help="With real processes, or in virtual time.")] = False,
    ask: SimulatedOptions,
    files: Files,
) -> None:
    """Run several strategies with the same seed and the same delays, side by side; the first is what counts as 1×.

    In virtual time with 8 workers, or `--live` with 4 processes, if you do not say. Live, --compute is slept on
    top of the real computation, and is nothing unless given.

    `offbeat compare --delay "2 ranks 320ms"`

    `offbeat compare --live allreduce local_sgd:period=4 local_sgd:period=16,codec=qsgd8`
    """
    files.check()
    made = [read_strategy(words) for words in strategies or USUAL]
    scene = ask.scene(live)
    if live:
        _run_live(made, scene, files)
    else:
        _run_all(made, scene, _simulated, files)


def _run_live(made: Sequence[Strategy], scene: Scene, outputs: Outputs) -> None:
    if members() is None:
        _run_all(made, scene, _launched, outputs)
    else:
        _run_all(made, scene, _taken_part, outputs, around=joined(), silent=os.environ["RANK"] != "0")


def _run_all(
    made: Sequence[Strategy],
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
            for number, strategy in enumerate(made, 1):
                place = f"{number}/{len(made)} " if len(made) > 1 else ""
                with board.meter(f"{place}{label(strategy)}", total) as meter:
                    run = run_one(strategy, scene, outputs.wants_spans, meter)
                if run is not None:
                    record = _record(run, strategy, scene)
                    recordings.append(Recording(record, run.trace, run.finished_s, run.wait_s))
    finally:
        if recordings:
            show([recording.record for recording in recordings], scene.heading)
            if scene.live:
                show_slow(recordings)
            outputs.write(recordings, scene.heading)


def _simulated(strategy: Strategy, scene: Scene, spans: bool, meter: Meter) -> Run:
    compute_s = delays.bind(scene.compute_s, seed=scene.seed, workers=scene.workers, what="--compute")

    def counted(step: int, rank: int) -> float:
        meter.add_one()
        return compute_s(step, rank)

    return run_simulation(
        strategy,
        scene.task,
        scene.workers,
        scene.steps,
        samples=scene.samples,
        seconds=scene.seconds,
        seed=scene.seed,
        compute_s=counted,
        delays=scene.delays,
        network=scene.network,
        parameters=scene.parameters,
        spans=spans,
        rounds=spans,
    )


def _launched(strategy: Strategy, scene: Scene, spans: bool, meter: Meter) -> LiveRun:
    assert scene.task is not None
    assert scene.steps is not None
    meter.note("starting processes")
    return launch(
        strategy,
        scene.task,
        workers=scene.workers,
        steps=scene.steps,
        seed=scene.seed,
        delays=scene.delays,
        compute_s=scene.compute_s,
        progress=meter.at,
    )


def _taken_part(strategy: Strategy, scene: Scene, spans: bool, meter: Meter) -> LiveRun | None:
    assert scene.task is not None
    assert scene.steps is not None
    job = Job(strategy, scene.task, scene.steps, scene.seed, scene.delays, scene.compute_s)
    return take_part(job, meter.at)


def _record(run: Run | LiveRun, strategy: Strategy, scene: Scene) -> Record:
    last = run.losses[-1].item() if run.losses.numel() else None
    loss = run.metrics.get("loss", last)
    return Record(
        strategy=strategy.name,
        label=label(strategy),
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
        settings=plain_settings(strategy.settings),
    )
