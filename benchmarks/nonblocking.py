"""Non-blocking SGD beside torch's DDP, D-PSGD and MATCHA: a slow worker, equal workers, and simulated clusters.

    python benchmarks/nonblocking.py [--json FILE] [--repeats 3] [--only slow,equal,simulated]

Computation is slept: a batch of 64 samples takes 128 ms, of the slow worker 512 ms; a micro-batch its share of that.
The network that learns is tiny, so what is left is the library's own time.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from harness import Report, arguments, median, run_workers, spread, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob

WORKERS, ROWS, TARGET_LOSS = 4, 64, 1.0
SAMPLE_S = 0.128 / ROWS
STEPS = 30  # of the methods that wait
METHODS: dict[str, ob.Method | None] = {
    "DDP": None,
    "dpsgd": ob.dpsgd(order="atc"),  # at this learning rate the default order needs half as many steps again
    "matcha": ob.matcha(),
    "nonblocking": ob.nonblocking("auto"),
    "nonblocking over ring": ob.nonblocking("auto", over="ring"),
    "nonblocking, 8 pieces": ob.nonblocking(8),
}


class Worker:
    """One worker's run: it paces its computation, and notes when its model had which training loss."""

    def __init__(self, rank: int, sample_s: float) -> None:
        self.task = ob.tasks.digits(batch=ROWS, hidden=16, lr=0.3)
        self.rank, self._sample_s, self._backward_s = rank, sample_s, 0.001
        self._due_s = 0.0
        self._fixed = [torch.cat(parts) for parts in zip(*(self.task.take(97, k) for k in range(8)), strict=True)]
        self.model = self.task.build(0)

    def begin(self) -> None:
        """A batch begins. Its pieces are due one after the other: that a sleep ends late is not added up."""
        self._due_s = time.perf_counter()

    def backward(self, forward: nn.Module, batch: list[torch.Tensor]) -> int:
        rows = len(batch[-1])
        self._due_s += rows * self._sample_s
        loss = self.task.value(forward, batch)
        # Before backward, in which DDP and allreduce exchange; the least that one took is its own computation.
        time.sleep(max(0.0, self._due_s - self._backward_s - time.perf_counter()))
        start = time.perf_counter()
        loss.backward()
        self._backward_s = min(self._backward_s, time.perf_counter() - start)
        return rows

    def data(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return (self.task.take(self.rank, step) for step in itertools.count())

    def loss(self) -> float:
        with torch.no_grad():
            return self.task.value(self.model, self._fixed).item()


def _own_speed(worker: Worker, batches: int = 6) -> float:
    """Samples a second of this worker by itself, in whole batches."""
    start, done = time.perf_counter(), 0
    for batch in itertools.islice(worker.data(), batches):
        worker.model.zero_grad()
        worker.begin()
        done += worker.backward(worker.model, list(batch))
    return done / (time.perf_counter() - start)


def _jobs(rank: int, plan: list[tuple[str, int, float, int]]) -> list[tuple[float, float, float, int]]:
    """All runs in one set of processes, one after the other."""
    return [_job(rank, *run) for run in plan]


def _run(plan: list[tuple[str, int, float, int]]) -> list[list[tuple[float, float, float, int]]]:
    """Of each run, the answers of all workers."""
    return [list(answers) for answers in zip(*run_workers(WORKERS, _jobs, plan), strict=True)]


def _job(rank: int, name: str, steps: int, slow: float, skip: int) -> tuple[float, float, float, int]:
    """(own speed, seconds to the target loss, samples a second after ``skip`` steps, micro-batches at the end)."""
    worker = Worker(rank, SAMPLE_S * (slow if rank == WORKERS - 1 else 1.0))
    own = _own_speed(worker)
    strategy = ob.allreduce() if name == "allreduce" else METHODS[name]
    model, inner = worker.model, worker.task.optimizer(list(worker.model.parameters()))
    optimizer: Any = inner if strategy is None else ob.attach(inner, model, strategy)
    forward: nn.Module = DistributedDataParallel(model) if strategy is None else model
    cut = strategy is not None and strategy.name == "nonblocking"
    data = optimizer.batches(worker.data()) if cut else worker.data()
    reached_s, done, since, looking_s = float("inf"), 0, 0.0, 0.0
    with nullcontext() if strategy is None else warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an endless loader always leaves something over
        start = together()
        for step, batch in enumerate(itertools.islice(data, steps)):
            if step == skip:
                since, done = time.perf_counter(), 0
            optimizer.zero_grad()
            worker.begin()
            if cut:
                done += sum(worker.backward(forward, list(piece)) for piece in optimizer.micro_batches(batch))
            else:
                done += worker.backward(forward, list(batch))
            optimizer.step()
            look = time.perf_counter()
            if rank == 0 and reached_s == float("inf") and worker.loss() <= TARGET_LOSS:
                reached_s = look - start - looking_s
            looking_s += time.perf_counter() - look
        speed = done / (time.perf_counter() - since)
        pieces = int(getattr(optimizer.me.memory, "n", 1)) if strategy is not None else 1
        if strategy is not None:
            optimizer.finish()
    return own, reached_s, speed, pieces


def _share(answers: list[tuple[float, float, float, int]]) -> float:
    return sum(speed for _, _, speed, _ in answers) / sum(own for own, _, _, _ in answers)


def slow(report: Report, repeats: int) -> None:
    """One of four workers is four times slower, all the time."""
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    shares: dict[str, list[float]] = {name: [] for name in METHODS}
    micro: dict[str, int] = {}
    plan = [(name, 45 if "nonblocking" in name else STEPS, 4.0, 12) for _ in range(repeats) for name in METHODS]
    for (name, *_), answers in zip(plan, _run(plan), strict=True):
        seconds[name].append(min(answers[0][1], STEPS * ROWS * 4 * SAMPLE_S))  # not reached: longer than the run
        shares[name].append(_share(answers))
        micro[name] = answers[0][3]
    ours = median(seconds["nonblocking"])
    for name in METHODS:
        blocking = "nonblocking" not in name
        report.row(
            f"1 of 4 workers 4× slower, {name}: s to loss {TARGET_LOSS}", spread(seconds[name]),
            "ours at most half" if blocking else "", ours <= median(seconds[name]) / 2 if blocking else None,
            ratio=ours / median(seconds[name]), seconds=seconds[name],
        )  # fmt: skip
    for name in METHODS:
        goal = name in ("nonblocking", "nonblocking over ring")
        what = f"1 of 4 workers 4× slower, {name}: share of own speeds"
        figure = spread(shares[name]) + (f", {micro[name]} pieces" if "nonblocking" in name else "")
        report.row(what, figure, "at least 0.9" if goal else "", median(shares[name]) >= 0.9 if goal else None)


def equal(report: Report, repeats: int) -> None:
    """Workers of equal speed: samples a second against allreduce."""
    ratios: dict[str, list[float]] = {name: [] for name in ("nonblocking", "nonblocking, 8 pieces")}
    names = ["allreduce", *ratios]
    plan = [(name, 30, 1.0, 5) for _ in range(repeats) for name in names]
    plain = 1.0
    for (name, *_), answers in zip(plan, _run(plan), strict=True):
        speed = sum(speed for _, _, speed, _ in answers)
        if name == "allreduce":
            plain = speed
        else:
            ratios[name].append(speed / plain)
    for name, found in ratios.items():
        what = f"nobody slow, {name}: samples/s ÷ allreduce's"
        report.row(what, spread(found), "at least 0.95", median(found) >= 0.95, ratios=found)


DELAYS = {
    "exponential": ob.delays.Exponential(0.1),
    "Pareto": ob.delays.Pareto(0.05, 1.8),
    "bimodal": ob.delays.Bimodal(0.0, 0.5, 0.1),
}
SIMULATED = {
    "allreduce": ob.allreduce(),
    "dpsgd": ob.dpsgd(order="atc"),
    "matcha": ob.matcha(),
    "nonblocking": ob.nonblocking(8),
    "nonblocking over ring": ob.nonblocking(8, over="ring"),
    "nonblocking over matcha": ob.nonblocking(8, over="matcha"),
}


def simulated(report: Report) -> None:
    """Virtual seconds to the lowest loss that all of them reach. Delays add to 0.1 s and last all the batch long."""
    for workers, steps in ((8, 40), (64, 20), (256, 8)):
        task = ob.tasks.digits(batch=16, hidden=16, lr=0.5)
        for kind, delay in DELAYS.items():
            how: dict[str, Any] = {"compute_s": ob.delays.total(0.1, delay), "spans": True, "rounds": False}
            runs = {name: ob.simulate(strategy, task, workers, steps, **how) for name, strategy in SIMULATED.items()}
            goal = max(min(loss for _, loss in _smooth(run)) for run in runs.values())
            base = _reached(runs["allreduce"], goal)
            for name, run in runs.items():
                took = _reached(run, goal)
                figure = f"{took:.2f} s, {base / took:.2f} × as fast"
                report.row(f"{workers} simulated workers, {kind}: {name}", figure, goal_loss=goal, seconds=took)


def _smooth(run: ob.Run) -> list[tuple[float, float]]:
    points = run.trace.series["loss"]
    return [
        (p.time_s, sum(q.value for q in points[max(0, k - 2) : k + 1]) / min(k + 1, 3)) for k, p in enumerate(points)
    ]


def _reached(run: ob.Run, goal: float) -> float:
    return next((time_s for time_s, loss in _smooth(run) if loss <= goal), float("inf"))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(repeats=3)
    parser.add_argument("--only", default="slow,equal,simulated")
    chosen = parser.parse_args()
    report = Report("nonblocking", chosen)
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], None]] = {
        "slow": lambda: slow(report, chosen.repeats),
        "equal": lambda: equal(report, chosen.repeats),
        "simulated": lambda: simulated(report),
    }
    for name in chosen.only.split(","):
        parts[name]()
    report.close()


if __name__ == "__main__":
    main()
