"""A worker that is started again takes its dead predecessor's place, as the twin of a member between two steps.

Under ``offbeat launch --restarts`` it is another process of the same rank. Here a rank's process forks its first life,
which is killed, and goes on as the second.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, attempt
from tests.support.going_on import COUNTED, METHODS, SIZE, Ticks
from tests.support.nets import backward, flat, loss, net, sgd
from tests.support.two_lives import die, lives_twice

pytestmark = pytest.mark.live

LAST, MORE = 4, 6
WHO: tuple[tuple[int, ...], ...] = ((0,), (3,), (1, 2))


def until_they_are_back(rank: int, who: tuple[int, ...], within_s: float = 50.0) -> Iterator[int]:
    """The steps of one that stays: as long as somebody is away, and some more; of one that is back: those."""
    if rank in who:
        forge.say(f"{rank} is back")
    left, end_s = MORE, time.monotonic() + within_s
    for t in range(10**9):
        if all(forge.said(f"{one} is back") for one in who):
            left -= 1
        if left < 0:
            return
        if time.monotonic() > end_s:
            raise TimeoutError("somebody has not come back")
        time.sleep(0.001)
        yield t


def first_life(make: Callable[[], tuple[Any, nn.Module]], rank: int) -> Callable[[], None]:
    def live() -> None:
        optimizer, model = make()
        for t in range(LAST + 1):
            backward(optimizer, model, rank, t)
            if t == LAST:
                die()
            optimizer.step()

    return live


def digest(model: nn.Module, optimizer: Any) -> str:
    """Of the weights, and of what the optimizer remembers."""
    found = hashlib.sha256(flat(model).numpy().tobytes())
    for p in model.parameters():
        for name, value in sorted(optimizer.state.get(p, {}).items()):
            found.update(f"{name} {torch.as_tensor(value).tolist()}".encode())
    return found.hexdigest()


class Found:
    """What one worker has seen: the digests of its replica, the last one's weights, what is told of the others."""

    def __init__(self, digests: list[str], weights: list[float], members: tuple[int, ...], told: list[str]) -> None:
        self.digests, self.weights, self.members, self.told = digests, weights, members, told


def comes_back(rank: int, method: str, who: tuple[int, ...]) -> Found:
    def make() -> tuple[Any, nn.Module]:
        model = net()
        return ob.attach(sgd(model, momentum=0.5), model, METHODS[method], min_workers=1), model

    if rank in who:
        lives_twice(first_life(make, rank))
    optimizer, model = make()
    assert (optimizer.begun_at > 0) == (rank in who)
    digests = [digest(model, optimizer)]
    for t in until_they_are_back(rank, who):
        backward(optimizer, model, rank, t)
        optimizer.step()
        digests.append(digest(model, optimizer))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*samples of this worker were never used")
        optimizer.finish()
    told = [said for said in optimizer.summary().sentences if "was back" in said]
    return Found(digests, flat(model).tolist(), optimizer.members, told)


CASES = [(method, WHO[k % len(WHO)]) for k, method in enumerate(METHODS)]


@pytest.fixture(scope="module")
def ended() -> dict[Any, list[forge.Outcome]]:
    jobs = [Job(comes_back, SIZE, case, timeout_s=90) for case in CASES]
    return dict(zip(CASES, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1]}")
def test_those_that_come_back_begin_as_a_member_bit_for_bit_and_all_end_equal(ended: Any, case: Any) -> None:
    found, who = forge.values(ended[case]), case[1]
    for rank in who:
        assert any(found[rank].digests[0] in found[other].digests for other in range(SIZE) if other != rank)
    assert all(torch.tensor(one.weights).isfinite().all() for one in found)
    assert len({tuple(one.weights) for one in found}) == 1
    for rank, one in enumerate(found):
        assert one.members == tuple(range(SIZE))
        assert {said.split()[1] for said in one.told} >= {str(other) for other in who if rank not in who}


# What counts.


