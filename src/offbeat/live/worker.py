"""One member of a live run: builds the task, trains it under a strategy, and tells rank 0 how it went."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from offbeat import delays as delays_
from offbeat.delays import Seconds
from offbeat.strategy import Strategy
from offbeat.task import Task

COUNT = struct.Struct("<q")


@dataclass(frozen=True)
class Job:
    """What every worker is told.

    ``delays`` and ``compute_s`` are slept before the computation of a step, as functions of the seed, the step and the
    rank alone: delays are lateness, ``compute_s`` stands for computation that this machine does not do.
    """

    strategy: Strategy
    task: Task
    steps: int
    seed: int = 0
    delays: Seconds | None = None
    compute_s: Seconds | None = None


@dataclass(frozen=True)
class LiveRun:
    """What a live run left behind; the fields are those of a simulated ``Run`` where they mean the same.

    ``seconds``: wall time from a common start until the last worker was through its steps; starting the processes and
    the ending are not counted. ``final`` (parameters): what every worker holds after the ending. ``losses``: the
    training loss of each step, averaged over the workers. ``wait_s``, ``finished_s``: per worker. ``wire_bytes``: sent
    by all workers while training. ``metrics``: the task's ``evaluate`` of the final model.
    """

    strategy: str
    workers: int
    seed: int
    seconds: float
    finished_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    gradients: tuple[int, ...]
    wire_bytes: int
    final: Tensor
    losses: Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def wait_fraction(self) -> float:
        """The share of the workers' time that was spent waiting or communicating in the open."""
        total = sum(self.finished_s)
        return sum(self.wait_s) / total if total else 0.0

    @property
    def steps(self) -> int:
        """The most gradients any worker took."""
        return max(self.gradients)


@dataclass(frozen=True)
class _Share:
    finished_s: float
    wait_s: float
    gradients: int
    wire_bytes: int
    losses: list[float]


@contextmanager
def joined() -> Iterator[None]:
    """Be a member of the job that the environment describes (torchrun's variables) for the length of a block."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    yield
    # Not in a `finally`: after an error the others are not here to meet, and destroying a group they use can hang.
    _meet()
    dist.destroy_process_group()


def take_part(job: Job, progress: Callable[[int], None] | None = None) -> LiveRun | None:
    """Train as a member of a started job; rank 0 gets the run, the others None. ``progress`` hears of every step."""
    from offbeat.live import attach  # here, so that the live package may offer what is built on this module

    rank, workers = dist.get_rank(), dist.get_world_size()
    delay_s = delays_.bind(job.delays, seed=job.seed, workers=workers, what="delays")
    compute_s = delays_.bind(job.compute_s, seed=job.seed, workers=workers, what="compute_s")
    task, losses = job.task, []
    model = task.build(job.seed).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    inner = task.optimizer(parameters)
    scheduler = task.scheduler(inner) if task.scheduler else None
    with attach(inner, model, job.strategy, steps=job.steps, seed=job.seed) as optimizer:
        _meet()
        waited_s, sent_bytes, start_s = optimizer.wait_s, optimizer.wire_bytes, time.monotonic()
        for step in range(job.steps):
            time.sleep(delay_s(step, rank) + compute_s(step, rank))
            loss = task.value(model, [part.to(device) for part in task.take(rank, step)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(loss.detach())
            if progress is not None:
                progress(step + 1)
        finished_s = time.monotonic() - start_s
        share = _Share(
            finished_s,
            optimizer.wait_s - waited_s,
            job.steps,
            optimizer.wire_bytes - sent_bytes,
            [loss.item() for loss in losses],
        )
    shares: list[_Share] = [share] * workers
    dist.gather_object(share, shares if rank == 0 else None, dst=0)
    if rank != 0:
        return None
    return LiveRun(
        strategy=str(job.strategy),
        workers=workers,
        seed=job.seed,
        seconds=max(s.finished_s for s in shares),
        finished_s=tuple(s.finished_s for s in shares),
        wait_s=tuple(s.wait_s for s in shares),
        gradients=tuple(s.gradients for s in shares),
        wire_bytes=sum(s.wire_bytes for s in shares),
        final=torch.cat([part.detach().cpu().clone() for part in optimizer.me.x.parts]),
        losses=torch.tensor([s.losses for s in shares], dtype=torch.float64).mean(dim=0),
        metrics=dict(task.evaluate(model)) if task.evaluate else {},
    )


def entry(payload: bytes, steps_file: str) -> bytes | None:
    """Where a launched process begins. Its step count goes to its place in ``steps_file``; rank 0 returns the run."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by the launcher while we were starting
    try:
        job: Job = pickle.loads(payload)
        place = int(os.environ["RANK"]) * COUNT.size
        with Path(steps_file).open("r+b", buffering=0) as file, joined():
            run = take_part(job, lambda step: _note(file.fileno(), step, place))
        # Tensors would travel through shared memory that ends with this process; bytes do not.
        return None if run is None else pickle.dumps(run)
    except BaseException as error:
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)
        os._exit(1)  # at once: the interpreter's own ending may wait for network threads, and the others for it


def _note(descriptor: int, step: int, place: int) -> None:
    os.pwrite(descriptor, COUNT.pack(step), place)


def _meet() -> None:
    """A barrier. On a CPU tensor, whichever devices the group serves."""
    dist.all_reduce(torch.zeros(1))
