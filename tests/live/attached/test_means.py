"""``optimizer.mean``: what all workers have measured, though they take unequal steps, end, die and come back."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, attempt
from tests.support.going_on import METHODS, SIZE
from tests.support.nets import backward, end, net, sgd
from tests.support.two_lives import die, lives_twice

pytestmark = pytest.mark.live

EPOCHS, WHO = 3, 2


def epochs(rank: int, method: str, dies: int) -> list[list[float]]:
    """Each worker takes other numbers of steps in an epoch; ``dies``: in which one of them dies, or −1 none."""
    model = net()
    optimizer = ob.attach(sgd(model), model, METHODS[method], min_workers=1)
    found, t = [], 0
    for epoch in range(EPOCHS):
        for _ in range(2 + (rank + epoch) % 3):
            backward(optimizer, model, rank, t)
            if rank == WHO and epoch == dies:
                die()
            optimizer.step()
            t += 1
        found.append(optimizer.mean(torch.tensor([float(rank), 10.0 * epoch])).tolist())
    end(optimizer)
    return found


CASES = [(method, dies) for k, method in enumerate(METHODS) for dies in ((-1, k % EPOCHS))]


@pytest.fixture(scope="module")
def ended() -> dict[Any, list[forge.Outcome]]:
    jobs = [Job(epochs, SIZE, case, timeout_s=90) for case in CASES]
    return dict(zip(CASES, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1]}")
def test_it_is_that_of_all_who_are_there_and_the_same_on_each(ended: Any, case: tuple[str, int]) -> None:
    dies = case[1]
    living = [outcome for rank, outcome in enumerate(ended[case]) if dies < 0 or rank != WHO]
    everyone, others = sum(range(SIZE)) / SIZE, (sum(range(SIZE)) - WHO) / (SIZE - 1)
    wanted = [[everyone if dies < 0 or epoch < dies else others, 10.0 * epoch] for epoch in range(EPOCHS)]
    for found in forge.values(living):
        for one, expected in zip(found, wanted, strict=True):
            assert one == pytest.approx(expected)
        assert found == forge.values(living)[0]


def ends_sooner(rank: int, method: str) -> list[float]:
    model = net()
    optimizer = ob.attach(sgd(model), model, METHODS[method])
    found = []
    for epoch in range(1 if rank == WHO else EPOCHS):
        backward(optimizer, model, rank, epoch)
        optimizer.step()
        found.append(optimizer.mean(float(rank)))
    end(optimizer)
    return found


@pytest.mark.parametrize("method", ["allreduce()", "self_clocked, moments", "nonblocking by a ring"])
def test_whoever_has_finished_has_no_part_in_it(method: str) -> None:
    found = forge.values(forge.run([Job(ends_sooner, SIZE, (method,), timeout_s=90)])[0])
    others = (sum(range(SIZE)) - WHO) / (SIZE - 1)
    assert found[WHO] == [1.5]
    assert found[0] == found[1] == found[3] == pytest.approx([1.5, others, others])


def comes_back(rank: int, method: str) -> list[list[float]]:
    def make() -> tuple[Any, nn.Module]:
        model = net()
        return ob.attach(sgd(model), model, METHODS[method], min_workers=1), model

    def step(optimizer: Any, model: nn.Module) -> list[float]:
        backward(optimizer, model, rank, optimizer.me.t)
        optimizer.step()
        found = optimizer.mean(torch.tensor([1.0 * rank, optimizer.me.t]))
        time.sleep(0.002)
        return found.tolist()

    def first() -> None:
        optimizer, model = make()
        for _ in range(3):
            step(optimizer, model)
        die()

    if rank == WHO:
        lives_twice(first)
    optimizer, model = make()
    if rank == WHO:
        forge.say("it is back")
    found, left = [], 5
    while left:
        left -= forge.said("it is back")
        found.append(step(optimizer, model))
    end(optimizer)
    return found


@pytest.mark.parametrize("method", ["allreduce()", "self_clocked, moments"])
def test_whoever_comes_back_has_a_part_in_the_means_that_follow(method: str) -> None:
    found = forge.values(forge.run([Job(comes_back, SIZE, (method,), timeout_s=90)])[0])
    of_last = [tuple(one[-1]) for one in found]
    assert any(one[-3][0] == pytest.approx(1.5) for one in found), of_last
    back, others = found[WHO], [entry for rank, one in enumerate(found) if rank != WHO for entry in one]
    assert all(entry in others for entry in back[:-1]), (back, others)


def odd(rank: int) -> list[Any]:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.eager())
    told = [
        attempt(lambda: optimizer.mean(torch.zeros(5000))),
        optimizer.mean(2 * rank + 1),
        optimizer.mean(torch.tensor(rank)).dtype,
        optimizer.mean(torch.full((2, 2), float(rank), dtype=torch.float64)).tolist(),
    ]
    backward(optimizer, model, rank, 0)
    told.append(attempt(lambda: optimizer.mean(1.0)))
    optimizer.step()
    optimizer.finish()
    told.append(attempt(lambda: optimizer.mean(1.0)))
    return told


@pytest.mark.parametrize("size", [1, 2])
def test_it_takes_numbers_and_small_tensors_between_two_steps_of_a_run(size: int) -> None:
    for found in forge.values(forge.run([Job(odd, size)])[0]):
        assert "mean() was given 5000 numbers; give it at most 4096" in found[0]
        assert found[1] == size
        assert found[2] == torch.float32
        assert found[3] == [[(size - 1) / 2] * 2] * 2
        assert "mean() came between backward() and step(); call it after the step" in found[4]
        assert "mean() came after the run was ended" in found[5]


def unequal(rank: int) -> str:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.eager())
    told = attempt(lambda: optimizer.mean(torch.zeros(2 + rank)))
    end(optimizer)
    return told


def test_whoever_gives_another_number_of_numbers_is_named_on_all() -> None:
    for found in forge.values(forge.run([Job(unequal, 2)])[0]):
        assert "mean() was given 2 numbers on rank 0 and 3 on rank 1; give equally many" in found
