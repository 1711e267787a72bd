"""What all benchmarks share: worker processes, medians, a table, and a record of where the figures come from."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

# How self_clocked's workers can meet where they share memory; by default all together, when half have handed in.
ON_ONE_HOST: dict[str, dict[str, object]] = {
    "by default": {},
    "in pairs": {"group": 2, "pause": 1.0, "wait": 0.125, "draw": 0},
    "in pairs that draw": {"group": 2, "pause": 1.0, "wait": 0.125, "draw": 2},
    "all at each hand-in": {"group": None, "pause": 0.0, "wait": "first"},
}


class Hosts(Protocol):
    """Hosts for workers to be on."""

    def move_in(self, host: int, port: int) -> None: ...


def _worker(
    rank: int,
    size: int,
    port: int,
    job: Callable[..., Any],
    args: tuple[Any, ...],
    answers: Any,
    hosts: Hosts | None,
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    if hosts is not None:
        hosts.move_in(2 * rank // size, port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answer = job(rank, *args)
    answers.put((rank, answer))
    dist.barrier()
    dist.destroy_process_group()


def run_workers(size: int, job: Callable[..., Any], *args: Any, hosts: Hosts | None = None) -> list[Any]:
    """``job(rank, *args)`` in ``size`` processes that share a default process group; their answers by rank.

    On two ``hosts``, where there are some: the first half of the ranks on the first.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    context = start_processes(_worker, (size, port, job, args, answers, hosts), nprocs=size, join=False)
    found: dict[int, Any] = {}
    while len(found) < size:
        if answers.empty():
            context.join(0.02)  # raises what a worker has raised
        else:
            rank, answer = answers.get()
            found[rank] = answer
    while not context.join():
        pass
    return [found[rank] for rank in range(size)]


def together(group: Any = None) -> float:
    """Line up all workers and give the time."""
    dist.barrier(group=group)
    return time.perf_counter()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Median with its range."""
    return f"{median(values):.3f} ({min(values):.3f} … {max(values):.3f})"


class Report:
    """Rows of (what, figure, target), printed as they come and written as JSON with the command and the machine."""

    def __init__(self, title: str, arguments: argparse.Namespace) -> None:
        self._rows: list[dict[str, object]] = []
        self._title, self._json = title, getattr(arguments, "json", None)
        print(f"# {title}\n# {self._machine()}\n# {' '.join(sys.argv)}")

    @staticmethod
    def _machine() -> str:
        python = platform.python_version()
        return f"{os.cpu_count()} cores, {platform.machine()}, Python {python}, torch {torch.__version__}"

    def row(self, what: str, figure: str, target: str = "", met: bool | None = None, **raw: object) -> None:
        mark = {True: "met", False: "MISSED", None: ""}[met]
        print(f"{what:<58} {figure:<34} {target:<22} {mark}", flush=True)
        self._rows.append({"what": what, "figure": figure, "target": target, "met": met, **raw})

    def close(self) -> None:
        if self._json:
            record = {
                "title": self._title,
                "command": " ".join(["python", *sys.argv]),
                "machine": self._machine(),
                "date": time.strftime("%Y-%m-%d"),
                "rows": self._rows,
            }
            Path(self._json).write_text(json.dumps(record, indent=1) + "\n")


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--repeats", type=int, default=5, help="side-by-side repeats, of which the median counts")
    return parser
