"""Whoever has ended its training rightly leaves with exit code 0, whatever its script did last.

Every worker here is a whole process down to the end of its interpreter, and holds the interpreter lock from its last
line on: a thread that still wants it is then caught waiting, which is else a matter of luck on a busy machine.
``make long`` runs hundreds of them, beside three busy loops for each core.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat as ob
from tests.support import forge
from tests.support.busy import busy
from tests.support.forge import Job, Outcome
from tests.support.long import LONG, unless_long

pytestmark = pytest.mark.live

HELD_US = 200_000
SIZE = unless_long(2, 3)
METHODS = ("local_sgd", "eager", "allreduce", "ad_psgd", "nonblocking")
LAST = ("finish", "reduce", "objects")
GROUPS = ("ours", "destroyed", "forgotten", "kept")
Ending = tuple[str, str, str]
STILL_LETTING_GO: list[Ending] = [("local_sgd", "forgotten", "many"), ("local_sgd", "kept", "many")]
# An ending: the method, who makes and ends the default group, the script's last act.


def train(rank: int, name: str) -> None:
    """Uneven data, and an average in the middle."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    strategy = ob.local_sgd(period=3) if name == "local_sgd" else getattr(ob, name)()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with ob.attach(inner, model, strategy) as optimizer:
        data = [torch.ones(4, 3)] * (4 + rank)
        cuts = name == "nonblocking"
        for t, x in enumerate(optimizer.batches(data) if cuts else data):
            for piece in optimizer.micro_batches(x) if cuts else (x,):
                model(piece).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if t == 2:
                optimizer.average()


def end(rank: int, name: str, group: str, last: str) -> None:
    atexit._clear()  # what runs after our usleep could give the lock away
    atexit.register(ctypes.PyDLL(None).usleep, HELD_US)
    if group != "ours":
        dist.init_process_group("gloo")
    if group == "kept":
        globals()["variable"] = dist.new_group()  # outlives the group's end
    train(rank, name)
    own = globals().get("variable")
    if last == "reduce":
        dist.all_reduce(torch.ones(3), group=own)
    elif last == "objects":
        dist.all_gather_object([None] * SIZE, {"rank": rank}, group=own)
    elif last == "many":  # of which Gloo's thread lets go one by one
        tensors = [torch.ones(1) for _ in range(20_000)]
        (own or dist.distributed_c10d._get_default_group()).allreduce_coalesced(tensors).wait()
    if group in ("destroyed", "kept"):
        dist.destroy_process_group()


def chosen() -> list[Ending]:
    every = [*itertools.product(METHODS, GROUPS[1:], LAST), *((name, "ours", "finish") for name in METHODS)]
    if LONG:
        return every * 7
    return [(name, "forgotten", "reduce") for name in METHODS] + [("local_sgd", group, "finish") for group in GROUPS]


def run(endings: list[Ending]) -> list[tuple[Ending, list[Outcome]]]:
    jobs = [Job(end, SIZE, one, timeout_s=120, rank_0_hosts=True, whole_end=True) for one in endings]
    return list(zip(endings, forge.run(jobs), strict=True))


def failures(ended: list[tuple[Ending, list[Outcome]]]) -> list[str]:
    return [
        f"{', '.join(ending)}, rank {rank}: exit code {outcome.exit_code}: {outcome.error}"
        for ending, outcomes in ended
        for rank, outcome in enumerate(outcomes)
        if (outcome.returned, outcome.exit_code) != (True, 0)
    ]


@pytest.fixture(scope="module")
def ended() -> list[tuple[Ending, list[Outcome]]]:
    with busy(3 * (os.cpu_count() or 1) if LONG else 0):
        return run(STILL_LETTING_GO + chosen())


def test_a_gloo_thread_that_is_still_letting_go_of_tensors_does_not_abort_the_process(
    ended: list[tuple[Ending, list[Outcome]]],
) -> None:
    assert failures(ended[: len(STILL_LETTING_GO)]) == []


def test_every_ending_is_clean(ended: list[tuple[Ending, list[Outcome]]]) -> None:
    assert failures(ended[len(STILL_LETTING_GO) :]) == []
