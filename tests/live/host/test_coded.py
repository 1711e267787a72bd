"""What leaves a host is coded by the host processes: as in the simulator where each worker has a host of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import offbeat as ob
from offbeat.live.carriers.group import Group
from tests.support.in_step import IN_STEP
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

STEPS, SIZE = 6, 3
CODED = {name: one for name, one in IN_STEP.items() if one.settings.get("codec") is not None or one.name == "qsgd"}
ROUNDS = {
    "wagma": ob.wagma(3, 1, "everyone", codec=ob.codec.int8(bucket=7)),
    "wagma, correct": ob.wagma(3, 1, "everyone", merge="correct", codec=ob.codec.qsgd(8)),
    "wagma in pairs": ob.wagma(2, 2, "everyone", codec=ob.codec.int8(bucket=7)),
    "eager": ob.eager("everyone", sync_every=1, codec=ob.codec.int8(bucket=7)),
    "eager, one bucket": ob.eager("everyone", sync_every=1, codec=ob.codec.qsgd(4, bucket=100_000)),
    "self_clocked": ob.self_clocked(group=None, wait="everyone", late=0, codec=ob.codec.int8(bucket=7)),
}
METHODS = {**CODED, **ROUNDS}
OF_GRADIENTS, PARAMETERS = ("qsgd", "allreduce"), 4  # with which goes who has one, and of which parameters
Ran = dict[str, tuple[Tensor, int]]


def task() -> ob.Task:
    return ob.tasks.digits(batch=8, hidden=12, momentum=0.9, lr=0.05, dtype=torch.float64)


def train(rank: int, strategy: ob.Strategy) -> tuple[Tensor, int]:
    """The weights after the last step, and the bytes that were sent until then."""
    work = task()
    model = work.build(0)
    optimizer = ob.attach(work.optimizer(list(model.parameters())), model, strategy, steps=STEPS, patience_s=60)
    for t in range(STEPS):
        optimizer.zero_grad()
        work.value(model, work.take(rank, t)).backward()
        optimizer.step()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone(), optimizer.wire_bytes
    optimizer.finish()
    return before


def no_group(*args: object) -> None:
    raise AssertionError("a Gloo group is made")


def all_of(rank: int, host: int) -> Ran:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFBEAT_HOST", f"host {host}")
        patch.setattr(Group, "__init__", no_group)
        return {name: train(rank, strategy) for name, strategy in METHODS.items()}


@scenario(SIZE)
def each_on_its_own(rank: int) -> Ran:
    return all_of(rank, rank)


@scenario(4)
def in_pairs(rank: int) -> Ran:
    return all_of(rank, rank // 2)


@pytest.mark.parametrize("name", METHODS)
def test_coded_by_hosts_of_one_rank_all_is_as_in_the_simulator(told: Told, name: str) -> None:
    there = ob.simulate(METHODS[name], task(), SIZE, STEPS)
    here = told(each_on_its_own)
    for rank, ran in enumerate(here):
        assert (ran[name][0] - there.weights[rank]).abs().max() < 1e-9
    headers = SIZE * (SIZE - 1) * STEPS * (1 + PARAMETERS) if METHODS[name].name in OF_GRADIENTS else 0
    assert sum(ran[name][1] for ran in here) == there.wire_bytes + headers


@pytest.mark.parametrize("name", METHODS)
def test_coded_by_hosts_of_two_ranks_all_go_on_near_the_simulator(told: Told, name: str) -> None:
    there = ob.simulate(METHODS[name], task(), 4, STEPS)
    for rank, ran in enumerate(told(in_pairs)):
        assert (ran[name][0] - there.weights[rank]).abs().max() < 0.1
