"""The laws of eager-SGD and WAGMA-SGD in virtual time: what they are equal to, what they keep, how late they may be."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat as ob
from tests.support.witness import descend, heavy, noise, rotating, watch

TASK = ob.tasks.regression(dimension=4, batch=2)
AT_ONCE = ob.Network(latency_s=0.0, bandwidth_Bps=1e30)
WAITS = ["first", "majority", 2, 0.5, "everyone"]
both_ways = pytest.mark.parametrize("catch_up", ["current", "every_step"])


def equal_rows(rows) -> bool:
    rows = list(rows)
    return all(torch.equal(rows[0], row) for row in rows)


# eager-SGD.


@given(
    st.integers(1, 9), st.integers(0, 8), st.sampled_from(WAITS), st.sampled_from(["current", "every_step"]),
    st.sampled_from(["queue", "latest"]), st.sampled_from(["carry", "drop"]), st.booleans(),
    st.sampled_from([None, 1, 3]),
)  # fmt: skip
@settings(max_examples=30)
def test_with_nobody_late_eager_is_allreduce_bit_for_bit(workers, steps, wait, catch_up, apply, stale, at_once, every):
    network = AT_ONCE if at_once else None
    strategy = ob.eager(wait, every, stale, apply, catch_up)
    run = ob.simulate(strategy, TASK, workers, steps, network=network)
    twin = ob.simulate(ob.allreduce(), TASK, workers, steps, network=network)
    assert torch.equal(run.weights, twin.weights)
    assert torch.equal(run.final, twin.final)
    assert all(r.fresh == tuple(range(workers)) and set(r.staleness.values()) == {0} for r in run.trace.rounds)


@both_ways
def test_with_nobody_late_nothing_fades(catch_up):
    run = ob.simulate(ob.eager(stale="fade", catch_up=catch_up), TASK, 5, 7)
    assert torch.equal(run.weights, ob.simulate(ob.eager(catch_up=catch_up), TASK, 5, 7).weights)


@pytest.mark.parametrize("late", [0, 1])
def test_a_gradient_that_fades_counts_less_for_every_round_it_has_missed(late):
    """Rank 1's first step takes 4.5 s, all others 1 s; its first gradient, which is late, is the only one not zero."""

    def one(rank, step, x):
        return torch.full_like(x, float(rank == 1 and step == 0))

    moved = {}
    for stale in ("carry", "fade"):
        strategy = ob.eager(sync_every=None, stale=stale, late=late)
        how = {"steps": 8, "compute_s": lambda step, rank: 4.5 if rank and not step else 1.0, "network": AT_ONCE}
        _, seen = watch(strategy, 2, one, lr=1.0, **how)
        assert torch.equal(seen.last[0], seen.last[1])
        moved[stale] = seen.last[0]
    torch.testing.assert_close(moved["carry"], torch.full_like(moved["carry"], -0.5))
    torch.testing.assert_close(moved["fade"], moved["carry"] / (5.0 - late))  # it has missed 4 rounds


@pytest.mark.parametrize("make", [ob.eager, ob.wagma])
@both_ways
def test_every_result_says_who_contributed_and_how_stale(make, catch_up):
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
def test_waiting_for_everyone_eager_is_allreduce_whatever_the_delays(catch_up):
    how = {"workers": 5, "steps": 7, "delays": ob.delays.exponential(0.3)}
    run = ob.simulate(ob.eager("everyone", catch_up=catch_up), TASK, **how)
    assert torch.equal(run.weights, ob.simulate(ob.allreduce(), TASK, **how).weights)
    full = ob.simulate(ob.eager("first", sync_every=1, catch_up=catch_up), TASK, **how)
    assert torch.equal(run.weights, full.weights)


