"""The demo, many times over: how far each row ends below DDP, and how often that is within two points.

Each demo runs on two cores, as on the machine it is made for; as many run at once as there are pairs of cores, unless
``--at-once`` lets some of them share one. Run k has seed k. Settings other than the demo's are for finding better::

    python benchmarks/demo.py --runs 20
    python benchmarks/demo.py --runs 20 --chronic
    python benchmarks/demo.py --runs 20 --lr 0.05 --momentum 0.9 --methods adaptive dasgd eager wagma nonblocking
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import Report, arguments, median

demo: Any = importlib.import_module("offbeat.cli.demo")  # the package gives this name to the command

NEEDED = 0.95  # of the runs


def one(chosen: argparse.Namespace) -> None:
    """A demo with the settings asked for, in this process."""
    os.sched_setaffinity(0, chosen.cores)
    demo.LR, demo.MOMENTUM = chosen.lr, chosen.momentum
    demo.METHODS = tuple(chosen.methods)
    demo.demo(chosen.chronic, seed=str(chosen.one), report=Path("report"), json=Path("runs.json"))


def pairs() -> list[list[int]]:
    """The cores this process may use, two by two."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[k : k + 2] for k in range(0, len(cores) - 1, 2)] or [cores]


def names(chosen: argparse.Namespace) -> list[str]:
    return [demo.DDP, *(demo.CHRONIC if chosen.chronic else chosen.methods)]


def measure(chosen: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The rows of every demo."""
    free: queue.Queue[list[int]] = queue.Queue()
    some = pairs()
    for number in range(chosen.at_once or len(some)):
        free.put(some[number % len(some)])
    words = ["--lr", str(chosen.lr), "--momentum", str(chosen.momentum), "--methods", *chosen.methods]
    words += ["--chronic"] if chosen.chronic else []

    def run(seed: int) -> list[dict[str, Any]]:
        cores, start = free.get(), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            own = ["--one", str(seed), "--cores", *map(str, cores)]
            command = [sys.executable, str(Path(__file__).resolve()), *own, *words]
            try:
                subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            finally:
                free.put(cores)
            rows: list[dict[str, Any]] = json.loads(Path(folder, "runs.json").read_text())["runs"][: len(names(chosen))]
        accuracies = ", ".join(f"{name} {row['accuracy']:.1%}" for name, row in zip(names(chosen), rows, strict=True))
        print(f"# seed {seed}, {time.monotonic() - start:.0f} s: {accuracies}", flush=True)
        return rows

    with ThreadPoolExecutor(free.qsize()) as pool:
        return list(pool.map(run, range(chosen.first, chosen.first + chosen.runs)))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--at-once", type=int, default=None, help="demos at a time (default: pairs of cores)")
    parser.add_argument("--chronic", action="store_true")
    parser.add_argument("--lr", type=float, default=demo.LR)
    parser.add_argument("--momentum", type=float, default=demo.MOMENTUM)
    parser.add_argument("--methods", nargs="+", default=demo.METHODS)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one is not None:
        return one(chosen)
    report = Report(f"the demo{', chronic' if chosen.chronic else ''}", chosen)
    runs = measure(chosen)
    for number, name in enumerate(names(chosen)):
        accuracies = [rows[number]["accuracy"] for rows in runs]
        gaps = [100 * (rows[0]["accuracy"] - rows[number]["accuracy"]) for rows in runs]
        speed_ups = [rows[0]["seconds"] / rows[number]["seconds"] for rows in runs]
        if number == 0:
            report.row(name, f"{median(accuracies):.1%} ({min(accuracies):.1%} … {max(accuracies):.1%})")
            continue
        near = sum(gap <= 100 * demo.POINTS + 1e-6 for gap in gaps)
        report.row(
            name,
            f"{near}/{len(runs)}, gap {median(gaps):.1f} … {max(gaps):.1f}, ×{median(speed_ups):.2f}",
            "within 2 in 19 of 20",
            near >= NEEDED * len(runs),
            gaps=[round(gap, 2) for gap in gaps],
            accuracies=[round(accuracy, 4) for accuracy in accuracies],
            speed_ups=[round(speed_up, 2) for speed_up in speed_ups],
        )
    report.close()


if __name__ == "__main__":
    main()
