"""What the study runs: one job is one simulated run; a search asks for a method's jobs, and finds its best rate."""

from __future__ import annotations

import gc
import heapq
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import scale
import torch
import verses
from cells import METHODS, POINTS, RATES, STEP_TIMES, Cell
from torch import nn

import offbeat as ob

HIDDEN, BATCH, FURTHER = 32, 16, 3
TUNING = (0, 101, 102)  # seeds to find a rate with; figures are of others


@dataclass(frozen=True)
class Place:
    """Where data lie and gradients are computed."""

    folder: str = "build/data"
    device: str = "cpu"


@dataclass(frozen=True)
class Job:
    """One run; with a curve and its share of gradients if it is one of the figures."""

    cell: Cell
    name: str
    rate: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    job: Job
    loss: float
    at_time: float
    accuracy: float
    share: float
    sent: int
    curve: tuple[float, ...]
    took_s: float


def task_of(job: Job, place: Place) -> ob.Task:
    """What is trained. The optimisers are torch's fused ones, which take a quarter to a half of the others' time."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    optimizer = partial(torch.optim.SGD, lr=job.rate, momentum=0.9, fused=True)
    if job.cell.optimiser == "AdamW":
        optimizer = partial(torch.optim.AdamW, lr=job.rate, fused=True)
    if job.cell.task == "verses":
        task = verses.task(optimizer, job.seed, place.folder)
    elif job.cell.task == "fashion":
        task = scale.fashion(BATCH, job.rate, 0.9, job.seed, place.folder)
    else:
        task = ob.tasks.digits(batch=BATCH, hidden=HIDDEN, seed=job.seed)
    return on(replace(task, optimizer=optimizer), place.device)


def on(task: ob.Task, device: str) -> ob.Task:
    """The same task with its replicas, their optimisers and their gradients on a device; it is judged on the CPU."""
    if device == "cpu":
        return task

    def judged(model: nn.Module) -> Mapping[str, float]:
        assert task.evaluate is not None
        return task.evaluate(model.to("cpu"))

    return replace(task, model=lambda: task.model().to(device), evaluate=judged)


def run(job: Job, place: Place) -> Outcome:
    torch.set_num_threads(1)
    began, cell, figure = time.perf_counter(), job.cell, job.seed not in TUNING
    task, timed = task_of(job, place), cell.ends == "time"
    model_bytes = 4 * sum(p.numel() for p in task.model().parameters())
    bandwidth = model_bytes / cell.message if cell.message else 1e12
    points = POINTS[cell.task] if figure and timed else 1
    done = ob.simulate(
        METHODS[job.name],
        task,
        workers=cell.workers,
        seconds=cell.units if timed else None,
        samples=None if timed else int(cell.workers * cell.units),
        seed=job.seed,
        compute_s=STEP_TIMES[cell.times],
        network=ob.Network(latency_s=1e-4, bandwidth_Bps=bandwidth, algorithm="halving_doubling"),
        rounds=False,
        watch_s=cell.units / points if timed else None,
    )
    seen = [_finite(metrics["loss"]) for _, metrics in done.curve][:points]
    last, accuracy = _finite(done.metrics["loss"]), float(done.metrics["accuracy"])
    share = sum(done.gradients) / nobody_waits(cell, job.seed) if figure else math.nan
    sent = done.wire_bytes
    at_time = seen[points - 1] if len(seen) == points else last
    del done
    gc.collect()
    curve = (*seen[: points - 1], last)
    return Outcome(job, last, at_time, accuracy, share, sent, curve, round(time.perf_counter() - began, 2))


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def nobody_waits(cell: Cell, seed: int) -> int:
    """How many gradients are begun in the time if every worker takes one after the other."""
    if cell.ends == "samples":
        return int(cell.workers * cell.units)
    seconds = ob.delays.bind(STEP_TIMES[cell.times], seed=seed, workers=cell.workers, what="compute_s")
    count = 0
    for rank in range(cell.workers):
        now, step = 0.0, 0
        while now < cell.units:
            now += seconds(step, rank)
            step += 1
        count += step
    return count


class Search:
    """One method in one cell: which runs are still to be made, in the light of those that were.

    ``tunes``: with how many seeds a rate is tried; that with the lowest mean loss is the best one.
    """

    def __init__(self, cell: Cell, name: str, seeds: int, tunes: int = 1) -> None:
        self.cell, self.name, self.seeds, self.tunes = cell, name, seeds, tunes
        self.tried: dict[float, list[float]] = {}  # the losses of each rate
        self.figures: dict[int, Outcome] = {}
        self._due, self._further = 0, 0

    @property
    def done(self) -> bool:
        return len(self.figures) == self.seeds

    @property
    def best(self) -> float:
        return min(self.tried, key=self.tuned)

    def tuned(self, rate: float) -> float:
        return statistics.fmean(self.tried[rate])

    @property
    def at_the_end(self) -> bool:
        return self.best in (min(self.tried), max(self.tried))

    def first(self) -> list[Job]:
        return self._try(RATES[self.cell.task, self.cell.optimiser])

    def _try(self, rates: Sequence[float]) -> list[Job]:
        jobs = [Job(self.cell, self.name, rate, seed) for rate in rates for seed in TUNING[: self.tunes]]
        self._due = len(jobs)
        return jobs

    def after(self, outcome: Outcome) -> list[Job]:
        """Take the outcome of a run; the runs that follow from it."""
        job = outcome.job
        if job.seed not in TUNING:
            self.figures[job.seed] = outcome
            return []
        self.tried.setdefault(job.rate, []).append(outcome.loss)
        self._due -= 1
        if self._due:
            return []
        if self.at_the_end and self._further < FURTHER:
            self._further += 1
            return self._try([self.best * (0.5 if self.best == min(self.tried) else 2.0)])
        return [Job(self.cell, self.name, self.best, seed) for seed in range(1, self.seeds + 1)]


class Recorded(Search):
    """One method in one cell, as a record has it: nothing is run."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(Cell(**row["cell"]), row["method"], len(row["losses"]))
        self.row = row
        self.tried = {float(rate): [number(loss)] for rate, loss in row["tuning"].items()}
        self.figures = {
            seed: self._outcome(seed, number(loss), number(row["at_time"][seed - 1]), row["share"], row["sent"])
            for seed, loss in enumerate(row["losses"], 1)
        }

    def _outcome(
        self, seed: int, loss: float, at_time: float = math.nan, share: Sequence[float] = (), sent: Sequence[int] = ()
    ) -> Outcome:
        job = Job(self.cell, self.name, self.row["rate"], seed)
        return Outcome(
            job, loss, at_time, math.nan, share[seed - 1] if share else math.nan, sent[seed - 1] if sent else 0, (), 0.0
        )

    def first(self) -> list[Job]:
        return []