@pytest.mark.parametrize("wait", WAITS)
@both_ways
def test_one_worker_alone_is_serial_sgd(wait, catch_up):
    x = torch.zeros(3, dtype=torch.float64)
    for step in range(6):
        x = x.sub(descend(0, step, x), alpha=0.3)
    for strategy in (ob.eager(wait, catch_up=catch_up), ob.wagma(wait=wait, catch_up=catch_up, tau=4)):
        _, seen = watch(strategy, 1, steps=6, compute_s=heavy(0))
        assert torch.equal(seen.last[0], x)


@given(st.integers(2, 7), st.sampled_from(WAITS), st.sampled_from(["current", "every_step"]), st.integers(0, 99))
@settings(max_examples=40)
def test_replicas_that_apply_every_result_are_equal_in_the_end(workers, wait, catch_up, seed):
    _, seen = watch(ob.eager(wait, catch_up=catch_up), workers, steps=6, compute_s=heavy(seed), seed=seed)
    assert equal_rows(seen.last.values())


def test_replicas_that_apply_only_the_latest_result_drift_and_never_apply_one_twice():
    run, seen = watch(ob.eager(apply="latest"), 3, steps=6, compute_s=rotating)
    assert not equal_rows(seen.last.values())
    for rank in range(3):
        versions = [got.version for got in seen.got[rank]]
        assert versions == list(range(len(run.trace.rounds)))


@both_ways
@given(st.integers(0, 999))
@settings(max_examples=20)
def test_a_full_round_leaves_nothing_owed_and_nobody_behind(catch_up, seed):
    every, workers, steps = 4, 4, 8
    run, _ = watch(ob.eager("first", every, catch_up=catch_up), workers, steps=steps, compute_s=heavy(seed))
    for full in (r for r in run.trace.rounds if r.started_by >= 0 and (r.version + 1) % every == 0):
        assert catch_up == "current" or full.fresh == tuple(range(workers))
        following = [r for r in run.trace.rounds if full.version < r.version < full.version + every]
        for r in following:
            assert all(s <= r.version - full.version - 1 for s in r.staleness.values())
    assert all(s < every for r in run.trace.rounds for s in r.staleness.values())


@both_ways
def test_workers_begin_with_the_same_weights_after_a_full_round(catch_up):
    every = 3
    _, seen = watch(ob.eager("first", every, catch_up=catch_up), 4, steps=9, compute_s=rotating)
    for count in (every, 2 * every):
        begun = [x for rank in range(4) for x, n in zip(seen.begun[rank], seen.after[rank], strict=True) if n == count]
        assert len(begun) >= 4
        assert equal_rows(begun)


@pytest.mark.parametrize(("catch_up", "late"), [("current", 0), ("every_step", 0), ("every_step", 1)])
def test_someone_is_fresh_in_every_round_that_is_not_full(catch_up, late):
    for seed in range(40):
        run, _ = watch(
            ob.eager("first", 5, catch_up=catch_up, late=late), 5, steps=7, compute_s=heavy(seed),
            network=ob.Network(latency_s=0.01),
        )  # fmt: skip
        for r in run.trace.rounds:
            if r.started_by >= 0 and (r.version + 1) % 5:
                assert r.started_by in r.fresh


def test_leftovers_beside_a_new_gradient_do_not_make_it_stale():
    # Rank 1's first gradient comes while round 0 is under way. Its second is in time for round 1, the first beside it.
    run = ob.simulate(
        ob.eager("first", None), None, 2, 3, parameters=1, network=ob.Network(latency_s=0.1),
        compute_s=lambda step, rank: 1.0 + (0.15 if rank == 1 and step == 0 else 0.0),
    )  # fmt: skip
    assert run.trace.rounds[0].fresh == (0,)
    assert run.trace.rounds[1].fresh == (0, 1)
    assert run.trace.rounds[1].staleness == {0: 0, 1: 1}


