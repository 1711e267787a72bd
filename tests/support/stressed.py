"""A run of real processes that is drawn from a seed, and what one of its workers does."""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor, nn

import offbeat as ob
from offbeat.live.worker import start
from tests.support import forge
from tests.support.leftovers import held, host_pids
from tests.support.methods import a_method

PATIENCE_S = 60.0
FATES = {  # how often each of them is drawn
    "nothing happens": 6, "a rank stops": 4, "a host process stops": 2, "a rank is killed": 4,
    "a host process is killed": 2, "all are killed": 3, "a rank is killed, the others go on": 5,
}  # fmt: skip
GO_ON = "a rank is killed, the others go on"


@dataclass(frozen=True)
class Plan:
    strategy: ob.Strategy
    batches: tuple[int, ...]  # of each worker
    hosts: tuple[str, ...]  # the name of each worker's
    numbers: int
    pause_s: tuple[float, ...]  # a worker's, in a step, on average
    fate: str
    victim: int
    after_s: float
    early: bool  # counted from the start of its process, not of its first step
    stops_s: float
    spawned: bool  # host processes are started as for users, not forked
    whole_end: bool
    loops: int  # that are busy beside it

    def __str__(self) -> str:
        hosts = len(set(self.hosts))
        where = f"{len(self.batches)} workers on {hosts} host{'s' * (hosts > 1)}, {self.numbers} numbers"
        how = "" if self.fate == "nothing happens" else f" (rank {self.victim}, after {self.after_s:.2f} s)"
        return f"{self.strategy}, {where}, {self.loops} loops beside; {self.fate}{how}"


def drawn(number: int) -> Plan:
    draw = random.Random(number)
    workers = draw.randint(2, 6)
    plan = Plan(
        strategy=a_strategy(number, draw.choice(list(ob.STRATEGIES)), workers),
        batches=tuple(draw.choice([0, 5, 20, 20, 60]) for _ in range(workers)),
        hosts=draw.choice([("",) * workers, tuple(str(r * 2 // workers) for r in range(workers)),
                           tuple(str(r % 2) for r in range(workers))]),
        numbers=draw.choice([10, 1_000, 40_000, 400_000]),
        pause_s=tuple(draw.choice([0.0, 0.002, 0.02]) for _ in range(workers)),
        fate=draw.choices(list(FATES), list(FATES.values()))[0],
        victim=draw.randrange(workers),
        after_s=draw.choice([0.0, 0.1, 0.5, 1.0]) * draw.random(),
        early=draw.random() < 0.25,
        stops_s=draw.choice([0.1, 1.0, 3.0]),
        spawned=draw.random() < 0.3,
        whole_end=draw.random() < 0.3,
        loops=draw.choice([0, 0, 2, 6]),
    )  # fmt: skip
    if plan.fate == GO_ON:  # as far as that is built
        nodes = re.search(r"per_node=[^1]", str(plan.strategy)) is not None
        plan = replace(plan, early=False, fate="a rank is killed" if nodes else GO_ON)
    return plan


def a_strategy(number: int, name: str, workers: int) -> ob.Strategy:
    """Any settings. The first examples are the simplest ones, so the last one is taken."""
    found = list[ob.Strategy]()

    @seed(number)
    @settings(max_examples=6, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(a_method(name, workers))
    def look(strategy: ob.Strategy) -> None:
        found.append(strategy)

    look()
    return found[-1]


class Net(nn.Module):
    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.w, self.bias = nn.Parameter(torch.zeros(numbers, dtype=torch.float64)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.w.mean() - x) ** 2 + self.bias.square().sum()).mean()


def train(rank: int, plan: Plan, folder: str) -> Tensor:
    """A whole run; what is known of it on its way lies in ``folder``, in files named by what has happened."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(Path(folder, "temporary"))
    if plan.hosts[rank]:
        os.environ["OFFBEAT_HOST"] = plan.hosts[rank]
    if plan.spawned:
        start.spawn = start.spawn_python
    told(folder, f"begun-{rank}", os.getpid())
    model, late = Net(plan.numbers), random.Random(rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    least = 1 if plan.fate == GO_ON else None
    steps = max(plan.batches)
    optimizer = ob.attach(inner, model, plan.strategy, steps=steps, patience_s=PATIENCE_S, min_workers=least)
    forge.note(held())
    told(folder, f"attached-{rank}", *host_pids())
    data = [torch.full((4,), float(rank + t)) for t in range(plan.batches[rank])]
    cuts = plan.strategy.facts.cuts_batches
    for batch in optimizer.batches(data) if cuts else data:
        time.sleep(plan.pause_s[rank] * late.expovariate(1.0))
        optimizer.zero_grad()
        for piece in optimizer.micro_batches(batch) if cuts else (batch,):
            model(piece).backward()
        optimizer.step()
    optimizer.finish()
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def told(folder: str, name: str, *pids: int) -> None:
    """Whole, as soon as it is there."""
    new = Path(folder, f".{name}")
    new.write_text(" ".join(map(str, pids)))
    new.rename(Path(folder, name))


def heard(folder: str, name: str, over: Callable[[], Any]) -> list[int]:
    """The process ids that were told of, or none if all was ``over`` before."""
    while not (file := Path(folder, name)).exists():
        if over():
            return []
        time.sleep(0.002)
    return [int(pid) for pid in file.read_text().split()]
