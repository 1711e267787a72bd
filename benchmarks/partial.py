"""Nobody waits: the cost of a partial round, and what stragglers cost with and without them.

    python benchmarks/partial.py [--json FILE] [--repeats 3] [--only rounds,two,four,loss]

- rounds: one partial round (everybody there) beside torch's own Gloo all-reduce of the same tensor, 4 processes.
- two: 2 processes, 10 ms of computation a step, 200 steps; the fast worker's wall time over its own computation.
- four: 4 processes, 10^6 parameters, 100 ms stalls with p = 0.1 on each; wall time over DDP's.
- loss: digits, 4 processes, the same stalls: loss after the same number of samples, over DDP's.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from harness import Report, arguments, median, run_workers, spread, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from offbeat.vector import Vec

COMPUTE_S = 0.010


class Weights(nn.Module):
    """A model of ``n`` numbers whose gradient costs next to nothing: the step's computation is slept."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w @ x


def _rounds_job(rank: int, n: int, repeats: int) -> tuple[list[float], list[float]]:
    model = Weights(n)
    optimizer = ob.attach(
        torch.optim.SGD(model.parameters(), lr=0.0), model, ob.eager(wait="everyone", sync_every=None)
    )
    x = torch.ones(n)
    model(x).backward()
    optimizer.step()
    clerk, g = optimizer._desk.clerk, Vec([torch.ones(n)])
    plain, ours = [], []
    tensor = torch.ones(n)
    for k in range(repeats):
        start = together()
        dist.all_reduce(tensor)
        plain.append(time.perf_counter() - start)
        start = together()
        clerk.offer(g, k + 1)
        ours.append(time.perf_counter() - start)
    optimizer.finish()
    return plain, ours


def rounds(report: Report, repeats: int) -> None:
    for n, times in ((1_000, 200), (1_000_000, 40), (25_000_000, 8)):
        ratios, more = [], []
        for _ in range(repeats):
            plain, ours = run_workers(4, _rounds_job, n, times)[1]
            ratios.append(median(ours) / median(plain))
            more.append((median(ours) - median(plain)) * 1e3)
        what = f"4 processes, a round of {n:,} floats / all_reduce"
        if n == 1_000:
            report.row(what, f"{spread(more)} ms more", "at most 1 ms more", median(more) <= 1.0, ratios=ratios)
        else:
            report.row(what, spread(ratios), "at most 1.3", median(ratios) <= 1.3, more_ms=more)


def _stall_s(case: str, step: int, rank: int) -> float:
    if case == "slow":
        return 0.030 if rank else 0.0
    if case == "stalls":
        return ob.delays.bind(ob.delays.stalls(0.1, 0.1), seed=5, workers=8, what="stalls")(step, rank)
    return 0.0


def _loop(rank: int, case: str, steps: int, n: int, name: str, settings: dict[str, object]) -> tuple[float, float]:
    model: nn.Module = Weights(n)
    x = torch.full((n,), 1e-3)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if name == "ddp":
        model = DistributedDataParallel(model)
    else:
        optimizer = ob.attach(optimizer, model, ob.strategy(name, **settings))
    model(x).backward()
    optimizer.step()
    start, own = together(), 0.0
    for step in range(steps):
        began = time.perf_counter()
        time.sleep(COMPUTE_S + _stall_s(case, step, rank))
        own += time.perf_counter() - began
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    wall = time.perf_counter() - start
    if isinstance(optimizer, ob.Attached):
        optimizer.finish()
    return wall, own


def _loops_job(
    rank: int, case: str, steps: int, n: int, runs: list[tuple[str, dict[str, object]]]
) -> list[tuple[float, float]]:
    return [_loop(rank, case, steps, n, name, settings) for name, settings in runs]


LABEL = {"none": "(a) nobody slow", "slow": "(b) other 30 ms slower", "stalls": "(c) 100 ms stalls, p = 0.1"}


