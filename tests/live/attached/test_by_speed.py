"""Steps in proportion to speed, between processes: who is slow is found out, given less to do, and not waited for."""

from __future__ import annotations

import time
from collections import deque

import pytest
import torch
from torch import nn

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job

pytestmark = pytest.mark.live

STEP_S, SLOWER, PERIOD = 0.02, 4, 8


def train(rank: int, strategy: ob.Strategy, seconds: float) -> tuple[int, float, list[int], list[float]]:
    """Steps, seconds of waiting, the plans that were reported, and the final weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.01), model, strategy)
    plans, steps, end_s = deque([PERIOD]), 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(STEP_S * (SLOWER if rank == 1 else 1))
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank + 1))).square().mean().backward()
        optimizer.step()
        steps += 1
        if (plan := optimizer.me.reported.period) is not None and plan != plans[-1]:
            plans.append(plan)
    waited_s = optimizer.wait_s
    optimizer.finish()
    return steps, waited_s, list(plans), nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("strategy", [ob.local_sgd(PERIOD, pace="speed"), ob.diloco(PERIOD, pace="speed")], ids=str)
def test_a_slow_worker_is_given_fewer_steps_and_the_others_go_on(strategy: ob.Strategy) -> None:
    (outcomes,) = forge.run([Job(train, 3, (strategy, 4.0))])
    told = forge.values(outcomes)
    first, slow, third = (steps for steps, _, _, _ in told)
    assert min(first, third) > 2 * slow, "at an equal pace all would have taken as many"
    plans = told[1][2][1:]
    assert min(plans) <= 3, "of 8 steps, a quarter"
    assert max(plans) < PERIOD, "more where the machine held up the others, but not as many as they"
    assert [weights for _, _, _, weights in told] == [told[0][3]] * 3


def ask_half_way(rank: int) -> list[str]:
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    said = []
    with ob.attach(inner, model, ob.local_sgd(2, pace="speed")) as optimizer:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        for ask in (optimizer.average, optimizer.state_dict):
            with pytest.raises(ob.OffbeatError) as error:
                ask()
            said.append(str(error.value))
    optimizer.state_dict()
    return said


def test_half_way_there_is_no_moment_to_average_or_to_save_and_it_is_said() -> None:
    (outcomes,) = forge.run([Job(ask_half_way, 2)])
    for average, state in forge.values(outcomes):
        assert "average() came in the middle of a run of local_sgd(period=2" in average
        assert "whose workers are between different averages; end the run with finish()" in average
        assert "state_dict() came in the middle" in state
