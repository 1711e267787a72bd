"""Nobody waits: the cost of a partial round, and what stragglers cost with and without them.

    python benchmarks/partial.py [--json FILE] [--repeats 3] [--only rounds,two,four,host,loss,straggler]

- rounds: one partial round (everybody there) beside torch's own Gloo all-reduce of the same tensor, 4 processes.
- two: 2 processes, 10 ms of computation a step, 200 steps; the fast worker's wall time over that of the same loop
  with nobody to talk to (sleep, forward, backward, the inner optimiser's step), which is its own computation.
- four: 4 processes, 10^6 parameters, 100 ms stalls with p = 0.1 on each; wall time of the last one to end over DDP's.
  "alone" is the least that there can be: of 150 steps the unluckiest worker has 18 such stalls of its own.
- host: 8 processes with nobody slow, 10^3 and 10^6 parameters: what settings of self_clocked cost on one host, over the
  loop alone. `engine.py --only memory --workers 8` has the copies of the weights that they hold. Not run by itself.
- straggler: 3 processes, 20 ms of computation a step; rank 1 sleeps 2 s in every step, or holds the interpreter in pure
  Python for 200 ms: the others' median step over the one without it.
- loss: digits, 4 processes, the same stalls: loss after the same number of samples, over DDP's.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from harness import ON_ONE_HOST, Report, arguments, median, run_workers, spread, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from offbeat.tensors.vector import Vec

WARM_UP = 5  # steps that are not counted, for every method: the first ones start threads and processes
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
    client, g = optimizer._run.endpoints.client, Vec([torch.ones(n)])
    plain, ours = [], []
    tensor = torch.ones(n)
    for k in range(repeats):
        start = together()
        dist.all_reduce(tensor)
        plain.append(time.perf_counter() - start)
        start = together()
        client.offer(g, k + 1)
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


def _loop(rank: int, case: str, steps: int, n: int, name: str, settings: dict[str, object]) -> float:
    """The wall time of the loop; "alone" talks to nobody."""
    model: nn.Module = Weights(n)
    x = torch.full((n,), 1e-3)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if name == "ddp":
        model = DistributedDataParallel(model)
    elif name != "alone":
        optimizer = ob.attach(optimizer, model, ob.named(name, **settings))
    for _ in range(WARM_UP):
        model(x).backward()
        optimizer.step()
    start = together()
    for step in range(steps):
        time.sleep(COMPUTE_S + _stall_s(case, step, rank))
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    wall = time.perf_counter() - start
    if isinstance(optimizer, ob.Attached):
        optimizer.finish()
    return wall


def _loops_job(rank: int, case: str, steps: int, n: int, runs: list[tuple[str, dict[str, object]]]) -> list[float]:
    return [_loop(rank, case, steps, n, name, settings) for name, settings in runs]


LABEL = {"none": "(a) nobody slow", "slow": "(b) other 30 ms slower", "stalls": "(c) 100 ms stalls, p = 0.1"}


def two(report: Report, repeats: int) -> None:
    runs: list[tuple[str, dict[str, object]]] = [
        ("alone", {}),
        ("ddp", {}),
        ("eager", {}),
        ("eager", {"sync": "bounded"}),
        ("eager", {"late": 1}),
        ("eager", {"late": 1, "sync": "bounded"}),
        ("self_clocked", {}),
    ]
    limits = (None, None, 1.10, 1.10, 1.02, 1.02, 1.02)
    for case in ("none", "slow", "stalls"):
        found: list[list[float]] = [[] for _ in runs]
        for _ in range(repeats):
            walls = run_workers(2, _loops_job, case, 200, 1000, runs)[0]
            for k, wall in enumerate(walls):
                found[k].append(wall / walls[0])
        for (name, settings), ratios, limit in list(zip(runs, found, limits, strict=True))[1:]:
            what = f"2 processes {LABEL[case]}: {name}{settings or ''} wall / own"
            report.row(
                what,
                spread(ratios),
                f"at most {limit}" if limit else "",
                None if limit is None else median(ratios) <= limit,
            )


def four(report: Report, repeats: int) -> None:
    runs: list[tuple[str, dict[str, object]]] = [
        ("ddp", {}),
        ("alone", {}),
        ("eager", {}),
        ("wagma", {}),
        ("wagma", {"merge": "correct"}),
        ("eager", {"late": 1}),
        ("wagma", {"late": 1}),
        ("self_clocked", {}),
        ("ad_psgd", {}),
    ]
    limits = (None, None, 0.6, 0.6, 0.6, 0.5, 0.5, None, None)
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        answers = run_workers(4, _loops_job, "stalls", 150, 1_000_000, runs)
        walls = [max(answer[k] for answer in answers) for k in range(len(runs))]
        for k, wall in enumerate(walls):
            found[k].append(wall / walls[0])
    for (name, settings), ratios, limit in zip(runs, found, limits, strict=True):
        what = f"4 processes, 10^6 parameters {LABEL['stalls']}: {name}{settings or ''} / DDP"
        report.row(
            what,
            spread(ratios),
            f"at most {limit}" if limit else "",
            None if limit is None else median(ratios) <= limit,
        )


def host(report: Report, repeats: int) -> None:
    runs: dict[str, tuple[str, dict[str, object]]] = {
        "alone": ("alone", {}),
        **{f"self_clocked {how}": ("self_clocked", settings) for how, settings in ON_ONE_HOST.items()},
        "wagma": ("wagma", {}),
        "ad_psgd": ("ad_psgd", {}),
    }
    for n in (1000, 1_000_000):
        found: list[list[float]] = [[] for _ in runs]
        for _ in range(repeats):
            answers = run_workers(8, _loops_job, "none", 150, n, list(runs.values()))
            for k in range(len(runs)):
                found[k].append(median([walls[k] / walls[0] for walls in answers]))
        for what, ratios in list(zip(runs, found, strict=True))[1:]:
            report.row(f"8 processes, {n:,} parameters {LABEL['none']}: {what} wall / own", spread(ratios))


NEVER_ALL: list[tuple[str, dict[str, object]]] = [
    ("eager", {"sync_every": None}),
    ("eager", {"sync_every": None, "late": 1}),
    ("wagma", {"tau": None}),
    ("ad_psgd", {}),
]
STRAGGLERS = {"none": 0.0, "sleeps 2 s": 2.0, "200 ms of Python": 0.2}


def _straggler_job(rank: int, steps: int) -> list[dict[str, float]]:
    """For each method, the median step of this rank beside each kind of straggler; rank 1 is the straggler."""
    out: list[dict[str, float]] = []
    for name, settings in NEVER_ALL:
        out.append({})
        for how, lateness_s in STRAGGLERS.items():
            model = Weights(10_000)
            x = torch.full((10_000,), 1e-3)
            optimizer = ob.attach(
                torch.optim.SGD(model.parameters(), lr=1e-3), model, ob.named(name, **settings), seed=1
            )
            late, took = rank == 1 and lateness_s > 0, []
            # About as long as the others take for all of their steps.
            for step in range(max(2, int(steps * 0.025 / lateness_s)) if late else steps):
                start = time.perf_counter()
                if late and step:
                    _be_late(lateness_s, sleeping=how.startswith("sleeps"))
                time.sleep(2 * COMPUTE_S)
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
                took.append(time.perf_counter() - start)
            optimizer.finish()
            out[-1][how] = median(took[1:])
    return out


def _be_late(seconds: float, sleeping: bool) -> None:
    if sleeping:
        time.sleep(seconds)
        return
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def straggler(report: Report, repeats: int) -> None:
    answers = [run_workers(3, _straggler_job, 120) for _ in range(repeats)]
    for k, (name, settings) in enumerate(NEVER_ALL):
        for how in list(STRAGGLERS)[1:]:
            ratios = [a[rank][k][how] / a[rank][k]["none"] for a in answers for rank in (0, 2)]
            more_ms = [(a[rank][k][how] - a[rank][k]["none"]) * 1e3 for a in answers for rank in (0, 2)]
            what = f"3 processes, one {how}: others' step, {name}{settings or ''}"
            figure, limit = f"{spread(ratios)}, {median(more_ms):+.1f} ms", 1.1 if how.startswith("sleeps") else 1.02
            report.row(what, figure, f"at most {limit}", median(ratios) <= limit, more_ms=more_ms)


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
            optimizer = ob.attach(optimizer, model, ob.named(name, **settings))
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
    parser.add_argument("--only", default="rounds,two,four,loss,straggler")
    chosen = parser.parse_args()
    report = Report("partial collectives", chosen)
    torch.set_num_threads(1)
    wanted = chosen.only.split(",")
    for job in (rounds, two, four, host, loss, straggler):
        if job.__name__ in wanted:
            job(report, chosen.repeats)
    report.close()


if __name__ == "__main__":
    main()
