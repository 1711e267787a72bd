"""A worker that is stopped for many rounds of ``eager`` costs a bounded number of copies, and goes on as all others."""

from __future__ import annotations

import dataclasses
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat as ob
from offbeat.live.attached.twin import ReplicaTwin
from offbeat.live.host.channel_server import VECTORS
from offbeat.method import Replica
from offbeat.rounds.spares import MANY, MORE
from tests.support.forge import hear, say
from tests.support.long import every_or_in_turns
from tests.support.scenarios import Call, Turns, in_turn

pytestmark = pytest.mark.live


class Own(torch.optim.SGD):
    """Somebody's own, of which nobody knows where it keeps what it remembers."""


SIZE, BEFORE, MEANWHILE, AFTER = 3, 5, 300, 12
METHODS = {"eager": ob.eager(sync_every=None), "late": ob.eager(sync_every=None, late=1)}
Inner = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
OPTIMISERS: dict[str, Inner] = {
    "counting": lambda ps: torch.optim.SGD(ps, lr=1.0),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, weight_decay=0.01),
    "own": lambda ps: Own(ps, lr=0.01, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
}
NUMBERS = 40_000  # sums of so many are made beside the host process's loop
COPY_BYTES = NUMBERS * 8
Case = tuple[str, str, int]
CASES: list[Case] = [(*case, who) for case, who in every_or_in_turns(product(METHODS, OPTIMISERS), (0, 2))]
TAKEN_OVER = [case for case in CASES if case[1] != "own"]


class Net(nn.Module):
    """Enough numbers to be counted in pages, one parameter that comes into use late, and one that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMBERS, dtype=torch.float64))
        self.late = nn.Parameter(torch.zeros(3, 2).t())
        self.never = nn.Parameter(torch.ones(4))

    def forward(self, rank: int, step: int) -> Tensor:
        grows = -self.w.sum()
        return grows if step < BEFORE + 3 else grows + ((rank + 1) * step * self.late.sin()).sum()


@dataclasses.dataclass
class Seen:
    """One worker's replica when its strategy was through, and what was counted."""

    replica: list[Tensor]
    steps: int
    taken_over: int
    grown_bytes: int


def shared_bytes() -> int:
    """Of the memory that processes share, what this one has touched."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem"))


def watched(strategy: ob.Strategy, weights: list[Tensor]) -> ob.Strategy:
    """The same, but the weights are kept that it ends with, before all are made equal."""

    async def body(me: Replica) -> None:
        await strategy.body(me)
        weights.extend(part.clone() for part in me.x.parts)

    return dataclasses.replace(strategy, body=body)


def remembered(inner: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in inner.param_groups:
        for p in group["params"]:
            for name, value in sorted(inner.state.get(p, {}).items()):
                yield torch.tensor(list(name.encode()))
                yield torch.as_tensor(float("nan") if value is None else value).clone()


def slept(rank: int, method: str, optimiser: str, victim: int) -> Seen:
    """The victim is stopped after some steps, and let go on when the others have taken many more."""
    model, weights, steps, taken_over = Net(), list[Tensor](), 0, 0
    inner = OPTIMISERS[optimiser](model.parameters())
    everyones: list[int] = [0] * SIZE
    dist.all_gather_object(everyones, os.getpid())
    key = f"{method} {optimiser} {victim}"

    take_over = ReplicaTwin.take_over

    def counted(*args: object) -> None:
        nonlocal taken_over
        taken_over += 1
        take_over(*args)  # type: ignore[arg-type]

    patch = pytest.MonkeyPatch()
    patch.setattr(ReplicaTwin, "take_over", counted)
    with warnings.catch_warnings():  # AdamW, and gradients that are late
        warnings.filterwarnings("ignore", "eager applies gradients that are a step old")
        optimizer = ob.attach(inner, model, watched(METHODS[method], weights), patience_s=120)

    def step() -> None:
        nonlocal steps
        optimizer.zero_grad()
        model(rank, steps).backward()
        optimizer.step()
        steps += 1

    for _ in range(BEFORE):
        step()
    dist.barrier()
    before = shared_bytes()
    if rank == victim:
        say(f"{key} stops")
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        hear(f"{key} stops")
        for _ in range(MEANWHILE):
            step()
        say(f"{key} {rank} has gone on")
        for other in {0, 1, 2} - {victim}:
            hear(f"{key} {other} has gone on")
    grown = shared_bytes() - before
    if rank == (victim + 1) % SIZE:
        os.kill(everyones[victim], signal.SIGCONT)
    for _ in range(AFTER):
        step()
    optimizer.finish()
    patch.undo()
    total = torch.tensor([steps])
    dist.all_reduce(total)
    return Seen([*weights, *remembered(inner)], int(total), taken_over, grown)


@pytest.fixture(scope="module")
def ran() -> Turns[Case]:
    return in_turn({case: Call(slept, case) for case in CASES}, SIZE, timeout_s=300)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_a_worker_that_was_stopped_ends_with_the_others_bits(ran: Turns[Case], case: Case) -> None:
    everyone: list[Seen] = ran[case]
    for seen in everyone:
        assert len(seen.replica) == len(everyone[0].replica)
        assert all(torch.equal(a, b) for a, b in zip(seen.replica, everyone[0].replica, strict=True))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[1] == "counting"], ids=lambda case: " ".join(map(str, case))
)
def test_what_it_gave_and_what_it_missed_is_applied_once(ran: Turns[Case], case: Case) -> None:
    for seen in ran[case]:
        assert seen.replica[0][0].item() * SIZE == pytest.approx(seen.steps, abs=1e-9)


@pytest.mark.parametrize("case", TAKEN_OVER, ids=lambda case: " ".join(map(str, case)))
def test_what_waits_for_it_is_bounded_since_it_takes_over_a_replica(ran: Turns[Case], case: Case) -> None:
    everyone: list[Seen] = ran[case]
    assert everyone[case[2]].taken_over >= 1
    # What docs/attach.md says: so many wait, as many are read; and replicas, one of each worker and one that is read.
    waiting = MANY + MORE + SIZE + (MANY if case[0] == "late" else 0)
    bound = 2 * waiting + (1 + SIZE) * VECTORS
    assert max(seen.grown_bytes for seen in everyone) < bound * COPY_BYTES < MEANWHILE * COPY_BYTES / 4


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[1] == "own"], ids=lambda case: " ".join(map(str, case))
)
def test_beside_an_optimiser_that_is_not_torchs_every_result_is_kept_and_applied(ran: Turns[Case], case: Case) -> None:
    assert [seen.taken_over for seen in ran[case]] == [0] * SIZE