def two(report: Report, repeats: int) -> None:
    runs: list[tuple[str, dict[str, object]]] = [("ddp", {}), ("eager", {}), ("eager", {"late": 1})]
    limits = (None, 1.15, 1.02)
    for case in ("none", "slow", "stalls"):
        found: list[list[float]] = [[] for _ in runs]
        for _ in range(repeats):
            answers = run_workers(2, _loops_job, case, 200, 1000, runs)[0]
            for k, (wall, own) in enumerate(answers):
                found[k].append(wall / own)
        for (name, settings), ratios, limit in zip(runs, found, limits, strict=True):
            what = f"2 processes {LABEL[case]}: {name}{settings or ''} wall / own"
            report.row(what, spread(ratios), f"at most {limit}" if limit else "", limit and median(ratios) <= limit)


def four(report: Report, repeats: int) -> None:
    runs: list[tuple[str, dict[str, object]]] = [
        ("ddp", {}),
        ("eager", {}),
        ("wagma", {}),
        ("wagma", {"merge": "correct"}),
        ("eager", {"late": 1}),
        ("wagma", {"late": 1}),
        ("ad_psgd", {}),
    ]
    limits = (None, 0.65, 0.65, 0.65, 0.5, 0.5, None)
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        answers = run_workers(4, _loops_job, "stalls", 150, 1_000_000, runs)
        walls = [max(answer[k][0] for answer in answers) for k in range(len(runs))]
        for k, wall in enumerate(walls):
            found[k].append(wall / walls[0])
    for (name, settings), ratios, limit in zip(runs, found, limits, strict=True):
        what = f"4 processes, 10^6 parameters {LABEL['stalls']}: {name}{settings or ''} / DDP"
        report.row(what, spread(ratios), f"at most {limit}" if limit else "", limit and median(ratios) <= limit)


def _loss_job(rank: int, steps: int, runs: list[tuple[str, dict[str, object]]]) -> list[tuple[float, float]]:
    out = []
    for name, settings in runs:
        task = ob.tasks.digits(lr=0.1)
        model: nn.Module = task.build(0)
        plain = model
        optimizer = task.optimizer(list(model.parameters()))
        if name == "ddp":
            model = DistributedDataParallel(model)
        else:
            optimizer = ob.attach(optimizer, model, ob.strategy(name, **settings))
        for step in range(steps):
            time.sleep(0.002 + _stall_s("stalls", step, rank) / 5)
            x, y = task.take(rank, step)
            optimizer.zero_grad()
            task.loss(model(x), y).backward()
            optimizer.step()
        if isinstance(optimizer, ob.Attached):
            optimizer.finish()
        metrics = task.evaluate(plain) if task.evaluate else {}
        out.append((metrics["loss"], metrics["accuracy"]))
        dist.barrier()
    return out


def loss(report: Report, repeats: int) -> None:
    runs: list[tuple[str, dict[str, object]]] = [
        ("ddp", {}),
        ("eager", {}),
        ("eager", {"late": 1}),
        ("wagma", {}),
        ("wagma", {"merge": "correct"}),
        ("wagma", {"late": 1}),
        ("ad_psgd", {}),
    ]
    found: list[list[float]] = [[] for _ in runs]
    accuracies: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for k, (value, accuracy) in enumerate(answers := run_workers(4, _loss_job, 400, runs)[0]):
            found[k].append(value / answers[0][0])
            accuracies[k].append(accuracy)
    for k, (name, settings) in enumerate(runs):
        what = f"digits, 4 processes, 20 ms stalls: loss of {name}{settings or ''} / DDP"
        figure = f"{spread(found[k])}, accuracy {median(accuracies[k]):.3f}"
        report.row(what, figure, "within 2 %" if k else "", (median(found[k]) <= 1.02) if k else None)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="rounds,two,four,loss")
    chosen = parser.parse_args()
    report = Report("partial collectives", chosen)
    torch.set_num_threads(1)
    wanted = chosen.only.split(",")
    for name, job in (("rounds", rounds), ("two", two), ("four", four), ("loss", loss)):
        if name in wanted:
            job(report, chosen.repeats)
    report.close()


if __name__ == "__main__":
    main()