def counted(rank: int, method: str) -> list[float]:
    def make() -> tuple[Any, nn.Module]:
        model = Ticks()
        return ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, COUNTED[method], min_workers=1), model

    def first() -> None:
        optimizer, model = make()
        for _ in range(LAST):
            step(optimizer, model)
        die()

    def step(optimizer: Any, model: Any) -> None:
        optimizer.zero_grad()
        (-model.w[rank]).backward()
        optimizer.step()

    if rank == 2:
        lives_twice(first)
    optimizer, model = make()
    for _ in until_they_are_back(rank, (2,)):
        step(optimizer, model)
    optimizer.finish()
    return flat(model).tolist()


@pytest.mark.parametrize("method", [method for method in COUNTED if method != "msync"])
def test_every_gradient_of_both_lives_counts_once_and_is_a_part_of_four(method: str) -> None:
    (outcomes,) = forge.run([Job(counted, SIZE, (method,), timeout_s=90)])
    for weights in forge.values(outcomes):
        assert weights[2] == pytest.approx((LAST + MORE) / SIZE, abs=1e-12)


# Who does not come back.


def another_model(rank: int) -> str:
    def make(model: nn.Module) -> tuple[Any, nn.Module]:
        return ob.attach(sgd(model), model, ob.eager(), min_workers=1), model

    if rank == 1:
        lives_twice(first_life(lambda: make(net()), rank))
        error = attempt(lambda: make(nn.Linear(2, 2)))
        forge.say("1 is back")
        return error
    optimizer, model = make(net())
    for t in until_said("1 is back"):
        backward(optimizer, model, rank, t)
        optimizer.step()
    optimizer.finish()
    return ""


def until_said(event: str) -> Iterator[int]:
    t = 0
    while not forge.said(event):
        time.sleep(0.001)
        yield t
        t += 1


def too_late(rank: int) -> str:
    """The others have taken all their steps when it comes, and one of them still waits for another."""

    def make() -> tuple[Any, nn.Module]:
        model = net()
        return ob.attach(sgd(model), model, ob.eager(), min_workers=1), model

    if rank == 1:
        lives_twice(first_life(make, rank))
        forge.hear("over")
        time.sleep(1.0)
        return attempt(make)
    optimizer, model = make()
    for t in range(3 * LAST):
        backward(optimizer, model, rank, t)
        optimizer.step()
    optimizer.finish()
    forge.say("over")
    return ""


def own_collective(rank: int) -> str:
    def make() -> tuple[Any, nn.Module]:
        model = net()
        return ob.attach(sgd(model), model, ob.eager(), min_workers=1), model

    if rank == 1:
        lives_twice(first_life(make, rank))
    optimizer, model = make()
    error = attempt(lambda: dist.all_reduce(torch.ones(1))) if rank == 1 else ""
    for t in until_they_are_back(rank, (1,)):
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()
    return error


def needs_all(rank: int) -> str:
    def make() -> tuple[Any, nn.Module]:
        model = net()
        return ob.attach(sgd(model), model, ob.eager()), model

    if rank == 1:
        lives_twice(first_life(make, rank))
        return attempt(make)
    optimizer, model = make()

    def steps() -> None:
        for t in range(2000):
            backward(optimizer, model, rank, t)
            optimizer.step()
            time.sleep(0.002)

    return attempt(steps)


REFUSALS = {
    another_model: "the models differ: rank 0 has",
    too_late: "cannot come back: the others have ended",
    own_collective: "was called in a worker that has come back",
    needs_all: "",
}


@pytest.fixture(scope="module")
def refusals() -> dict[Any, list[forge.Outcome]]:
    jobs = [Job(one, SIZE, timeout_s=90) for one in REFUSALS]
    return dict(zip(REFUSALS, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("one", REFUSALS, ids=lambda one: one.__name__)
def test_what_cannot_be_is_refused_in_a_sentence_and_harms_nobody(refusals: Any, one: Any) -> None:
    found = forge.values(refusals[one])
    assert REFUSALS[one] in found[1]
    assert found[1]
    if one is needs_all:
        assert "rank 1 gives no sign of life" in found[0]
    else:
        assert [found[rank] for rank in (0, 2, 3)] == ["", "", ""]
