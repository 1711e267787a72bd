"""What a round costs between hosts: two network namespaces of two ranks each, with a cable of 1 Gbit/s. Needs root.

    python benchmarks/hosts.py [--json FILE] [--repeats 3] [--numbers 10000000] [--only rounds,sums]

- rounds: a partial round with everybody there, and the bytes that left a host; then with a codec, over the one without.
- sums: `allreduce`'s sum of one vector beside torch's own Gloo all-reduce.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Report, arguments, median, run_workers, spread, together
from torch import nn

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
    parser.add_argument("--only", default="rounds,sums")
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
    report.close()


if __name__ == "__main__":
    main()