class Retraced(Search):
    """One method in one cell, at the rate that a record has found for it: only its figures are run, with curves."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__(recorded.cell, recorded.name, recorded.seeds)
        self.tried = recorded.tried

    def first(self) -> list[Job]:
        return [Job(self.cell, self.name, self.best, seed) for seed in range(1, self.seeds + 1)]


def number(written: float | None) -> float:
    return math.inf if written is None else written


def recorded(path: str) -> dict[tuple[Cell, str], Recorded]:
    """The rows of a record."""
    rows = [Recorded(row) for row in json.loads(Path(path).read_text())["rows"] if "tuning" in row]
    return {(r.cell, r.name): r for r in rows if r.name in METHODS}


class Store:
    """Keeps every outcome in a file, so that a study that was interrupted goes on where it was."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self.kept: dict[Job, Outcome] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                saved = json.loads(line)
                job = Job(**{**saved["job"], "cell": Cell(**saved["job"]["cell"])})
                self.kept[job] = Outcome(**{**saved, "job": job, "curve": tuple(saved["curve"])})

    def add(self, outcome: Outcome) -> None:
        self.kept[outcome.job] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


def carry_out(
    searches: list[Search],
    place: Place,
    processes: int,
    stop_after: float,
    store: Store,
    told: Callable[[Search], None],
) -> None:
    """Run what the searches ask for, earlier cells first, until all is done or the time is over."""
    began = time.monotonic()
    queue: list[tuple[int, int, int, Job]] = []
    by_key = {(s.cell, s.name): (number, s) for number, s in enumerate(searches)}
    count = 0

    def ask(jobs: list[Job]) -> None:
        nonlocal count
        for job in jobs:
            number, search = by_key[job.cell, job.name]
            if job in store.kept:
                take(store.kept[job])
                continue
            heapq.heappush(queue, (cells[search.cell], -job.seed, number * 1000 + count % 1000, job))
            count += 1

    def take(outcome: Outcome) -> None:
        _, search = by_key[outcome.job.cell, outcome.job.name]
        ask(search.after(outcome))
        if search.done and outcome.job.seed not in TUNING:
            told(search)

    cells = {cell: i for i, cell in enumerate(dict.fromkeys(s.cell for s in searches))}
    for search in searches:
        ask(search.first())
    running: dict[Future[Outcome], Job] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        while queue or running:
            in_time = time.monotonic() - began < stop_after
            while in_time and queue and len(running) < processes + 2:
                job = heapq.heappop(queue)[-1]
                running[pool.submit(run, job, place)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, error = running.pop(future), future.exception()
                if error is not None:
                    print(f"! {job.name}, {job.cell}, rate {job.rate:g}: {error!r}", flush=True)
                    nothing = Outcome(job, math.inf, math.inf, 0.0, math.nan, 0, (math.inf,), 0.0)
                    store.add(nothing)
                else:
                    store.add(future.result())
                take(store.kept[job])
