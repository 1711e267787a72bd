"""Workers that die in virtual time: the others go on, and what the dead had handed in counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.delays.faults import Faults, parse
from tests.support.methods import EVERY_KIND

P, STEPS, STEP_S = 4, 12, 0.1
METHODS = {name: method for name, method in EVERY_KIND.items() if "per_node=3" not in name}
SLOW = "1 rank 50ms"
FAULTS = ("rank 0 dies at 350ms", "rank 3 dies at 250ms + rank 1 dies at 610ms", "3 ranks die at 500ms")


@pytest.fixture(scope="module")
def task() -> ob.Task:
    return ob.tasks.digits()


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("name", METHODS)
def test_the_others_take_all_their_steps_and_end(task: ob.Task, name: str, faults: str) -> None:
    delays = ob.delays.parse(SLOW)
    run = ob.simulate(METHODS[name], task, P, STEPS, compute_s=STEP_S, delays=delays, faults=faults)
    dead = {rank for rank, _ in run.died}
    assert dead == set(parse(faults).deaths(P, 0))  # type: ignore[union-attr]
    assert all(run.gradients[rank] == STEPS for rank in range(P) if rank not in dead)
    assert all(run.gradients[rank] < STEPS for rank in dead)
    assert run.final.isfinite().all()
    assert run.final.norm() > 0


def ticks() -> ob.Task:
    """With SGD at rate 1, number r of the weights is the sum of what the gradients of rank r have counted."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(P, dtype=torch.float64))

        def forward(self, one: torch.Tensor) -> torch.Tensor:
            return one @ self.w

    return ob.Task(
        model=Model,
        loss=lambda output, _: -output.mean(),
        batch=lambda rank, step: (torch.eye(P, dtype=torch.float64)[rank : rank + 1], torch.zeros(1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )


@pytest.mark.parametrize("method", [ob.allreduce(), ob.eager(), ob.eager(late=1), ob.eager(wait="everyone")], ids=str)
def test_what_the_dead_one_had_handed_in_is_a_part_of_four_and_later_means_are_of_three(method: ob.Method) -> None:
    run = ob.simulate(method, ticks(), P, STEPS, compute_s=STEP_S, faults="rank 2 dies at 450ms")
    assert run.final[2] == pytest.approx(4 / P, abs=1e-12)
    for rank in (0, 1, 3):
        assert run.final[rank] + 1e-9 >= STEPS / P
        assert run.final[rank] <= STEPS / (P - 1) + 1e-9
    if "allreduce" in str(method):
        assert run.final[0] == pytest.approx(4 / P + (STEPS - 4) / (P - 1))


def test_shared_weights_of_pairs_go_on_without_one(task: ob.Task) -> None:
    run = ob.simulate(ob.ad_psgd(), task, P, STEPS, faults="rank 2 dies at 450ms")
    assert [rank for rank, _ in run.died] == [2]


def test_deaths_without_memory_are_drawn_from_the_seed_and_leave_one_alive() -> None:
    faults = parse("mtbf 100ms")
    assert faults is not None
    assert faults.deaths(P, 1) == faults.deaths(P, 1) != faults.deaths(P, 2)
    assert len(faults.deaths(P, 1)) == P - 1
    run = ob.simulate("eager", None, P, 200, faults="mtbf 2s", seed=3)
    assert len(run.died) == P - 1
    assert max(run.gradients) == 200


def test_a_thousand_workers_lose_a_tenth_of_them_and_the_rest_go_on() -> None:
    run = ob.simulate("self_clocked", None, 1024, 5, faults="100 ranks die at 250ms", rounds=False)
    assert len(run.died) == 100
    assert sum(taken == 5 for taken in run.gradients) == 924


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank 3 explodes", "not understood; use 'rank 3 dies at 40s'"),
        ("rank 3 dies at soon", "cannot be used"),
        ("rank 3 dies at 40s, back at 60s", "come back, which is not built"),
        ("rank 9 dies at 1s", "rank 9 cannot die among 4 workers; use 0 to 3"),
        ("4 ranks die at 1s", "all 4 workers die"),
        ("5 ranks die at 1s", "5 ranks cannot die where 4 are left"),
    ],
)
def test_faults_that_mean_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ob.simulate("eager", None, P, 3, faults=text)


def test_a_record_is_not_made_of_a_run_with_deaths(task: ob.Task, tmp_path: object) -> None:
    with pytest.raises(ValueError, match="cannot be replayed"):
        ob.simulate("eager", task, P, 3, faults="mtbf 1s", record=str(tmp_path))


def test_faults_say_what_they_were_told() -> None:
    text = "rank 3 dies at 40s + 2 ranks die at 1s + mtbf 5min"
    assert parse(str(parse(text))) == parse(text) == Faults(((3, 40.0),), ((2, 1.0),), 300.0)
    assert parse("none") is None
