"""Self-clocked averaging: its limits are methods we know, nobody waits, the period is how long an exchange takes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.support.formulas import AT_ONCE, HEAVY, Local, close, final
from tests.support.long import unless_long

STEPS, TASK = 24, ob.tasks.regression()
INT8 = ob.codec.int8()
FREE = ob.Network(0.0, float("inf"))


def run(strategy: ob.Strategy, workers: int, **how: Any) -> ob.Run:
    return ob.simulate(strategy, TASK, workers, STEPS, **{"network": FREE, "compute_s": 1.0, **how})


@pytest.mark.parametrize(
    ("workers", "period"), [*itertools.product((1, 2, 3, 8), (1, 4)), *((workers, 2) for workers in range(1, 34))]
)
def test_where_all_wait_for_all_it_is_local_sgd_with_that_period(workers: int, period: int) -> None:
    strategy = ob.self_clocked(period, None, "everyone", late=0, codec=None)
    ours, its = (final(s, workers, 5, HEAVY, network=AT_ONCE) for s in (strategy, ob.local_sgd(period)))
    close(ours.weights, its.weights)
    close(ours.final, its.final)


def by_delayed_averages(tau: int, d: int, workers: int, steps: int) -> torch.Tensor:
    """DaSGD, merge="correct", by hand: its mean is applied d steps later, up to the step in which the next begins."""
    its, sent, due = Local(workers), None, 0
    for k in range(1, steps + 1):
        its.descend(k - 1)
        if sent is not None and k == due:
            its.w, sent = its.w + sent.mean(0) - sent, None
        if k % tau == 0:
            sent, due = its.w, k + d
    return its.w


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("period", [1, 2, 4])
def test_where_all_wait_for_all_one_round_late_it_is_dasgd_with_a_delay_of_a_whole_period(
    workers: int, period: int
) -> None:
    strategy = ob.self_clocked(period, None, "everyone", late=1, codec=None, pause=0, squares=1)
    for steps in (2 * period - 1, 2 * period, 2 * period + 1, 13):
        ours = final(strategy, workers, steps, HEAVY, network=AT_ONCE).weights
        close(ours, by_delayed_averages(period, period, workers, steps))
    for d in range(1, period):
        its = final(ob.dasgd(period, d, merge="correct"), workers, 13, HEAVY).weights
        close(its, by_delayed_averages(period, d, workers, 13))
        assert not torch.allclose(its, ours, atol=1e-3), "a shorter delay is something else"


@pytest.mark.parametrize("workers", unless_long([1, 2, 3, 4, 5, 7, 8, 9, 16, 33], [*range(1, 34)]))
def test_nobody_waits_whatever_a_message_takes(workers: int) -> None:
    for message_s in (0.0, 0.5, 8.0):
        network = ob.Network(message_s, float("inf"))
        ran = run(ob.self_clocked(), workers, network=network, compute_s=ob.delays.lognormal(1.0, 0.5))
        assert sum(ran.wait_s) == 0.0
        assert list(ran.gradients) == [STEPS] * workers


def exchanges(ran: ob.Run) -> int:
    return len(ran.trace.rounds)


def test_the_period_follows_the_network() -> None:
    """A round takes no time, one and a half steps, five and a half: it comes every step, every second, every sixth."""
    found = [
        exchanges(run(ob.self_clocked(1, None, "everyone"), 4, network=ob.Network(latency / 6, float("inf"))))
        for latency in (0.0, 1.5, 5.5)
    ]
    assert found[0] >= STEPS - 1
    assert found[0] > 1.5 * found[1] > 2 * found[2] > 0


@pytest.mark.parametrize(("pause", "every"), [(0.0, 4), (0.5, 5), (1.0, 6)])
def test_the_network_rests_as_long_as_the_pause_says(pause: float, every: int) -> None:
    """An exchange takes three and a half steps, so three are over before it is: it is followed by so many more."""
    ran = run(ob.self_clocked(1, pause=pause), 2, network=ob.Network(3.5 / 3, float("inf")))
    ends = [r.end_s for r in ran.trace.rounds if r.end_s < STEPS]
    assert [b - a for a, b in itertools.pairwise(ends)] == pytest.approx([float(every)] * (len(ends) - 1))
    assert len(ends) >= 3


@pytest.mark.parametrize("message", [0.0, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("workers", [5, 9, 16])
def test_more_than_a_few_send_at_most_half_of_what_ad_psgd_sends(workers: int, message: float) -> None:
    nbytes = 8 * sum(p.numel() for p in TASK.model().parameters())
    network = ob.Network(1e-4, nbytes / message if message else float("inf"))
    mine, its = (
        ob.simulate(s, TASK, workers, seconds=64.0, network=network, compute_s=1.0)
        for s in (ob.self_clocked(), ob.ad_psgd())
    )
    assert 0 < mine.wire_bytes <= 0.5 * its.wire_bytes
    assert sum(mine.gradients) >= sum(its.gradients)


TOGETHER: dict[str, Any] = {"period": 1, "group": None, "pause": 0.0, "wait": 0.5, "draw": 0}
PAIRS: dict[str, Any] = {"period": 1, "group": 2, "pause": 1.0, "wait": 0.125}


@pytest.mark.parametrize(
    ("workers", "hosts", "settings"),
    [
        (1, None, {**TOGETHER, "squares": 1, "codec": None}),
        (2, None, {**TOGETHER, "squares": 2, "codec": INT8}),
        (4, None, {**TOGETHER, "squares": 4, "codec": INT8}),
        (4, 1, {**TOGETHER, "squares": 4, "codec": None}),
        (5, 1, {**TOGETHER, "squares": 5, "codec": None}),
        (8, 1, {**TOGETHER, "squares": 8, "codec": None}),
        (18, 1, {**PAIRS, "draw": 0, "squares": 16, "codec": None}),
        (5, None, {**PAIRS, "draw": 2, "squares": 5, "codec": INT8}),
        (8, 2, {**PAIRS, "draw": 2, "squares": 8, "codec": INT8}),
        (9, None, {**PAIRS, "draw": 2, "squares": 9, "codec": INT8}),
        (18, None, {**PAIRS, "draw": 0, "squares": 16, "codec": INT8}),
    ],
)
def test_what_is_left_out_is_what_suits_the_workers_and_their_hosts(
    workers: int, hosts: int | None, settings: dict[str, Any]
) -> None:
    digits = ob.tasks.digits(batch=4, hidden=8, dtype=torch.float64)
    task = replace(digits, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
    network = ob.Network(0.4, hosts=hosts)
    of_all = [
        ob.simulate(s, task, workers, 12, compute_s=ob.delays.lognormal(1.0, 0.3), network=network)
        for s in (ob.self_clocked(), ob.self_clocked(**settings))
    ]
    assert torch.equal(of_all[0].weights, of_all[1].weights)


@pytest.mark.parametrize(("settings", "started_by"), [({}, 0.5), ({"late": 0}, 0.125), ({"draw": 2}, 0.125)])
def test_on_one_host_half_of_all_start_a_round_unless_somebody_would_wait_for_it_or_draws(
    settings: dict[str, Any], started_by: float
) -> None:
    how: dict[str, Any] = {"network": ob.Network(0.1, hosts=1), "compute_s": ob.delays.lognormal(1.0, 0.3)}
    runs = [run(ob.self_clocked(wait=wait, **settings), 8, **how) for wait in ("auto", started_by)]
    assert torch.equal(runs[0].weights, runs[1].weights)
    other = run(ob.self_clocked(wait="everyone", **settings), 8, **how)
    assert not torch.equal(runs[0].weights, other.weights)


@pytest.mark.parametrize(("hosts", "codec"), [(1, None), (2, INT8), (None, INT8)])
@pytest.mark.parametrize("workers", [2, 6])
def test_only_what_leaves_a_host_is_coded(workers: int, hosts: int | None, codec: ob.codec.Codec | None) -> None:
    network = ob.Network(0.1, 1e3, hosts=hosts)
    runs = [run(s, workers, network=network) for s in (ob.self_clocked(), ob.self_clocked(codec=codec))]
    assert torch.equal(runs[0].weights, runs[1].weights)
    assert runs[0].wire_bytes == runs[1].wire_bytes > 0


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_replay_codes_what_the_run_has_coded(hosts: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {"network": ob.Network(hosts=hosts), "compute_s": ob.delays.lognormal(1.0, 0.5)}
    ran = run(ob.self_clocked(), 6, record=tmp_path, **how)
    assert torch.equal(ran.final, ob.replay(tmp_path, TASK).final)


@pytest.mark.parametrize(("group", "workers"), [(2, 8), (3, 8), (3, 7)])
def test_a_round_is_made_of_those_who_have_handed_something_in(group: int, workers: int) -> None:
    ran = run(ob.self_clocked(group=group, draw=0), workers, compute_s=ob.delays.pareto(0.7, 1.5, 20.0))
    while_all_train = [r for r in ran.trace.rounds if r.end_s < 0.5 * STEPS]
    assert while_all_train
    assert all(len(r.members) == group == len(r.staleness) for r in while_all_train)
    assert {rank for r in while_all_train for rank in r.members} == set(range(workers))


@pytest.mark.parametrize(("message", "least", "most"), [(0.0, 1.9, 2.0), (1.0, 0.9, 1.15), (8.0, 0.9, 1.3)])
def test_where_messages_are_quick_it_meets_two_who_compute(message: float, least: float, most: float) -> None:
    """``least``, ``most``: of rounds a step where they are free, elsewhere of rounds over those without drawing."""
    nbytes = 8 * sum(p.numel() for p in TASK.model().parameters())
    network = ob.Network(0.0, nbytes / message if message else float("inf"))
    often, seldom = (
        run(ob.self_clocked(draw=draw, codec=None), 8, network=network, compute_s=ob.delays.lognormal(1.0, 0.1))
        for draw in (2, 0)
    )
    rounds = len(often.trace.rounds)
    assert least <= rounds / (len(seldom.trace.rounds) if message else sum(often.gradients)) <= most
    assert all(len(r.members) <= 2 for r in often.trace.rounds)


def test_where_all_are_alike_everybody_hears_of_everybody() -> None:
    """In about as many rounds as with drawn pairs: those who come at the same instant are not paired as on a list."""
    ran = ob.simulate(ob.self_clocked(1), TASK, 32, 12, network=FREE, compute_s=1.0)
    met: dict[int, set[int]] = {rank: {rank} for rank in range(32)}
    for r in ran.trace.rounds:
        together = set().union(*(met[rank] for rank in r.members))
        met.update({rank: set(together) for rank in r.members})
    assert all(heard == set(range(32)) for heard in met.values())


def test_a_slow_worker_hands_in_fewer_steps_and_holds_up_nobody() -> None:
    ran = run(ob.self_clocked(1), 4, compute_s=lambda step, rank: 4.0 if rank == 0 else 1.0)
    assert sum(ran.wait_s) == 0.0
    assert ran.seconds == pytest.approx(4.0 * STEPS)


def test_whatever_is_handed_in_counts_also_from_a_worker_that_the_others_have_left_behind() -> None:
    ran = run(ob.self_clocked(1, wait="first"), 4, compute_s=lambda step, rank: 4.3 if rank == 0 else 1.0)
    while_others_train = [r for r in ran.trace.rounds if r.end_s < STEPS]
    assert sum(r.started_by == 0 for r in while_others_train) == 5


@pytest.mark.parametrize("group", [2, 3, None])
@pytest.mark.parametrize("late", [0, 1])
def test_the_mean_of_all_moves_by_their_own_steps_alone(group: int | None, late: int) -> None:
    """On a slope every step is the same wherever it is taken: the mean must have moved by all of them."""
    task = slope()
    ran = ob.simulate(
        ob.self_clocked(2, group, "first", late, codec=None),
        task,
        5,
        STEPS,
        network=ob.Network(0.3, float("inf")),
        compute_s=ob.delays.pareto(0.7, 1.5, 20.0),
    )
    torch.testing.assert_close(ran.final, torch.full_like(ran.final, -0.1 * STEPS), rtol=1e-12, atol=1e-12)


def slope() -> ob.Task:
    def nothing() -> torch.nn.Module:
        model = torch.nn.Linear(3, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        return model

    return ob.Task(
        nothing,
        lambda out, target: (out - target).sum(),
        lambda rank, step: (torch.ones(1, 3, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: ob.self_clocked(0), "period is 0"),
        (lambda: ob.self_clocked(late=2), "late is 2"),
        (lambda: ob.self_clocked(pause=-1.0), "a pause of -1.0"),
        (lambda: ob.self_clocked(draw=-1), "draw is -1"),
        (lambda: ob.self_clocked(draw=2, group=4), "leave draw out"),
        (lambda: ob.self_clocked(codec=ob.codec.topk(8)), "nothing sends later"),
    ],
)
def test_a_wrong_setting_is_answered_with_a_sentence(made: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made()
