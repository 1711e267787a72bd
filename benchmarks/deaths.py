"""What a death costs the others: with ``min_workers`` they go on.

    python benchmarks/deaths.py [--json FILE] [--repeats 8] [--only kills,goodput] [--methods eager,allreduce]

- kills: 4 processes of one host, 10⁶ parameters, steps of 10 ms. One of them, another each time, is killed (SIGKILL)
  at a drawn moment; the longest step of any other, over all kills, beside the longest of runs without a kill.
- goodput: 4 processes, of which one dies a third of the way through and another after two thirds: steps of all
  together, over the share of workers that were alive, which is what there could be.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import torch
from harness import Report, arguments, median, spread
from torch import nn
from torch._C._distributed_c10d import TCPStore

import offbeat as ob

SIZE, STEP_S, PARAMETERS, STEPS = 4, 0.010, 1_000_000, 150
METHODS = {
    "allreduce": ob.allreduce(),
    "eager": ob.eager(),
    "eager(late=1)": ob.eager(late=1),
    "wagma": ob.wagma(),
    "ad_psgd": ob.ad_psgd(),
    "self_clocked": ob.self_clocked(),
}


def work(method: str, dies_s: float | None, seconds: float | None) -> None:
    """One worker; it tells its steps' seconds in a line of JSON."""
    torch.set_num_threads(1)
    model = nn.Linear(PARAMETERS // 100, 100, bias=False)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1e-3), model, METHODS[method], min_workers=1)
    gradient, steps_s = torch.randn_like(model.weight), list[float]()
    begun_s = time.perf_counter()
    if dies_s is not None:
        threading.Timer(dies_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while len(steps_s) < STEPS if seconds is None else time.perf_counter() - begun_s < seconds:
        start_s = time.perf_counter()
        time.sleep(STEP_S)
        model.weight.grad = gradient.clone()
        optimizer.step()
        steps_s.append(time.perf_counter() - start_s)
        print(json.dumps(steps_s[-1]), flush=True)
    optimizer.finish()


def run(method: str, dies_s: dict[int, float], seconds: float | None = None) -> list[list[float]]:
    """The seconds of all steps of all workers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    workers = []
    for rank in range(SIZE):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, __file__, "--work", json.dumps([method, dies_s.get(rank), seconds])]
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    told = [worker.communicate()[0] for worker in workers]
    ends = [worker.returncode for rank, worker in enumerate(workers) if rank not in dies_s]
    assert not any(ends), f"{method}: the others ended with {ends}"
    return [[float(line) for line in text.split("\n")[:-1]] for text in told]  # the last line of a dead one is a part


def kills(report: Report, repeats: int, methods: list[str]) -> None:
    draw = random.Random(0)
    for method in methods:
        longest, usual = [], []
        for k in range(repeats):
            who = k % SIZE
            told = run(method, {who: draw.uniform(0.3, STEPS * STEP_S * 0.8)})
            longest.append(max(max(steps[10:]) for rank, steps in enumerate(told) if rank != who))
            if k % 3 == 0:
                usual.append(max(max(steps[10:]) for steps in run(method, {})))
        longest.sort()
        p95, most = longest[min(len(longest) - 1, int(0.95 * len(longest)))], longest[-1]
        what = f"{method}: longest step of another, {repeats} kills; without {median(usual) * 1e3:.0f} ms"
        value = f"median {median(longest) * 1e3:.0f}, p95 {p95 * 1e3:.0f}, max {most * 1e3:.0f} ms"
        report.row(what, value, "p95 at most 100, max 250 ms", p95 <= 0.1 and most <= 0.25)


def goodput(report: Report, repeats: int, methods: list[str]) -> None:
    seconds = 3.0
    for method in methods:
        shares = []
        for _ in range(repeats):
            all_alive = sum(map(len, run(method, {}, seconds)))
            told = run(method, {1: seconds / 3, 2: seconds * 2 / 3}, seconds)
            alive = (2 * seconds + seconds / 3 + seconds * 2 / 3) / (SIZE * seconds)
            shares.append(sum(map(len, told)) / all_alive / alive)
        what = f"{method}: steps with two deaths, over the share of workers alive"
        report.row(what, spread(shares), "within 2 %", median(shares) >= 0.98)


def main() -> None:
    if "--work" in sys.argv:
        work(*json.loads(sys.argv[2]))
        return
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="kills,goodput")
    parser.add_argument("--methods", default=",".join(METHODS))
    given = parser.parse_args()
    methods = [name for name in METHODS if name in given.methods.split(",")]
    report = Report("deaths", given)
    if "kills" in given.only.split(","):
        kills(report, given.repeats, methods)
    if "goodput" in given.only.split(","):
        goodput(report, max(3, given.repeats // 3), methods)
    report.close()


if __name__ == "__main__":
    main()
