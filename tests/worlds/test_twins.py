"""Both worlds run the same text: live weights equal simulated ones, to rounding, whatever the timing."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
from torch import Tensor

import offbeat as ob
from tests.support.in_step import DEPENDS_ON_TIMING, IN_STEP, task
from tests.support.long import every_or_in_turns
from tests.support.scenarios import Call, Turns, in_turn, over

pytestmark = pytest.mark.live

STEPS = 12
# How many workers, whether some of their steps take longer, and which way their vectors go ("": whichever is best).
Run = tuple[int, bool, str]
ON_ONE_HOST: list[Run] = [(2, False, ""), (3, True, ""), (5, True, ""), (4, False, ""), (1, False, "")]
EACH_ON_ITS_OWN: list[Run] = [(3, True, "each"), (4, True, "each"), (2, False, "each")]
ON_HOSTS: list[Run] = [(5, True, "hosts"), (4, False, "hosts")]


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


TABLE = every_or_in_turns(IN_STEP, ON_ONE_HOST, EACH_ON_ITS_OWN, ON_HOSTS)


@cache
def live(run: Run) -> Turns[str]:
    size, pauses, way = run
    calls = [(name, Call(over, (way, train, name, pauses)) if way else Call(train, (name, pauses))) for name in IN_STEP]
    return in_turn({name: call for name, call in calls if (name, run) in TABLE}, size, init=False)


def test_every_strategy_that_does_not_depend_on_timing_is_in_the_table() -> None:
    assert {s.name for s in IN_STEP.values()} == set(ob.STRATEGIES) - DEPENDS_ON_TIMING  # those: test_replay_live


def in_words(one: Run | str) -> str:
    return one if isinstance(one, str) else "-".join(map(str, one))


TOLD = [(name, run) for name, run in TABLE if is_told_by_the_simulator(name, run)]


@pytest.mark.parametrize(("name", "run"), TOLD, ids=in_words)
def test_live_weights_equal_simulated_ones(name: str, run: Run) -> None:
    there = simulated(name, run[0], None if run[2] else 1)
    before = torch.stack([before for before, _ in live(run)[name]])
    after = torch.stack([after for _, after in live(run)[name]])
    assert (before - there.weights).abs().max() < 1e-9
    assert (after - there.final).abs().max() < 1e-9


@pytest.mark.parametrize(("name", "run"), TABLE, ids=in_words)
def test_all_ranks_end_with_the_same_bits(name: str, run: Run) -> None:
    everyone = live(run)[name]
    assert all(torch.equal(after, everyone[0][1]) for _, after in everyone)
