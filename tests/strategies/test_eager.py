"""The laws of eager-SGD in virtual time: what it equals, what it keeps, how late it may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import offbeat as ob
from tests.support.witness import descend, equal_rows, heavy, rotating, watch

TASK = ob.tasks.regression(dimension=4, batch=2)
AT_ONCE = ob.Network(latency_s=0.0, bandwidth_Bps=1e30)
WAITS = ["first", "majority", 2, 0.5, "everyone"]
both_ways = pytest.mark.parametrize("catch_up", ["current", "every_step"])


@given(
    st.integers(1, 9), st.integers(0, 8), st.sampled_from(WAITS), st.sampled_from(["current", "every_step"]),
    st.sampled_from(["queue", "latest"]), st.sampled_from(["carry", "drop"]), st.booleans(),
    st.sampled_from([None, 1, 3]),
)  # fmt: skip
@settings(max_examples=30)
def test_with_nobody_late_eager_is_allreduce_bit_for_bit(
    workers: int, steps: int, wait: Any, catch_up: Any, apply: Any, stale: Any, at_once: bool, every: Any
) -> None:
    network = AT_ONCE if at_once else None
    strategy = ob.eager(wait, every, stale, apply, catch_up)
    run = ob.simulate(strategy, TASK, workers, steps, network=network)
    twin = ob.simulate(ob.allreduce(), TASK, workers, steps, network=network)
    assert torch.equal(run.weights, twin.weights)
    assert torch.equal(run.final, twin.final)
    assert all(r.fresh == tuple(range(workers)) and set(r.staleness.values()) == {0} for r in run.trace.rounds)


@both_ways
def test_with_nobody_late_nothing_fades(catch_up: Any) -> None:
    run = ob.simulate(ob.eager(stale="fade", catch_up=catch_up), TASK, 5, 7)
    assert torch.equal(run.weights, ob.simulate(ob.eager(catch_up=catch_up), TASK, 5, 7).weights)


@pytest.mark.parametrize("late", [0, 1])
def test_a_gradient_that_fades_counts_less_for_every_round_it_has_missed(late: Any) -> None:
    """Rank 1's first step takes 4.5 s, all others 1 s; its first gradient, which is late, is the only one not zero."""

    def one(rank: int, step: int, x: Tensor) -> Tensor:
        return torch.full_like(x, float(rank == 1 and step == 0))

    moved = {}
    stale: Any
    for stale in ("carry", "fade"):
        strategy = ob.eager(sync_every=None, stale=stale, late=late)
        _, seen = watch(
            strategy, 2, one, lr=1.0, steps=8, network=AT_ONCE,
            compute_s=lambda step, rank: 4.5 if rank and not step else 1.0,
        )  # fmt: skip
        assert torch.equal(seen.last[0], seen.last[1])
        moved[stale] = seen.last[0]
    torch.testing.assert_close(moved["carry"], torch.full_like(moved["carry"], -0.5))
    torch.testing.assert_close(moved["fade"], moved["carry"] / (5.0 - late))  # it has missed 4 rounds


@pytest.mark.parametrize("make", [ob.eager, ob.wagma])
@both_ways
def test_every_result_says_who_contributed_and_how_stale(make: Any, catch_up: Any) -> None:
    run, seen = watch(make(catch_up=catch_up), 6, steps=15, compute_s=heavy(3))
    rounds, late = {r.version: r for r in run.trace.rounds}, 0
    for rank, results in seen.got.items():
        for got in results:
            told = rounds[got.version].staleness
            assert got.contributors == {r: told[r] for r in got.contributors}
            assert make is ob.wagma or set(got.contributors) == set(told)
            assert make is ob.eager or (rank in got.contributors and len(got.contributors) == got.count)
            late += any(got.contributors.values())
    assert late


@both_ways
def test_waiting_for_everyone_eager_is_allreduce_whatever_the_delays(catch_up: Any) -> None:
    how: dict[str, Any] = {"workers": 5, "steps": 7, "delays": ob.delays.exponential(0.3)}
    run = ob.simulate(ob.eager("everyone", catch_up=catch_up), TASK, **how)
    assert torch.equal(run.weights, ob.simulate(ob.allreduce(), TASK, **how).weights)
    full = ob.simulate(ob.eager("first", sync_every=1, catch_up=catch_up), TASK, **how)
    assert torch.equal(run.weights, full.weights)


@pytest.mark.parametrize("wait", WAITS)
@both_ways
def test_one_worker_alone_is_serial_sgd(wait: Any, catch_up: Any) -> None:
    x = torch.zeros(3, dtype=torch.float64)
    for step in range(6):
        x = x.sub(descend(0, step, x), alpha=0.3)
    for strategy in (ob.eager(wait, catch_up=catch_up), ob.wagma(wait=wait, catch_up=catch_up, tau=4)):
        _, seen = watch(strategy, 1, steps=6, compute_s=heavy(0))
        assert torch.equal(seen.last[0], x)


@given(st.integers(2, 7), st.sampled_from(WAITS), st.sampled_from(["current", "every_step"]), st.integers(0, 99))
@settings(max_examples=40)
def test_replicas_that_apply_every_result_are_equal_in_the_end(
    workers: int, wait: Any, catch_up: Any, seed: int
) -> None:
    _, seen = watch(ob.eager(wait, catch_up=catch_up), workers, steps=6, compute_s=heavy(seed), seed=seed)
    assert equal_rows(seen.last.values())


def test_replicas_that_apply_only_the_latest_result_drift_and_never_apply_one_twice() -> None:
    run, seen = watch(ob.eager(apply="latest", grace=0), 3, steps=6, compute_s=rotating)
    assert not equal_rows(seen.last.values())
    for rank in range(3):
        versions = [got.version for got in seen.got[rank]]
        assert versions == list(range(len(run.trace.rounds)))


