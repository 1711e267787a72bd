"""One member of a live run: builds the task, trains it under a method, and tells rank 0 how it went."""

from __future__ import annotations

import math
import os
import pickle
import signal
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from offbeat import delays as delays_
from offbeat.basics import draw
from offbeat.delays import Seconds
from offbeat.live.attached.attach import attach
from offbeat.live.attached.optimizer import Attached
from offbeat.live.attached.recorder import Recorder
from offbeat.live.job import ddp
from offbeat.live.job.ddp import Ddp
from offbeat.live.job.steplog import Status, StepLog, StepRecord, assemble, mean_losses
from offbeat.live.work.follow import follow
from offbeat.live.work.share import share
from offbeat.method.facts import Facts
from offbeat.method.strategy import Method
from offbeat.runs.foreign import ForeignWait, together
from offbeat.runs.order import Order, Told
from offbeat.runs.result import LiveRun
from offbeat.runs.talking import Talking
from offbeat.runs.trace import DOINGS, Doing
from offbeat.tasks.task import Task

STATUS = struct.Struct("<iqbid")  # a Status, as it stands in the workers' common file

Tell = Callable[[Status], None]


@dataclass(frozen=True)
class Job:
    """What every worker is told.

    ``method`` may be the word ``"ddp"``: torch's own DistributedDataParallel, for comparison. ``delays`` and
    ``compute_s`` are slept before the computation of a step, as functions of the seed, the step and the rank alone:
    delays are lateness, ``compute_s`` stands for computation that this machine does not do. Where a batch is cut into
    micro-batches, each sleeps its share of both. ``shared``: instead of ``steps`` batches for each worker there is one
    supply of ``steps`` × workers, from which each takes as many as it can, and a schedule follows the steps of all;
    DDP, which needs equally many, ignores it. ``record``: keep what decides the run (of DDP, nothing does).
    """

    method: Method | Literal["ddp"]
    task: Task
    steps: int
    seed: int = 0
    delays: Seconds | None = None
    compute_s: Seconds | None = None
    shared: bool = False
    record: bool = False

    def __post_init__(self) -> None:
        if self.shared and self.record and self.task.scheduler is not None:
            raise ValueError(
                f"the schedule of task {self.task.name!r} follows the steps of all workers where work is shared, and a "
                "replay does not know when each heard of them; leave out shared, or record"
            )


@dataclass(frozen=True)
class _Part:
    finished_s: float
    wait_s: float
    wire_bytes: int
    told: Told | None
    records: StepRecord
    carriers: tuple[str, ...]
    foreign: tuple[ForeignWait, ...]
    talking: Talking | None


