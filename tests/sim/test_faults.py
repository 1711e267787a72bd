"""Workers that die in virtual time: the others go on, what the dead had handed in counts, and who comes back trains
with the others again.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.delays.faults import Death, Faults, Parting, parse
from offbeat.runs.absences import Absence, told
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
    assert dead == {event.rank for event in parse(faults).events(P, 0)}  # type: ignore[union-attr]
    assert all(run.gradients[rank] == STEPS for rank in range(P) if rank not in dead)
    assert all(run.gradients[rank] < STEPS for rank in dead)
    assert run.final.isfinite().all()
    assert run.final.norm() > 0


def ticks(workers: int = P) -> ob.Task:
    """With SGD at rate 1, number r of the weights is the sum of what the gradients of rank r have counted."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(workers, dtype=torch.float64))

        def forward(self, one: torch.Tensor) -> torch.Tensor:
            return one @ self.w

    return ob.Task(
        model=Model,
        loss=lambda output, _: -output.mean(),
        batch=lambda rank, step: (torch.eye(workers, dtype=torch.float64)[rank : rank + 1], torch.zeros(1)),
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
    assert list(faults.events(P, 1)) == list(faults.events(P, 1)) != list(faults.events(P, 2))
    assert len(list(faults.events(P, 1))) == P - 1
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
        ("rank 3 dies at 40s, back at 30s", "come back before it has died"),
        ("rank 3 dies at 40s, back soon", "not understood"),
        ("mtbf 40s, back at 60s", "not understood"),
        ("2 ranks die at 1s, back at 2s + 2 ranks die at 1500ms, back at 3s", "all 4 workers die"),
        ("host 4 dies at 1s", "host 4 cannot fail among 4 hosts; use 0 to 3"),
        ("hosts 0 and 9 part at 1s, for 1s", "host 9 cannot fail among 4 hosts"),
        ("hosts 0,1 and 1,2 part at 1s, for 1s", "host 1 cannot part from itself"),
        ("hosts 0 and 1 part at 1s", "not understood"),
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
    assert parse(str(parse(text))) == parse(text) == Faults((Death(3, 40.0),), (Death(2, 1.0),), 300.0)
    text = "rank 3 dies at 40s, back at 60s + 2 ranks die at 1s, back after 500ms + mtbf 5min, back after 30s"
    wanted = Faults((Death(3, 40.0, 20.0),), (Death(2, 1.0, 0.5),), 300.0, 30.0)
    assert parse(str(parse(text))) == parse(text) == wanted
    text = "host 1 dies at 40s, back after 20s + hosts 0,2 and 1 part at 1min, for 20s"
    wanted = Faults(hosts=(Death(1, 40.0, 20.0),), parts=(Parting((0, 2), (1,), 60.0, 20.0),))
    assert parse(str(parse(text))) == parse(text) == wanted
    assert parse("none") is None


# Hosts: of 8 workers on 3 hosts 0 to 2, 3 to 5, and 6 and 7.


@pytest.mark.parametrize(
    ("faults", "gone"),
    [
        ("host 2 dies at 250ms", [6, 7]),
        ("host 0 dies at 250ms", [0, 1, 2]),
        ("hosts 0 and 1 part at 250ms, for 300ms", [3, 4, 5]),
        ("hosts 0 and 1,2 part at 250ms, for 300ms", [0, 1, 2]),
        ("host 0 dies at 100ms + hosts 1 and 2,0 part at 250ms, for 300ms", [0, 1, 2, 6, 7]),
    ],
)
def test_a_host_dies_with_its_workers_and_of_hosts_that_part_one_side_goes_on(faults: str, gone: list[int]) -> None:
    run = ob.simulate("eager", ticks(8), 8, STEPS, compute_s=STEP_S, faults=faults, network=ob.Network(hosts=3))
    assert sorted(one.rank for one in run.absences) == gone
    for one in run.absences:
        assert one.cut == ("part" in faults and one.died_s == pytest.approx(0.25))
        assert (one.back_s is not None and one.back_s >= 0.55) == one.cut
    assert all(taken == STEPS for rank, taken in enumerate(run.gradients) if rank not in gone)


def test_who_would_come_back_to_a_host_that_hears_nobody_comes_when_it_does() -> None:
    faults = "hosts 0 and 1 part at 300ms, for 500ms + rank 3 dies at 250ms, back at 400ms"
    run = ob.simulate("eager", None, P, STEPS, compute_s=STEP_S, faults=faults, network=ob.Network(hosts=2))
    assert [(one.rank, one.cut) for one in run.absences] == [(3, False), (2, True)]
    assert all(one.back_s is not None and one.back_s >= 0.8 for one in run.absences)


# Coming back.

RETURNS = ("rank 0 dies at 350ms, back at 650ms", "2 ranks die at 250ms, back after 200ms + rank 1 dies at 900ms")


@pytest.mark.parametrize("faults", RETURNS)
@pytest.mark.parametrize("name", METHODS)
def test_who_comes_back_takes_part_again_and_the_others_do_not_notice(task: ob.Task, name: str, faults: str) -> None:
    delays = ob.delays.parse(SLOW)
    run = ob.simulate(METHODS[name], task, P, STEPS, compute_s=STEP_S, delays=delays, faults=faults)
    back = [(rank, died_s, back_s) for rank, died_s, back_s, *_ in run.absences if back_s is not None]
    assert len(back) == (1 if "rank 0" in faults else 2)
    for rank, died_s, back_s in back:
        assert died_s + 0.2 <= back_s < died_s + 0.3 + 3 * STEP_S
        if rank not in dict(run.died):
            assert died_s / (STEP_S * 1.5) - 1 <= run.gradients[rank] < STEPS
    assert all(run.gradients[rank] == STEPS for rank in range(P) if rank not in {one.rank for one in run.absences})
    assert run.final.isfinite().all()


MANY, MANY_STEPS = 16, 12


@pytest.mark.parametrize(
    "method",
    [
        ob.allreduce(),
        ob.eager(),
        ob.eager(late=1),
        ob.eager("everyone"),
        ob.eager("majority", grace=0.0),
        ob.ringmaster(),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_each_gradient_counts_once_through_deaths_and_returns(method: ob.Method, seed: int) -> None:
    """A part of all who live then: 1/16, or 1/15 while one is dead. What was being computed is lost."""
    faults = "1 rank dies at 350ms, back after 210ms"
    delays = ob.delays.parse("3 ranks 20ms") if seed else None
    run = ob.simulate(method, ticks(MANY), MANY, MANY_STEPS, compute_s=STEP_S, delays=delays, faults=faults, seed=seed)
    (absence,) = run.absences
    assert absence.back_s is not None
    for rank, taken in enumerate(run.gradients):
        least = taken - (rank == absence.rank)
        lost = sum(one == rank for one, _ in run.lost)
        assert (least - lost) / MANY - 1e-9 <= run.final[rank] <= taken / (MANY - 1) + 1e-9


@pytest.mark.parametrize("method", [ob.allreduce(), ob.nonblocking(), ob.qsgd()], ids=str)
def test_after_a_return_all_replicas_are_equal_in_step(task: ob.Task, method: ob.Method) -> None:
    run = ob.simulate(method, task, P, STEPS, faults="rank 3 dies at 350ms, back at 600ms", spans=True)
    assert run.trace.series["spread"][-1].value == 0.0
    assert any(point.value > 0.0 for point in run.trace.series["spread"]), "while it was dead"


def test_who_comes_back_has_the_learning_rate_and_the_moments_of_a_member() -> None:
    def decays(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    plain = ticks(P)
    task = ob.Task(
        model=plain.model,
        loss=plain.loss,
        batch=plain.batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5),
        scheduler=decays,
    )
    run = ob.simulate("allreduce", task, P, STEPS, faults="rank 3 dies at 350ms, back at 600ms", spans=True)
    assert run.trace.series["spread"][-1].value == 0.0


def test_it_takes_the_time_that_a_replica_takes_on_the_network() -> None:
    slow = ob.Network(bandwidth_Bps=40e6)
    run = ob.simulate("eager", None, P, 60, faults="rank 3 dies at 350ms, back at 600ms", network=slow)
    (absence,) = run.absences
    assert absence.back_s is not None
    assert absence.back_s >= 0.6 + 4e6 / 40e6


@pytest.mark.parametrize("name", METHODS)
def test_no_order_of_deaths_and_returns_stops_the_others(name: str) -> None:
    for seed in range(12):
        faults = f"mtbf {(80, 300)[seed % 2]}ms, back after {(50, 150, 400)[seed % 3]}ms"
        delays = ob.delays.parse("lognormal 20ms 0.5") if seed % 4 else None
        run = ob.simulate(
            METHODS[name], None, P, STEPS, compute_s=STEP_S, delays=delays, faults=faults, seed=seed, parameters=1000
        )
        assert max(run.gradients) <= STEPS
        assert len(run.died) < P


def test_absences_are_told_in_a_sentence() -> None:
    two = [Absence(3, 2.0, 3.0), Absence(1, 4.0)]
    assert told(two, 8, 10.0) == [
        "Rank 3 died at 2 s and was back at 3 s, rank 1 died at 4 s; of the workers' time 91.2% was left."
    ]
    many = [Absence(k % 4, 1.0 * k, 1.5 + k) for k in range(5)] + [Absence(2, 8.0)]
    assert told(many, 4, 10.0) == [
        "Workers died 6 times, and came back 5 times, rank 2 never; of the workers' time 76.2% was left."
    ]
    (sentence,) = told([Absence(3, 2.0, 3.0, lost=17)], 8, 10.0)
    assert "was back at 3 s; a step that was under way is lost; of the" in sentence
    assert told([], 4, 10.0) == []
