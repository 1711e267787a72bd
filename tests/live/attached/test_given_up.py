"""A run that is given up leaves nothing in its process, however often, and whatever was under way; others can be begun.

Counted are descriptors and threads, those that Python does not know of, too, and memory that ranks share.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat as ob
from tests.support.scenarios import CARRIERS, Call, Turns, in_turn, over

pytestmark = pytest.mark.live

SIZE, TIMES = 4, 3
SOON_S, STEADY_S = 30.0, 0.5
METHODS = {
    "local_sgd": ob.local_sgd(2),
    "wagma, late": ob.wagma(late=1),
    "ad_psgd": ob.ad_psgd(),
    "self_clocked": ob.self_clocked(),
    "moments too": ob.self_clocked(moments=1),
}
WAYS = ("all at once", "one fails")


class Left(NamedTuple):
    descriptors: int
    threads: int
    shared_bytes: int

    def is_no_more_than(self, other: Left) -> bool:
        return all(mine <= its for mine, its in zip(self, other, strict=True))


def left(at_most: Left | None = None) -> Left:
    """What this process holds. An operation with others hears that they are gone one after the other, on a busy machine
    late: so until it is no more than that, or, where nothing is known, has stayed the same for a while."""
    end_s = time.monotonic() + SOON_S
    now, since_s = held(), time.monotonic()
    while time.monotonic() < end_s:
        if now.is_no_more_than(at_most) if at_most else time.monotonic() > since_s + STEADY_S:
            break
        time.sleep(0.02)
        before, now = now, held()
        since_s = since_s if now == before else time.monotonic()
    return now


def held() -> Left:
    with open("/proc/self/status") as status:
        shared = next(line for line in status if line.startswith("RssShmem:"))
    return Left(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), 1024 * int(shared.split()[1]))


def attached(method: ob.Strategy) -> tuple[nn.Module, ob.Attached]:
    torch.manual_seed(0)
    model = nn.Linear(300, 100)
    return model, ob.attach(torch.optim.SGD(model.parameters(), lr=0.01), model, method, patience_s=60.0)


def step(model: nn.Module, optimizer: ob.Attached) -> None:
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def given_up_and_begun_again(rank: int, way: str) -> tuple[list[Left], bool]:
    seen = list[Left]()
    for k in range(TIMES * len(METHODS)):
        give_up(rank, list(METHODS.values())[k % len(METHODS)], way)
        dist.barrier()
        if (k + 1) % len(METHODS) == 0:
            seen.append(left(at_most=seen[0] if seen else None))
    model, optimizer = attached(ob.local_sgd(2))  # and now one that ends well
    for _ in range(4):
        step(model, optimizer)
    optimizer.finish()
    whole = torch.cat([p.detach().view(-1) for p in model.parameters()])
    everyones = [torch.empty_like(whole) for _ in range(SIZE)]
    dist.all_gather(everyones, whole)
    return seen, all(torch.equal(one, whole) for one in everyones)


def give_up(rank: int, method: ob.Strategy, way: str) -> None:
    """After a few steps: all of them between two steps, or one, while the others are wherever they are."""
    model, optimizer = attached(method)
    try:
        with optimizer:
            for _ in range(3):
                step(model, optimizer)
            dist.barrier()
            while way == "one fails" and rank != 1:
                step(model, optimizer)
                time.sleep(0.001)
            raise ValueError("enough")
    except (ValueError, ob.PeerFailed):
        pass


@pytest.fixture(scope="module")
def ran() -> Turns[tuple[str, str]]:
    cases = [(carrier, way) for carrier in CARRIERS for way in WAYS]
    calls = {(carrier, way): Call(over, (carrier, given_up_and_begun_again, way)) for carrier, way in cases}
    return in_turn(calls, SIZE, timeout_s=400)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_runs_that_are_given_up_leave_no_descriptor_no_thread_and_no_memory(
    ran: Turns[tuple[str, str]], carrier: str, way: str
) -> None:
    for seen, _ in ran[carrier, way]:
        assert seen[-1].is_no_more_than(seen[0]), f"after 1 to {TIMES} runs of each method: {seen}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_after_them_another_run_ends_well(ran: Turns[tuple[str, str]], carrier: str, way: str) -> None:
    assert all(equal for _, equal in ran[carrier, way])
