"""What a round costs between hosts: two network namespaces of two ranks each, with a cable of 1 Gbit/s. Needs root.

    python benchmarks/hosts.py [--json FILE] [--repeats 3] [--numbers 10000000] [--only rounds,sums,steps,frozen,fresh]

- rounds: a partial round with everybody there, and the bytes that left a host; then with a codec, over the one without.
- sums: `allreduce`'s sum of one vector beside torch's own Gloo all-reduce.
- steps: steps of 20 ms, of one worker 80 ms, with 1.6 million parameters: wall time of the other three over that of the
  same loop with nobody to talk to.
- frozen: the longest step of the others while a worker is stopped for 4 s, over the longest otherwise: on its host
  and on the other one.
- fresh: `msync("75%")`, with all equally quick: how many gradients of each host are in time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Report, arguments, median, run_workers, spread, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from offbeat.tensors.vector import Vec

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.namespaces import TwoHosts, why_not

GBIT_S = 1_000_000_000
RANKS = 4


def _rounds_job(rank: int, cable: TwoHosts, n: int, times: int, codec: str) -> tuple[list[float], float]:
    """Seconds of each round, and the bytes that left the first host in one."""
    model = nn.Module()
    model.w = w = nn.Parameter(torch.zeros(n))
    strategy = ob.eager(wait="everyone", sync_every=None, codec=ob.codec.parse(codec))
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, strategy)
    w.sum().backward()
    optimizer.step()
    client, g, took = optimizer._run.endpoints.client, Vec([torch.ones(n)]), list[float]()
    client.offer(g, 1)
    together()
    before = cable.sent_bytes(0) if rank == 0 else 0
    for k in range(times):
        start = together()
        client.offer(g, k + 2)
        took.append(time.perf_counter() - start)
    together()
    sent = (cable.sent_bytes(0) - before) / times if rank == 0 else 0.0
    optimizer.finish()
    return took, sent


def _sums_job(rank: int, cable: TwoHosts, n: int, times: int, whose: str) -> tuple[list[float], float]:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(n))
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, ob.allreduce())
    transport, tensor, took = optimizer._run.transport, torch.ones(n), list[float]()
    for k in range(times + 1):
        start = together()
        if k == 1 and rank == 0:
            before = cable.sent_bytes(0)
        if whose == "torch":
            dist.all_reduce(tensor)
        else:
            work, _ = transport.part_of_mean(tensor, None, tuple(range(RANKS)))
            assert work is not None
            transport.waiter.wait([work], "a sum")
        took.append(time.perf_counter() - start)
    together()
    sent = (cable.sent_bytes(0) - before) / times if rank == 0 else 0.0
    optimizer.finish()
    return took[1:], sent


STEP_S, SLOW_S, SLOW = 0.02, 0.06, RANKS - 1
PARAMETERS, STEPS, WARM_UP = 1_600_000, 150, 5
RUNS: dict[str, ob.Method | None] = {
    "DDP": None,
    "local_sgd(8)": ob.local_sgd(8),
    "default": ob.self_clocked(),
    "eager(late=1)": ob.eager(late=1),
    "wagma(late=1)": ob.wagma(late=1),
}
AT_MOST = {"default": 1.2}
FREEZE_S, FROZEN_STEPS, FRESH_STEPS = 4.0, 320, 200


def _loop(rank: int, method: ob.Method | str | None, steps: int, slow_s: float) -> list[float]:
    """The time of each step. ``method`` None: DDP; "alone": nobody to talk to."""
    model: nn.Module = nn.Sequential(nn.Linear(1000, 800), nn.Linear(800, 1000))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if method is None:
        model = DistributedDataParallel(model)
    elif not isinstance(method, str):
        optimizer = ob.attach(optimizer, model, method)
    x, took = torch.ones(1, 1000), list[float]()
    for step in range(steps + WARM_UP):
        start = together() if step == WARM_UP else time.perf_counter()
        time.sleep(STEP_S + (slow_s if rank == SLOW and step >= WARM_UP else 0.0))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        took.append(time.perf_counter() - start)
    if isinstance(optimizer, ob.Attached):
        optimizer.finish()
    together()
    return took[WARM_UP:]


def _steps_job(rank: int, names: list[str]) -> dict[str, float]:
    runs: dict[str, ob.Method | str | None] = {"alone": "alone", **{name: RUNS[name] for name in names}}
    return {name: sum(_loop(rank, method, STEPS, SLOW_S)) for name, method in runs.items()}


def steps(report: Report, repeats: int) -> None:
    names = list(RUNS)
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        with TwoHosts(GBIT_S) as cable:
            answers = run_workers(RANKS, _steps_job, names, hosts=cable)[:SLOW]
        for name in names:
            found[name].append(median([one[name] / one["alone"] for one in answers]))
    for name, ratios in found.items():
        limit = AT_MOST.get(name)
        met = None if limit is None else median(ratios) <= limit
        figure, target = spread(ratios), "" if limit is None else f"at most {limit}"
        report.row(f"two hosts, one worker slower: {name}, the others / own", figure, target, met)


def _frozen_job(rank: int, name: str) -> tuple[float, float]:
    """The longest step with nobody stopped, and while a worker of the second host is."""
    usual_s = max(_loop(rank, ob.named(name), FROZEN_STEPS, 0.0))
    pids: list[int] = [0] * RANKS
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        for after_s, number in ((2.0, signal.SIGSTOP), (2.0 + FREEZE_S, signal.SIGCONT)):
            threading.Timer(after_s, os.kill, (pids[SLOW], number)).start()
    return usual_s, max(_loop(rank, ob.named(name), FROZEN_STEPS, 0.0))


def frozen(report: Report, repeats: int) -> None:
    for name in ("eager:sync_every=none", "self_clocked", "self_clocked:codec=int8"):
        here, there = list[float](), list[float]()
        for _ in range(repeats):
            with TwoHosts(GBIT_S) as cable:
                longest = run_workers(RANKS, _frozen_job, name, hosts=cable)
            here.append(longest[SLOW - 1][1] - longest[SLOW - 1][0])
            there.append(max(stopped_s - usual_s for usual_s, stopped_s in longest[: SLOW - 1]))
        for what, more_s, limit_s in (("its host", here, 0.05), ("the other host", there, 0.1)):
            figure, met = f"{spread(more_s)} s more", median(more_s) <= limit_s
            report.row(f"stopped for 4 s, {name}: longest step on {what}", figure, f"at most {limit_s} s", met)


def _fresh_job(rank: int, n: int) -> int:
    """How many gradients of this rank were taken."""
    model: nn.Module = nn.Module()
    model.w = w = nn.Parameter(torch.zeros(n))
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, ob.msync("75%"))
    together()
    for _ in range(FRESH_STEPS):
        time.sleep(STEP_S)
        optimizer.zero_grad()
        w.sum().backward()
        optimizer.step()
    optimizer.finish()
    return FRESH_STEPS - len(optimizer.lost)


def fresh(report: Report, repeats: int) -> None:
    ratios = list[float]()
    for _ in range(repeats):
        with TwoHosts(GBIT_S) as cable:
            taken = run_workers(RANKS, _fresh_job, 1000, hosts=cable)
        ratios.append(sum(taken[RANKS // 2 :]) / sum(taken[: RANKS // 2]))
        print(f"# gradients taken: {taken}")
    met = 0.9 <= median(ratios) <= 1.1
    report.row("msync(75%), gradients of the second host / the first's", spread(ratios), "0.9 to 1.1", met)


def _measured(job: Callable[..., Any], n: int, what: str) -> tuple[float, float]:
    """Median seconds, and MB that left a host."""
    with TwoHosts(GBIT_S) as cable:
        took, sent = run_workers(RANKS, job, cable, n, 8, what, hosts=cable)[0]
    return median(took), sent / 1e6


def rounds(report: Report, repeats: int, n: int) -> None:
    uncoded, sent = [], []
    for _ in range(repeats):
        took_s, mb = _measured(_rounds_job, n, "none")
        uncoded.append(took_s)
        sent.append(mb)
    one_mb = 4 * n / 1e6
    figure = f"{median(uncoded) * 1e3:.0f} ms, {median(sent):.1f} MB left a host"
    report.row(f"a round of {n:,} floats", figure, f"one message: {one_mb:.0f} MB", median(sent) <= 1.1 * one_mb)
    for codec, limit in (("bf16", 0.6), ("int8", 0.4)):
        ratios, mbs = [], []
        for without_s in uncoded:
            took_s, mb = _measured(_rounds_job, n, codec)
            ratios.append(took_s / without_s)
            mbs.append(mb)
        figure = f"{spread(ratios)}, {median(mbs):.1f} MB"
        report.row(f"the same with {codec} / without", figure, f"at most {limit}", median(ratios) <= limit)


def sums(report: Report, repeats: int, n: int) -> None:
    for whose in ("torch", "ours"):
        found = [_measured(_sums_job, n, whose) for _ in range(repeats)]
        took, mb = median([s for s, _ in found]), median([m for _, m in found])
        words = "torch's Gloo" if whose == "torch" else "ours"
        report.row(f"a sum of {n:,} floats, {words}", f"{took * 1e3:.0f} ms, {mb:.1f} MB left a host")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="rounds,sums,steps,frozen,fresh")
    parser.add_argument("--numbers", type=int, default=10_000_000)
    given = parser.parse_args()
    reason = why_not()
    if reason is not None:
        raise SystemExit(reason)
    report, only = Report("hosts", given), given.only.split(",")
    if "rounds" in only:
        rounds(report, given.repeats, given.numbers)
    if "sums" in only:
        sums(report, given.repeats, given.numbers)
    if "steps" in only:
        steps(report, given.repeats)
    if "frozen" in only:
        frozen(report, given.repeats)
    if "fresh" in only:
        fresh(report, given.repeats)
    report.close()


if __name__ == "__main__":
    main()
