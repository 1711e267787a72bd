"""What a death costs the others, and coming back: with ``min_workers`` they go on.

    python benchmarks/deaths.py [--json FILE] [--repeats 8] [--only kills,far,returns,goodput,saves,chaos]
                                [--methods eager,…]

- kills: 4 processes of one host, 10⁶ parameters, steps of 10 ms. One of them, another each time, is killed (SIGKILL)
  at a drawn moment; the longest step of any other, over all kills, beside the longest of runs without a kill.
- far: the same, as if ranks 0 and 1 were on one host and 2 and 3 on another.
- returns: the same with 25·10⁶ parameters and SGD with momentum; the killed one is started again. From its ``attach``
  until its first step is over; and the others' longest step from its return on, beside the longest before.
- goodput: 4 processes, of which one dies a third of the way through and another after two thirds: steps of all
  together, over the share of workers that were alive, which is what there could be.
- saves: 2 processes, 25·10⁶ parameters, SGD with momentum: the mean step with a checkpoint every second, over that
  without.
- chaos: every method; each worker dies at drawn moments, in its first two lives: rank 0, several at once, while it
  comes back. Every run must end, with equal weights on all who are there at the end. ``--repeats``: so often.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from harness import Report, arguments, median, spread
from torch import nn

import offbeat as ob
from offbeat.live.host import checkpoint

SIZE, STEP_S, PARAMETERS, MANY, STEPS = 4, 0.010, 1_000_000, 25_000_000, 150
METHODS = {
    "allreduce": "allreduce",
    "eager": "eager",
    "eager(late=1)": "eager:late=1",
    "wagma": "wagma",
    "ad_psgd": "ad_psgd",
    "self_clocked": "self_clocked",
}
LIVES = 3  # in chaos


def work(told: Mapping[str, Any]) -> None:
    """One worker; it tells what happens in lines of JSON."""
    torch.set_num_threads(1)
    rank, life = int(os.environ["RANK"]), int(os.environ["OFFBEAT_RETURNS"])
    if told["hosts"] > 1:
        os.environ["OFFBEAT_HOST"] = str(rank * told["hosts"] // SIZE)

    def tell(**what: Any) -> None:
        print(json.dumps({"rank": rank, "life": life, "at_s": time.monotonic(), **what}), flush=True)

    dies_s = told["dies_s"].get(f"{rank}/{life}")
    begun_s = time.monotonic()
    if life and dies_s is not None:  # it may be coming back yet
        threading.Timer(dies_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    model = nn.Linear(told["parameters"] // 100, 100, bias=False)
    optimizer = ob.attach(
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        model,
        told["method"],
        min_workers=1,
        checkpoint=told["folder"],
        every_s=1.0,
    )
    if not life and dies_s is not None:
        threading.Timer(dies_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    gradient, steps, attached_s = torch.randn_like(model.weight), 0, time.monotonic()
    end_s = attached_s + told["seconds"] if told["seconds"] else None
    while steps < STEPS if end_s is None else time.monotonic() < end_s:
        start_s = time.monotonic()
        time.sleep(STEP_S)
        (model.weight * gradient).sum().backward() if told["backward"] else setattr(model.weight, "grad", gradient * 1)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        tell(step_s=time.monotonic() - start_s)
        if steps == 1 and life:
            tell(back_s=time.monotonic() - begun_s)
    optimizer.finish()
    tell(digest=hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())


def run(
    method: str,
    dies_s: Mapping[tuple[int, int], float],
    seconds: float | None = None,
    restarts: int = 0,
    parameters: int = PARAMETERS,
    backward: bool = False,
    folder: str | None = None,
    size: int = SIZE,
    hosts: int = 1,
) -> list[dict[str, Any]]:
    """All that all workers tell. ``dies_s``: by rank and life, how long after attach, or in later lives its start."""
    told = {
        "method": method,
        "dies_s": {f"{rank}/{life}": after_s for (rank, life), after_s in dies_s.items()},
        "seconds": seconds,
        "parameters": parameters,
        "backward": backward,
        "folder": folder,
        "hosts": hosts,
    }
    command = [sys.executable, "-m", "offbeat", "launch", "-n", str(size), "--restarts", str(restarts)]
    command += [__file__, "--", "--work", json.dumps(told)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, f"{method}, {told}: {ran.returncode}\n{ran.stderr[-6000:]}"
    lines = [line.partition("] ")[2] for line in ran.stdout.split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def steps_of(told: list[dict[str, Any]], skip: int = 10) -> dict[int, list[float]]:
    """The seconds of all steps of each rank's first life, but for the first."""
    found: dict[int, list[float]] = {}
    for one in told:
        if "step_s" in one and not one["life"]:
            found.setdefault(one["rank"], []).append(one["step_s"])
    return {rank: steps[skip:] for rank, steps in found.items()}


def kills(report: Report, repeats: int, methods: list[str], hosts: int = 1) -> None:
    draw = random.Random(0)
    for method in methods:
        longest, usual = [], []
        for k in range(repeats):
            who = k % SIZE
            dies_s = {(who, 0): draw.uniform(0.3, STEPS * STEP_S * 0.8)}
            told = steps_of(run(METHODS[method], dies_s, hosts=hosts))
            longest.append(max(max(steps) for rank, steps in told.items() if rank != who))
            if k % 3 == 0:
                told = steps_of(run(METHODS[method], {}, hosts=hosts))
                usual.append(max(max(steps) for steps in told.values()))
        longest.sort()
        p95, most = longest[min(len(longest) - 1, int(0.95 * len(longest)))], longest[-1]
        where = f" on {hosts} hosts" if hosts > 1 else ""
        what = f"{method}{where}: longest step of another, {repeats} kills; without {median(usual) * 1e3:.0f} ms"
        value = f"median {median(longest) * 1e3:.0f}, p95 {p95 * 1e3:.0f}, max {most * 1e3:.0f} ms"
        report.row(what, value, "p95 at most 100, max 250 ms", p95 <= 0.1 and most <= 0.25)