@both_ways
def test_the_drawn_initiator_starts_its_round_and_is_fresh_in_it(catch_up):
    workers, seed, seen = 5, 11, set()
    strategy = ob.eager("majority", None, catch_up=catch_up)
    run = ob.simulate(strategy, None, workers, seconds=20.0, seed=seed, compute_s=heavy(4), parameters=1)
    last_s = min(run.finished_s)
    for r in run.trace.rounds:
        if r.started_by >= 0 and r.end_s < last_s:
            assert r.started_by == ob.waiting.majority.initiator(r.version, workers, seed)
            assert r.started_by in r.fresh
            seen.add(r.started_by)
    assert seen == set(range(workers))


def test_a_majority_is_one_only_on_average():
    # After each full round all begin together, so the arrivals of the even rounds are independent.
    workers = 9
    run = ob.simulate(
        ob.eager("majority", sync_every=2), None, workers, 1500, compute_s=ob.delays.uniform(1.0, 2.0), parameters=1
    )
    fresh = [len(r.fresh) for r in run.trace.rounds if r.version % 2 == 0 and r.started_by >= 0]
    mean = sum(fresh) / len(fresh)
    assert len(fresh) > 400
    assert abs(mean - (workers + 1) / 2) < 0.4  # the standard error is 0.12
    assert min(fresh) == 1
    assert max(fresh) == workers


def test_a_worker_that_never_arrives_does_not_stop_the_others_before_the_full_round():
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


# Who counts.


def test_a_chronic_straggler_starts_no_rounds_of_its_own():
    slow = lambda step, rank: 0.4 + 0.013 if rank == 0 else 0.1  # noqa: E731
    for strategy in (ob.eager("first", None), ob.wagma(tau=None)):
        run = ob.simulate(strategy, None, 8, seconds=20.0, compute_s=slow, parameters=1)
        fast = max(run.gradients)
        assert abs(len(run.trace.rounds) - fast) <= 2
        assert all(r.started_by != 0 for r in run.trace.rounds[:-2])
        assert min(run.gradients) > fast / 5  # and it goes on at its own pace


def test_the_number_of_rounds_does_not_grow_with_the_number_of_workers():
    def rounds(workers: int) -> int:
        how = {"seconds": 10.0, "compute_s": ob.delays.uniform(0.09, 0.11), "parameters": 1}
        return len(ob.simulate(ob.eager("first", None), None, workers, **how).trace.rounds)

    assert rounds(4) < 1.15 * rounds(1)
    assert rounds(16) < 1.15 * rounds(1)


@pytest.mark.parametrize(("wait", "least"), [(1, 1), (2, 2), (5, 5), (0.5, 3), (1.0, 5), (0.21, 2)])
@pytest.mark.parametrize("end", [{"steps": 9}, {"samples": 41}], ids=str)
def test_a_hard_quorum_is_there_in_every_round_while_so_many_train(wait, least, end):
    network, round_s = ob.Network(latency_s=1e-5, bandwidth_Bps=1e30), 11e-5  # three hops of news, eight of the sum
    for seed in range(12):
        run = ob.simulate(ob.eager(wait, None), None, 5, **end, compute_s=heavy(seed), parameters=1, network=network)
        for r in run.trace.rounds:
            if r.started_by < 0:
                continue
            training = sum(f > r.end_s - round_s + 1e-9 for f in run.finished_s)
            assert len(r.fresh) >= min(least, training)
        assert sum(run.gradients) == (45 if "steps" in end else 41)


def test_a_quorum_is_counted_anew_when_a_worker_finishes():
    # Two of three must come: ranks 0 and 1, twice. Then rank 1 is out of data and rank 0 waits from 3.2 on for rank 2,
    # which comes at 10.0, too late to count, and has no more data either.
    run = ob.simulate(
        ob.eager(2, None), None, 3, samples=6, parameters=1, network=AT_ONCE,
        compute_s=lambda step, rank: [1.0, 1.1, 10.0][rank],
    )  # fmt: skip
    assert run.gradients == (3, 2, 1)
    assert [r.fresh for r in run.trace.rounds] == [(0, 1), (0, 1), (0,)]
    assert (run.trace.rounds[2].started_by, dict(run.trace.rounds[2].staleness)) == (2, {0: 0, 2: 2})
    assert run.trace.rounds[2].waited_s == {0: pytest.approx(6.8), 1: 0.0, 2: 0.0}