@both_ways
@given(st.integers(0, 999))
@settings(max_examples=20)
def test_a_full_round_leaves_nothing_owed_and_nobody_behind(catch_up: Any, seed: int) -> None:
    every, workers, steps = 4, 4, 8
    run, _ = watch(ob.eager("first", every, catch_up=catch_up), workers, steps=steps, compute_s=heavy(seed))
    for full in (r for r in run.trace.rounds if r.started_by >= 0 and (r.version + 1) % every == 0):
        assert catch_up == "current" or full.fresh == tuple(range(workers))
        following = [r for r in run.trace.rounds if full.version < r.version < full.version + every]
        for r in following:
            assert all(s <= r.version - full.version - 1 for s in r.staleness.values())
    assert all(s < every for r in run.trace.rounds for s in r.staleness.values())


@both_ways
def test_workers_begin_with_the_same_weights_after_a_full_round(catch_up: Any) -> None:
    every = 3
    _, seen = watch(ob.eager("first", every, catch_up=catch_up), 4, steps=9, compute_s=rotating)
    for count in (every, 2 * every):
        begun = [x for rank in range(4) for x, n in zip(seen.begun[rank], seen.after[rank], strict=True) if n == count]
        assert len(begun) >= 4
        assert equal_rows(begun)


@pytest.mark.parametrize(("catch_up", "late"), [("current", 0), ("every_step", 0), ("every_step", 1)])
def test_without_a_window_whoever_starts_a_round_that_is_not_full_is_fresh_in_it(catch_up: Any, late: Any) -> None:
    for seed in range(40):
        run, _ = watch(
            ob.eager("first", 5, catch_up=catch_up, late=late, sync="barrier", grace=0), 5, steps=7,
            compute_s=heavy(seed),
            network=ob.Network(latency_s=0.01),
        )  # fmt: skip
        for r in run.trace.rounds:
            if r.started_by >= 0 and (r.version + 1) % 5:
                assert r.started_by in r.fresh


@pytest.mark.parametrize("name", ["eager", "wagma"])
def test_where_results_may_be_late_no_round_waits_for_all_unless_that_is_asked_for(name: str) -> None:
    def waited_s(every: int | None, sync: str | None = None) -> float:
        settings: dict[str, Any] = {"late": 1, "sync": sync, {"eager": "sync_every", "wagma": "tau"}[name]: every}
        run = ob.simulate(
            ob.strategy(name, **settings), None, 4, 24, parameters=1, network=AT_ONCE,
            compute_s=lambda step, rank: 3.0 if rank == 0 else 1.0,
        )  # fmt: skip
        return sum(sum(r.waited_s.values()) for r in run.trace.rounds)

    assert waited_s(8) == waited_s(8, "bounded") == waited_s(None) == 0.0
    assert waited_s(8, "barrier") > 1.0
    assert waited_s(1) == waited_s(1, "barrier") > 10.0  # every round is full


def test_leftovers_beside_a_new_gradient_do_not_make_it_stale() -> None:
    # Rank 1's first gradient comes while round 0 is under way. Its second is in time for round 1, the first beside it.
    run = ob.simulate(
        ob.eager("first", None), None, 2, 3, parameters=1, network=ob.Network(latency_s=0.1),
        compute_s=lambda step, rank: 1.0 + (0.15 if rank == 1 and step == 0 else 0.0),
    )  # fmt: skip
    assert run.trace.rounds[0].fresh == (0,)
    assert run.trace.rounds[1].fresh == (0, 1)
    assert run.trace.rounds[1].staleness == {0: 0, 1: 1}


@both_ways
def test_the_drawn_initiator_starts_its_round_and_is_fresh_in_it(catch_up: Any) -> None:
    workers, seed, seen = 5, 11, set()
    strategy = ob.eager("majority", None, catch_up=catch_up, grace=0)
    run = ob.simulate(strategy, None, workers, seconds=20.0, seed=seed, compute_s=heavy(4), parameters=1)
    last_s = min(run.finished_s)
    for r in run.trace.rounds:
        if r.started_by >= 0 and r.end_s < last_s:
            assert r.started_by == ob.waiting.majority.initiator(r.version, workers, seed)
            assert r.started_by in r.fresh
            seen.add(r.started_by)
    assert seen == set(range(workers))


def test_a_majority_is_one_only_on_average() -> None:
    # After each full round all begin together, so the arrivals of the even rounds are independent.
    workers = 9
    run = ob.simulate(
        ob.eager("majority", sync_every=2, grace=0),
        None,
        workers,
        1500,
        compute_s=ob.delays.uniform(1.0, 2.0),
        parameters=1,
    )
    fresh = [len(r.fresh) for r in run.trace.rounds if r.version % 2 == 0 and r.started_by >= 0]
    mean = sum(fresh) / len(fresh)
    assert len(fresh) > 400
    assert abs(mean - (workers + 1) / 2) < 0.4  # the standard error is 0.12
    assert min(fresh) == 1
    assert max(fresh) == workers


def test_a_worker_that_never_arrives_does_not_stop_the_others_before_the_full_round() -> None:
    never_s = 1e6
    for catch_up in ("current", "every_step"):
        run = ob.simulate(
            ob.eager("first", 6, catch_up=catch_up), None, 4, 8, parameters=1,
            compute_s=lambda step, rank: never_s if rank == 3 and step == 0 else 1.0,
        )  # fmt: skip
        ends = [r.end_s for r in run.trace.rounds]
        assert ends[4] < 6.0
        assert ends[5] > never_s
        assert run.trace.rounds[5].staleness[3] == 5
