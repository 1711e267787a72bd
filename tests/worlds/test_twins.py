"""Both worlds run the same text: live weights equal simulated ones, to rounding, whatever the timing."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
from torch import Tensor

import offbeat as ob
from tests.support.in_step import DEPENDS_ON_TIMING, IN_STEP
from tests.support.scenarios import Call, Turns, in_turn, over

pytestmark = pytest.mark.live

STEPS = 12
# How many workers, whether some of their steps take longer, and which way their vectors go ("": whichever is best).
Run = tuple[int, bool, str]
RUNS: list[Run] = [(1, False, ""), (2, False, ""), (3, True, ""), (4, False, ""), (5, True, "")]
RUNS += [(2, False, "each"), (3, True, "each"), (4, True, "each"), (4, False, "hosts"), (5, True, "hosts")]


def task() -> ob.Task:
    return ob.tasks.digits(batch=8, hidden=12, momentum=0.9, lr=0.05, dtype=torch.float64)


def train(rank: int, name: str, pauses: bool) -> tuple[Tensor, Tensor]:
    """The weights after the last step, and after the end."""
    work = task()
    model = work.build(0)
    optimizer = ob.attach(work.optimizer(list(model.parameters())), model, IN_STEP[name], steps=STEPS, patience_s=120)
    for t in range(STEPS):
        if pauses:
            time.sleep(0.003 * ((rank * 7 + t * 5) % 4 == 0))
        optimizer.zero_grad()
        work.value(model, work.take(rank, t)).backward()
        optimizer.step()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer.finish()
    return before, torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def is_told_by_the_simulator(name: str, run: Run) -> bool:
    """Hosts of several ranks code what they have summed; in the simulator every worker is a host of its own."""
    return run[2] != "hosts" or IN_STEP[name].settings.get("codec") is None


@cache
def simulated(name: str, workers: int, hosts: int | None) -> ob.Run:
    return ob.simulate(IN_STEP[name], task(), workers=workers, steps=STEPS, network=ob.Network(hosts=hosts))


TABLE = [(name, run) for run in RUNS for name in IN_STEP if is_told_by_the_simulator(name, run)]
Ran = dict[Run, Turns[str]]


@pytest.fixture(scope="module")
def live() -> Ran:
    return {
        (size, pauses, way): in_turn(
            {name: Call(over, (way, train, name, pauses)) if way else Call(train, (name, pauses)) for name in IN_STEP},
            size,
            init=False,
        )
        for size, pauses, way in RUNS
    }


def test_every_strategy_that_does_not_depend_on_timing_is_in_the_table() -> None:
    assert {s.name for s in IN_STEP.values()} == set(ob.STRATEGIES) - DEPENDS_ON_TIMING  # those: test_replay_live


@pytest.mark.parametrize(("name", "run"), TABLE, ids=lambda one: "-".join(map(str, one)) if type(one) is tuple else one)
def test_live_weights_equal_simulated_ones(live: Ran, name: str, run: Run) -> None:
    there = simulated(name, run[0], None if run[2] else 1)
    before = torch.stack([before for before, _ in live[run][name]])
    after = torch.stack([after for _, after in live[run][name]])
    assert (before - there.weights).abs().max() < 1e-9
    assert (after - there.final).abs().max() < 1e-9


@pytest.mark.parametrize("name", IN_STEP)
def test_all_ranks_end_with_the_same_bits(live: Ran, name: str) -> None:
    for turns in live.values():
        everyone = turns[name]
        assert all(torch.equal(after, everyone[0][1]) for _, after in everyone)
