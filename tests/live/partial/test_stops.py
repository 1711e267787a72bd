"""Averages in the middle of partial rounds, and checkpoints: nothing is lost, and nothing applied twice."""

from __future__ import annotations

import copy
import io
import random
import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import offbeat as ob
from tests.support.counted import AT_MOST, CASES, EAGER, Seen, Slots, counted, once_each
from tests.support.forge import attempt, hear, say
from tests.support.scenarios import Call, Turns, in_turn

pytestmark = pytest.mark.live

STOPPED = ("first", "majority", "two", "every step", "late", "bounded")
AVERAGED = [name for name in CASES if name not in ("half", "late quorum", "wagma, quorum")]
SUM_KEPT = [
    name
    for name in AVERAGED
    if CASES[name].name == "ad_psgd"
    or (CASES[name].name == "wagma" and (CASES[name].settings["late"] or CASES[name].settings["merge"] == "correct"))
]


def averaged(rank: int, size: int, name: str) -> Seen:
    """Two averages, at everybody's own steps 2 and 5; rank 0 is slow, and the last has nothing to do from the start."""
    slow = 0.02 if rank == 0 else 0.0
    return counted(rank, size, CASES[name], (*[7] * (size - 1), 0), lambda _: slow, average_at=(2, 5))


OWED = ("first", "every step")  # here nobody waits for rank 0 in the last step before the stop


@dataclass
class Stopped:
    """What one rank saw of a run with a stop in the middle."""

    final: Tensor
    owed: bool
    said: str  # when a state was loaded too late


def resumed(rank: int, size: int, name: str) -> Stopped:
    """The counting model with a stop in the middle: what is owed then travels in the state.

    In the cases ``OWED`` rank 0 takes its last step before the stop when the others have taken theirs, each of them
    since rank 0 has begun it: a round has gone by, and there is none to come.
    """
    lateness, saved, said = random.Random(f"{name} {rank}"), None, ""
    model = Slots(size * AT_MOST)
    for begin, end in ((0, 6), (6, 12 + rank)):
        before, model = model, Slots(size * AT_MOST)
        optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, CASES[name], patience_s=120)
        if saved is not None:
            model.load_state_dict(before.state_dict())
            optimizer.load_state_dict(saved)
        for step in range(begin, end):
            time.sleep(lateness.choice((0.0, 0.004)))
            last = saved is None and step == end - 1 and name in OWED
            if last and rank == 0:
                say(f"{name}: begun")
                for other in range(1, size):
                    hear(f"{name}: {other} through")
            elif last:
                hear(f"{name}: begun")
            optimizer.zero_grad()
            model.loss(rank, step).backward()
            optimizer.step()
            if last:
                say(f"{name}: {rank} through")
        if saved is None:
            optimizer.average()
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            stopped, steps = copy.deepcopy(model), (saved["offbeat"]["step"], optimizer.me.t)
            said = attempt(lambda: optimizer.load_state_dict(saved))  # noqa: B023  # called at once
            assert steps == (saved["offbeat"]["step"], optimizer.me.t)
        optimizer.finish()
        if begin == 0:
            model = stopped
    assert saved is not None
    return Stopped(model.w.detach().clone(), saved["offbeat"]["owed"] is not None, said)


@pytest.fixture(scope="module")
def averages() -> Turns[str]:
    return in_turn({name: Call(averaged, (4, name)) for name in AVERAGED}, 4, init=False)


@pytest.fixture(scope="module")
def stops() -> Turns[str]:
    return in_turn({name: Call(resumed, (3, name)) for name in STOPPED}, 3, init=False)


@pytest.mark.parametrize("name", AVERAGED)
def test_replicas_are_equal_after_an_average_though_one_is_slow_and_one_has_finished(
    averages: Turns[str], name: str
) -> None:
    outs: list[Seen] = averages[name]
    assert [len(out.averages) for out in outs] == [2, 2, 2, 0]
    for number in (0, 1):
        assert all(torch.equal(out.averages[number], outs[0].averages[number]) for out in outs[:3])
    assert all(torch.equal(out.final, outs[0].final) for out in outs)


@pytest.mark.parametrize("name", [name for name in AVERAGED if name in EAGER or name in SUM_KEPT])
def test_an_average_in_the_middle_loses_nothing(averages: Turns[str], name: str) -> None:
    for out in averages[name]:
        assert torch.allclose(out.final * 4, once_each((7, 7, 7, 0)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", STOPPED)
def test_nothing_is_lost_or_applied_twice_across_a_stop(stops: Turns[str], name: str) -> None:
    for out in stops[name]:
        assert torch.allclose(out.final * 3, once_each((12, 13, 14)), rtol=0, atol=1e-12)


def test_gradients_that_were_owed_at_the_stop_travel_in_the_state(stops: Turns[str]) -> None:
    """In one case at least: where both others lack a round that rank 0 has seen, rank 0 is in time after all."""
    assert any(stops[name][0].owed for name in OWED)


def test_a_state_is_refused_after_the_first_step(stops: Turns[str]) -> None:
    for name in STOPPED:
        assert all("load_state_dict() came after the first step" in out.said for out in stops[name])