def far(report: Report, repeats: int, methods: list[str]) -> None:
    kills(report, repeats, methods, hosts=2)


def returns(report: Report, repeats: int, methods: list[str]) -> None:
    for method in methods:
        backs, ratios = [], []
        for k in range(repeats):
            who = k % SIZE
            told = run(METHODS[method], {(who, 0): 5.0}, 20.0, 1, MANY)
            back = next(one for one in told if "back_s" in one)
            others = [one for one in told if "step_s" in one and one["rank"] != who]
            came_s = back["at_s"] - back["back_s"]
            before = sorted(one["step_s"] for one in others if one["at_s"] < came_s)
            since = [one["step_s"] for one in others if one["at_s"] >= came_s]
            backs.append(back["back_s"])
            ratios.append(max(since) / before[-2])
        report.row(
            f"{method}: from attach until the first step is over",
            spread(backs) + " s",
            "at most 1 s",
            median(backs) <= 1.0,
        )
        what = f"{method}: the others' longest step from the return on, over the longest before"
        report.row(what, spread(ratios), "at most 1.2", median(ratios) <= 1.2)


def goodput(report: Report, repeats: int, methods: list[str]) -> None:
    seconds = 6.0
    for method in methods:
        shares = []
        for _ in range(repeats):
            all_alive = sum(map(len, steps_of(run(METHODS[method], {}, seconds), 0).values()))
            dies_s = {(1, 0): seconds / 3, (2, 0): seconds * 2 / 3}
            told = run(METHODS[method], dies_s, seconds)
            steps = [one for one in told if "step_s" in one]
            begun_s = min(one["at_s"] for one in steps)
            last_s = {rank: max(one["at_s"] for one in steps if one["rank"] == rank) - begun_s for rank in range(SIZE)}
            alive = sum(last_s.values()) / SIZE / max(last_s.values())
            shares.append(len(steps) / all_alive / alive)
        what = f"{method}: steps with two deaths, over the share of workers alive"
        report.row(what, spread(shares), "within 2 %", median(shares) >= 0.98)


def saves(report: Report, repeats: int, methods: list[str]) -> None:
    for method in methods:
        ratios, written = [], 0
        for _ in range(repeats):
            means = []
            with tempfile.TemporaryDirectory() as folder:
                for where in (None, folder):
                    steps = steps_of(run(METHODS[method], {}, 15.0, 0, MANY, folder=where, size=2), 1)
                    means.append(sum(map(sum, steps.values())) / sum(map(len, steps.values())))
                found = checkpoint.every(Path(folder))
                assert found
                assert not any(one.damage for one in found)
                written += int(found[0].place.name.partition("-")[2])
            ratios.append(means[1] / means[0])
        what = f"{method}: mean step with checkpoints ({written} in {15 * repeats} s), over that without"
        report.row(what, spread(ratios), "at most 1.03", median(ratios) <= 1.03)


def chaos(report: Report, repeats: int, methods: list[str]) -> None:
    del methods
    killed, returned = 0, 0
    for k, name in enumerate(sorted(ob.STRATEGIES) * repeats):
        draw = random.Random(k)
        dies_s = {
            (rank, life): draw.uniform(0.2, 5.0)
            for rank in range(SIZE)
            for life in range(LIVES - 1)
            if draw.random() < 0.6 and (rank, life) != (draw.randrange(SIZE), 0)
        }
        if len([1 for rank, life in dies_s if not life]) == SIZE:  # somebody is to be there
            dies_s.pop((draw.randrange(SIZE), 0))
        told = run(name, dies_s, 15.0, LIVES, 10_000, backward=True)
        ends = {one["digest"] for one in told if "digest" in one}
        lives = {(one["rank"], one["life"]) for one in told}
        assert len(ends) == 1, f"{name}, {dies_s}: the workers end with different weights"
        killed += len(set(dies_s) & lives)
        returned += sum(life > 0 for _, life in lives)
        print(f"  {name}: {sorted(dies_s)}, {sum('digest' in one for one in told)} ended", flush=True)
    what = f"{killed} kills, {returned} returns over {len(ob.STRATEGIES)} methods"
    report.row(what, "all runs ended, with equal weights", "the same", True)


def main() -> None:
    if "--work" in sys.argv:
        work(json.loads(sys.argv[sys.argv.index("--work") + 1]))
        return
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="kills,far,returns,goodput,saves,chaos")
    parser.add_argument("--methods", default=",".join(METHODS))
    given = parser.parse_args()
    methods = [name for name in METHODS if name in given.methods.split(",")]
    report = Report("deaths", given)
    parts = (
        (kills, given.repeats),
        (far, given.repeats),
        (returns, 3),
        (goodput, 3),
        (saves, 3),
        (chaos, given.repeats),
    )
    for part, repeats in parts:
        if part.__name__ in given.only.split(","):
            part(report, repeats, methods)
    report.close()


if __name__ == "__main__":
    main()