# The bound.


@both_ways
@pytest.mark.parametrize("bound", [1, 2, 5])
def test_nothing_older_than_the_bound_is_ever_applied(bound, catch_up):
    oldest = []
    for seed in range(25):
        for strategy in (
            ob.eager("first", catch_up=catch_up, sync="bounded", staleness=bound),
            ob.wagma(2, catch_up=catch_up, sync="bounded", staleness=bound),
        ):
            run = ob.simulate(strategy, None, 6, 15, compute_s=heavy(seed), seed=seed, parameters=1)
            oldest.append(max(s for r in run.trace.rounds for s in r.staleness.values()))
    assert max(oldest) == bound, "the bound is reached, so it is what holds"


def test_a_bound_waits_only_when_it_must():
    def end_s(**how) -> float:
        return ob.simulate(ob.eager(**how), None, 6, 40, compute_s=heavy(3), parameters=1).trace.rounds[15].end_s

    free, bounded = end_s(sync_every=None), end_s(sync="bounded", staleness=3)
    assert free < bounded < end_s(wait="everyone")


def test_a_bound_that_is_never_reached_changes_nothing():
    for catch_up in ("current", "every_step"):
        loose = watch(ob.eager(sync="bounded", staleness=99, catch_up=catch_up), 4, steps=8, compute_s=rotating)
        free = watch(ob.eager(sync_every=None, catch_up=catch_up), 4, steps=8, compute_s=rotating)
        assert loose[0].trace == free[0].trace
        assert torch.equal(loose[1].last[0], free[1].last[0])


# WAGMA-SGD.


def early(rank: int, step: int, x: torch.Tensor) -> torch.Tensor:
    """Gradients in the first step only; afterwards nothing but mixing."""
    return noise(rank, 0, len(x)) if step == 0 else torch.zeros_like(x)


@pytest.mark.parametrize(
    ("workers", "group", "rounds"), [(4, 2, 2), (8, 2, 3), (16, 4, 2), (16, 2, 4), (9, 9, 1), (8, 8, 1)]
)
def test_with_nobody_late_rounds_preserve_the_mean_and_end_in_consensus(workers, group, rounds):
    _, seen = watch(ob.wagma(group, tau=None), workers, early, steps=rounds + 1)
    rows = [torch.stack([seen.begun[rank][t] for rank in range(workers)]) for t in range(1, rounds + 2)]
    mean = -0.3 * torch.stack([noise(rank, 0) for rank in range(workers)]).mean(0)
    spread = [float((row - row.mean(0)).norm()) for row in rows]
    for row in rows:
        assert torch.allclose(row.mean(0), mean, rtol=0, atol=1e-15)
    assert all(later <= sooner + 1e-15 for sooner, later in itertools.pairwise(spread))
    assert spread[rounds - 1] < 1e-15
    if rounds > 1:
        assert spread[rounds - 2] > 1e-3, "not sooner, so it is the last round that does it"


@pytest.mark.parametrize("workers", [3, 5, 6, 7])
def test_with_nobody_late_any_number_of_workers_mixes_towards_one_point(workers):
    _, seen = watch(ob.wagma(2, tau=None), workers, early, steps=60)
    rows = torch.stack(list(seen.last.values()))
    assert torch.allclose(rows, rows[:1].expand_as(rows), rtol=0, atol=1e-6)


@both_ways
def test_one_group_of_all_with_nobody_late_is_allreduce(catch_up):
    twin = ob.simulate(ob.allreduce(), TASK, 5, 9)
    run = ob.simulate(ob.wagma(5, tau=None, catch_up=catch_up), TASK, 5, 9)
    assert torch.allclose(run.weights, twin.weights, rtol=1e-5, atol=1e-6)
    assert equal_rows(run.weights)


