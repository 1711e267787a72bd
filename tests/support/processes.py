"""Real worker processes for live tests: start P of them, run a function on each, collect what it returns."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _worker(rank: int, size: int, port: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    try:
        outcome: Any = ("returned", function(rank, *args))
    except BaseException as error:
        outcome = ("raised", f"{type(error).__name__}: {error}", traceback.format_exc())
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(outcome))
    if outcome[0] == "raised":
        os._exit(3)  # as a crashed script would: without an orderly ending


def run_processes(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """``function(rank, *args)`` on every rank; a list of ("returned", value) or ("raised", message, traceback)."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _worker, (size, free_port(), folder, function, args), nprocs=size, join=False, start_method="spawn"
        )
        for process in context.processes:
            process.join(timeout_s)
        hung = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
        for process in context.processes:
            process.kill()
        assert not hung, f"ranks {hung} still ran after {timeout_s} s"
        outcomes = []
        for rank in range(size):
            file = Path(folder, f"{rank}.pkl")
            outcomes.append(pickle.loads(file.read_bytes()) if file.exists() else ("died", None))
        return outcomes


def returned(outcomes: list[Any]) -> list[Any]:
    """The values, if every rank returned one."""
    for rank, outcome in enumerate(outcomes):
        assert outcome[0] == "returned", f"rank {rank}: {outcome[-1]}"
    return [outcome[1] for outcome in outcomes]