@contextmanager
def joined() -> Iterator[None]:
    """Be a member of the job that the environment describes (torchrun's variables) for the length of a block."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    yield
    # Not in a `finally`: after an error the others are not here to meet, and destroying a group they use can hang.
    kept = _meet()  # while the group ends: a Gloo thread that lets go of a tensor last would want the interpreter
    dist.destroy_process_group()
    del kept


def take_part(job: Job, progress: Callable[[int], None] | None = None) -> LiveRun | None:
    """Train as a member of a started job; rank 0 gets the run, the others None. ``progress`` hears of every step."""
    return _train(job, None if progress is None else lambda status: progress(status.step))


def _train(job: Job, tell: Tell | None, number: int = 0) -> LiveRun | None:
    rank, workers = dist.get_rank(), dist.get_world_size()
    task, model = job.task, job.task.build(job.seed).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    inner = task.optimizer(parameters)
    optimizer: Attached | Ddp
    recorder = Recorder(task=task.name) if job.record else None
    if isinstance(job.method, Method):
        optimizer = attach(inner, model, job.method, steps=job.steps, seed=job.seed, record=recorder)
    else:
        optimizer = Ddp(inner, model)

    def say(step: int, doing: Doing, loss: float) -> None:
        if tell is not None:
            seen = optimizer.trace.rounds
            tell(Status(number, step, doing, seen[-1].staleness.get(rank, -1) if seen else -1, loss))

    log = StepLog(job.steps, parameters, say if tell is not None else None)
    with optimizer:
        _meet()
        waited_s, sent_bytes = optimizer.wait_s, optimizer.wire_bytes
        log.start(waited_s, sent_bytes)
        with draw.seeded(job.seed):
            _steps(job, task.scheduler(inner) if task.scheduler else None, optimizer, model, log)
        finished_s = time.monotonic() - log.start_s
        waited_s, sent_bytes = optimizer.wait_s - waited_s, optimizer.wire_bytes - sent_bytes
        log.waiting()
    part = _Part(
        finished_s,
        waited_s,
        sent_bytes,
        recorder.told if recorder else None,
        log.records(list(optimizer.trace.rounds)),
        optimizer.carriers,
        optimizer.summary().foreign if isinstance(optimizer, Attached) else (),
        optimizer.me.reported.talking if isinstance(optimizer, Attached) else None,
    )
    parts: list[_Part] = [part] * workers
    dist.gather_object(part, parts if rank == 0 else None, dst=0)
    if rank != 0:
        return None
    records = [s.records for s in parts]
    trace = assemble(records, facts_of(job.method))
    return LiveRun(
        method=str(job.method),
        workers=workers,
        seed=job.seed,
        seconds=max(s.finished_s for s in parts),
        finished_s=tuple(s.finished_s for s in parts),
        wait_s=tuple(s.wait_s for s in parts),
        gradients=tuple(len(record.entries) for record in records),
        wire_bytes=sum(s.wire_bytes for s in parts),
        final=torch.cat([p.detach().cpu().reshape(-1) for p in parameters]),
        losses=torch.tensor(mean_losses(records), dtype=torch.float64),
        metrics=dict(task.evaluate(model)) if task.evaluate else {},
        trace=trace,
        talking=tuple(s.talking for s in parts if s.talking is not None),
        order=_order(recorder, [s.told for s in parts]),
        carriers=tuple(sorted({name for s in parts for name in s.carriers})),
        foreign=together(s.foreign for s in parts),
    )


def _order(recorder: Recorder | None, told: Sequence[Told | None]) -> Order | None:
    if recorder is None or recorder.about is None:
        return None
    return Order(recorder.about, tuple(own for own in told if own is not None), recorder.final)


@dataclass
class _Places:
    """Where micro-batches lie: they come in the order of the data, each with the batch and the row it begins with."""

    batches: deque[tuple[int, int]] = field(default_factory=deque)  # number and rows of those not reached the end of
    row: int = 0

    def next(self, rows: int) -> tuple[int, int]:
        (step, whole), row = self.batches[0], self.row
        self.row += rows
        if self.row == whole:
            self.batches.popleft()
            self.row = 0
        return step, row


def _steps(
    job: Job,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    optimizer: Attached | Ddp,
    model: nn.Module,
    log: StepLog,
) -> None:
    rank, workers, task = dist.get_rank(), dist.get_world_size(), job.task
    delay_s = delays_.bind(job.delays, seed=job.seed, workers=workers, what="delays")
    compute_s = delays_.bind(job.compute_s, seed=job.seed, workers=workers, what="compute_s")
    device = next(p.device for p in model.parameters() if p.requires_grad)
    forward = optimizer.model if isinstance(optimizer, Ddp) else model
    facts, last = facts_of(job.method), math.inf
    cuts = facts.cuts_batches
    cuda = draw.cuda_of(model.parameters())

    def loaded(step: int) -> list[Tensor]:
        return [part.to(device) for part in task.take(rank, step)]

    def value(batch: Sequence[Tensor], step: int, row: int = 0) -> Tensor:
        draw.reseed(draw.for_batch(job.seed, rank, step, row), cuda)
        return task.value(forward, batch)

    def whole(step: int) -> tuple[Tensor, int]:
        log.late()
        time.sleep(delay_s(step, rank))
        log.computing()
        time.sleep(compute_s(step, rank))
        batch = loaded(step)
        loss = value(batch, step)
        optimizer.zero_grad()
        if isinstance(optimizer, Ddp):
            optimizer.backward(loss)
        else:
            loss.backward()
        return loss.detach(), len(batch[-1])

    place = _Places()

    def to_be_cut(step: int) -> list[Tensor]:
        batch = loaded(step)
        place.batches.append((step, len(batch[-1])))
        return batch

    def in_pieces(step: int, batch: object) -> tuple[Tensor, int]:
        assert not isinstance(optimizer, Ddp)
        log.late()
        log.computing()
        losses, samples = [], 0
        pieces = optimizer.micro_batches(batch)
        each = 1.0 / optimizer.me.reported.micro_batches
        for piece in pieces:
            time.sleep((delay_s(step, rank) + compute_s(step, rank)) * each)
            loss = value(piece, *place.next(len(piece[-1])))
            loss.backward()
            losses.append(loss.detach() * len(piece[-1]))
            samples += len(piece[-1])
        return torch.stack(losses).sum() / samples, samples

    # A task has batches for every worker and step, so what is shared is how many there are: the numbers are not used.
    supply: Iterable[int] = range(job.steps)
    if job.shared and job.steps and not isinstance(optimizer, Ddp):
        supply = share(range(job.steps * workers), shuffle=False)
        if facts.meets == "everyone" and facts.waits_where_it_begins:
            last = job.steps  # in step, this worker's own steps are those of the job, and all have the same rate
        elif scheduler is not None:
            scheduler = follow(scheduler, supply)
    batches: Iterable[object] = supply
    if cuts and not isinstance(optimizer, Ddp):
        batches = optimizer.batches(to_be_cut(step) for step, _ in enumerate(supply))
    for step, batch in enumerate(batches):
        loss, samples = in_pieces(step, batch) if cuts else whole(step)
        log.waiting()
        optimizer.step()
        if scheduler is not None and step < last:
            scheduler.step()
        period = 0 if isinstance(optimizer, Ddp) else optimizer.me.reported.period or 0
        log.over(loss, samples, optimizer.wait_s, optimizer.wire_bytes, period)


def facts_of(method: Method | Literal["ddp"]) -> Facts:
    return method.facts if isinstance(method, Method) else ddp.FACTS


def entry(payload: bytes, folder: str) -> None:
    """Where a launched process begins. It runs the jobs one after the other.

    Its status goes to its place in the file ``status``, rank 0's runs to files of their own, so that what was done is
    there whatever comes later.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by the launcher while we were starting
    try:
        jobs: list[Job] = pickle.loads(payload)
        place = int(os.environ["RANK"]) * STATUS.size
        with Path(folder, "status").open("r+b", buffering=0) as file, joined():
            for number, job in enumerate(jobs):
                run = _train(job, lambda status: _note(file.fileno(), status, place), number)
                if run is not None:
                    unfinished = Path(folder, "run.unfinished")
                    unfinished.write_bytes(pickle.dumps(run))
                    unfinished.rename(Path(folder, f"run-{number}"))
    except BaseException as error:
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)
        os._exit(1)  # at once: the interpreter's own ending may wait for network threads, and the others for it


def _note(descriptor: int, status: Status, place: int) -> None:
    job, step, doing, stale, loss = status
    os.pwrite(descriptor, STATUS.pack(job, step, DOINGS.index(doing), stale, loss), place)


def read_statuses(file: Path) -> list[Status]:
    """Where all workers stand; those that have not begun have a job of −1."""
    return [
        Status(job, step, DOINGS[doing], stale, loss)
        for job, step, doing, stale, loss in STATUS.iter_unpack(file.read_bytes())
    ]


def _meet() -> Tensor:
    """A barrier. On a CPU tensor, whichever devices the group serves."""
    met = torch.zeros(1)
    dist.all_reduce(met)
    return met
