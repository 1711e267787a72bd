"""Methods of which the others go on without a worker, a run in which some die, and a model that counts gradients."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

import offbeat as ob
from offbeat.live.transport import hosts
from offbeat.live.worker.line import _lines as lines
from tests.support.forking import LINKS
from tests.support.methods import EVERY_KIND
from tests.support.nets import backward, flat, net, sgd

SIZE, LAST, STEPS = 4, 4, 12
MOMENTS = ("before its first step", "between two steps", "inside a step", "in the middle of an average")
METHODS = {
    **{name: strategy for name, strategy in EVERY_KIND.items() if "per_node=3" not in name},
    "nonblocking in time": ob.nonblocking(3),
    "nonblocking by a ring": ob.nonblocking(over="ring"),
    "self_clocked in pairs": ob.self_clocked(group=2, wait="first"),
    "self_clocked, moments": ob.self_clocked(group=2, moments=2),
    "qsgd along a graph": ob.dpsgd(codec=ob.codec.qsgd(4)),
    "msync of all": ob.msync("100%"),
}

COUNTED = {
    "allreduce": ob.allreduce(),
    "eager": ob.eager(),
    "eager, every step": ob.eager(catch_up="every_step"),
    "eager, late": ob.eager(late=1),
    "eager, all wait": ob.eager(wait="everyone"),
    "msync": ob.msync("50%"),
}


class Ticks(nn.Module):
    """With SGD at rate −1, number r of the weights is the sum of what rank r's gradients have counted."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_host(number: int) -> None:
    """This process is a worker of that host of several."""
    os.environ[hosts.NAME] = f"host {number}"


def left_behind(rank: int, method: str, moment: str, who: tuple[int, ...], layout: tuple[int, ...] = ()) -> list[float]:
    """Some die; the weights that the others end with. ``layout``: the host of each."""
    if layout:
        on_host(layout[rank])
    model = net()
    optimizer = ob.attach(sgd(model, momentum=0.0), model, METHODS[method], min_workers=1)
    last = 0 if moment == "before its first step" else LAST
    for t in range(STEPS):
        dies = rank in who and t == last
        if dies and moment != "inside a step":
            die()
        if t == LAST and moment == "in the middle of an average":
            optimizer.average()
        backward(optimizer, model, rank, t)
        if dies:
            die()
        optimizer.step()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*samples of this worker were never used")
        optimizer.finish()
    return flat(model).tolist()


# Limits of the links between host processes, in seconds, for tests that wait for them. One that has ended is missed
# at once; one that is silent may only have no processor, so it is waited for as long as a test can bear.
ENDED_SOON = {"REFUSED_S": 0.2}
SILENT_SOON = {"BEAT_S": 0.2, "SILENT_S": 2.0, "REDIAL_S": 2.0, "PROOF_S": 1.0, **ENDED_SOON}


def on_host_that_is_missed_soon(rank: int, layout: tuple[int, ...], limits: Mapping[str, float] = ENDED_SOON) -> None:
    """This process is a worker of its host in that layout, which is lost soon after its host process has ended."""
    on_host(layout[rank])
    os.environ[LINKS] = json.dumps(dict(limits))
    folder = Path(os.environ["JOB_FOLDER"])
    (folder / f"{rank}.writing").write_text(str(os.getpid()))
    (folder / f"{rank}.writing").rename(folder / f"{rank}.pid")


def host_pid() -> int:
    """Of this worker's host process."""
    (line,) = lines.values()
    return line.host_pid


def this_host_is_lost(layout: tuple[int, ...]) -> None:
    """All of its processes end, the host process before the workers: nobody can say anything any more."""
    folder, mine = Path(os.environ["JOB_FOLDER"]), layout[int(os.environ["RANK"])]
    pids = [int((folder / f"{rank}.pid").read_text()) for rank, host in enumerate(layout) if host == mine]
    for pid in (host_pid(), *(pid for pid in pids if pid != os.getpid()), os.getpid()):
        os.kill(pid, signal.SIGKILL)


def left_by_a_host(rank: int, method: str, moment: str, host: int, layout: tuple[int, ...]) -> list[float]:
    """A host is lost when its first worker comes to a moment; the weights that the others end with."""
    on_host_that_is_missed_soon(rank, layout)
    model = net()
    optimizer = ob.attach(sgd(model, momentum=0.0), model, METHODS[method], min_workers=1)
    last = 0 if moment == "before its first step" else LAST
    for t in range(STEPS):
        dies = rank == layout.index(host) and t == last
        if dies and moment != "inside a step":
            this_host_is_lost(layout)
        if t == LAST and moment == "in the middle of an average":
            optimizer.average()
        backward(optimizer, model, rank, t)
        if dies:
            this_host_is_lost(layout)
        optimizer.step()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*samples of this worker were never used")
        optimizer.finish()
    return flat(model).tolist()