@pytest.mark.parametrize("tau", [1, 3])
def test_groups_of_one_are_local_sgd_whatever_the_delays(tau):
    _, seen = watch(ob.wagma(1, tau=tau, catch_up="every_step"), 4, steps=6, compute_s=rotating)
    x = [torch.zeros(3, dtype=torch.float64) for _ in range(4)]
    for t in range(7):
        assert all(torch.allclose(seen.begun[rank][t], x[rank], rtol=0, atol=1e-14) for rank in range(4))
        x = [w - 0.3 * descend(rank, t, w) for rank, w in enumerate(x)]
        if (t + 1) % tau == 0:
            x = [torch.stack(x).mean(0)] * 4


def test_groups_of_one_are_local_sgd_in_the_other_words_too():
    run = ob.simulate(ob.wagma(1, tau=3), TASK, 4, 9)
    twin = ob.simulate(ob.local_sgd(3), TASK, 4, 9)
    assert torch.allclose(run.weights, twin.weights, rtol=0, atol=1e-6)


@both_ways
def test_a_full_round_at_every_step_is_synchronous_averaging(catch_up):
    _, seen = watch(ob.wagma(2, tau=1, catch_up=catch_up), 4, steps=6, compute_s=rotating)
    x = torch.zeros(3, dtype=torch.float64)
    for step in range(6):
        assert all(torch.equal(seen.begun[rank][step], seen.begun[0][step]) for rank in range(4))
        assert torch.allclose(seen.begun[0][step], x, rtol=0, atol=1e-14)
        x = torch.stack([x - 0.3 * descend(rank, step, x) for rank in range(4)]).mean(0)


@both_ways
@pytest.mark.parametrize("workers", [2, 4, 5])
def test_replicas_are_bitwise_equal_after_every_full_round(catch_up, workers):
    tau = 3
    _, seen = watch(ob.wagma(2, tau=tau, catch_up=catch_up), workers, steps=9, compute_s=rotating)
    for rank in range(workers):
        assert [got.version for got in seen.got[rank]] == list(range(len(seen.got[0])))
    for count in (tau, 2 * tau):
        begun = [x for r in range(workers) for x, n in zip(seen.begun[r], seen.after[r], strict=True) if n == count]
        assert len(begun) >= workers
        assert equal_rows(begun)


@both_ways
def test_weights_stay_between_the_deposits_they_are_made_of(catch_up):
    tau, workers, steps = 4, 4, 9
    # Step for round, a deposit answers for at most tau rounds. With global rounds its number is that of the results it
    # was begun with, which in a full round may be tau − 1 rounds back.
    oldest = tau if catch_up == "every_step" else 2 * tau
    for seed in range(10):
        _, seen = watch(ob.wagma(2, tau=tau, catch_up=catch_up), workers, steps=steps, compute_s=heavy(seed))
        sent = [(seen.after[r][s], x) for r in range(workers) for s, x in enumerate(seen.sent[r])]
        for rank in range(workers):
            for t in range(1, steps + 1):
                version = seen.after[rank][t] - 1
                near = [x for base, x in sent if version - oldest <= base <= version]
                hull = torch.stack([*near, torch.zeros(3, dtype=torch.float64)] if version < oldest else near)
                assert (seen.begun[rank][t] <= hull.amax(0) + 1e-12).all()
                assert (seen.begun[rank][t] >= hull.amin(0) - 1e-12).all()


def test_the_mean_is_not_preserved_when_someone_is_late():
    _, seen = watch(ob.wagma(4, tau=None), 4, early, steps=8, compute_s=rotating)
    mean = -0.3 * torch.stack([noise(rank, 0) for rank in range(4)]).mean(0)
    assert not torch.allclose(torch.stack(list(seen.last.values())).mean(0), mean, rtol=0, atol=1e-3)
