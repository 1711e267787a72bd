"""The laws of Ringmaster ASGD in virtual time: what it equals, what it drops, and that nobody waits."""

from __future__ import annotations

import heapq
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import offbeat as ob
from tests.support.witness import applied, counting, descend, equal_rows, heavy, produced, watch

TASK = ob.tasks.regression(dimension=4, batch=2)
AT_ONCE = ob.Network(latency_s=0.0, bandwidth_Bps=1e30)
NETWORKS = [AT_ONCE, ob.Network(latency_s=0.01), ob.Network(latency_s=0.2)]
THRESHOLDS = ["workers", None, 1, 2, 3]
thresholds = st.sampled_from(THRESHOLDS)
networks = st.sampled_from(NETWORKS)


def by_ringmaster(R: float, workers: int, steps: int, seconds: Any, lr: float) -> tuple[Tensor, list[tuple[int, int]]]:
    """The paper's Algorithm 1, with its server: the last weights, and the gradients that were discarded."""
    x, k, lost = torch.zeros(3, dtype=torch.float64), 0, []
    begun = [(x.clone(), 0)] * workers
    arrivals = [(seconds(0, rank), rank, 0) for rank in range(workers)]
    heapq.heapify(arrivals)
    while arrivals:
        now, rank, step = heapq.heappop(arrivals)
        at, k_i = begun[rank]
        if k - k_i < R:
            x = x.sub(descend(rank, step, at) / workers, alpha=lr)
            k += 1
        else:
            lost.append((rank, step))
        begun[rank] = (x.clone(), k)
        if step + 1 < steps:
            heapq.heappush(arrivals, (now + seconds(step + 1, rank), rank, step + 1))
    return x, sorted(lost)


@pytest.mark.parametrize("R", [1, 2, 3, None])
@pytest.mark.parametrize("seed", range(5))
def test_without_a_server_it_is_the_papers_algorithm_with_one(R: int | None, seed: int) -> None:
    times = heavy(seed)
    run, seen = watch(ob.ringmaster(R), 4, steps=8, lr=0.3, compute_s=times, network=AT_ONCE)
    x, lost = by_ringmaster(R or math.inf, 4, 8, times, 0.3)
    torch.testing.assert_close(seen.last[0], x, rtol=1e-12, atol=1e-12)
    assert sorted(run.lost) == lost
    assert bool(lost) == (R is not None)


@given(st.integers(1, 9), st.integers(0, 8), thresholds, networks)
@settings(max_examples=30)
def test_with_nobody_late_it_is_allreduce_bit_for_bit(workers: int, steps: int, R: Any, network: Any) -> None:
    run, twin = (ob.simulate(s, TASK, workers, steps, network=network) for s in (ob.ringmaster(R), ob.allreduce()))
    assert torch.equal(run.weights, twin.weights)
    assert torch.equal(run.final, twin.final)
    assert run.lost == ()


@given(st.integers(1, 7), st.integers(0, 999))
@settings(max_examples=30)
def test_where_only_fresh_gradients_count_it_is_eager_that_drops_the_others(workers: int, seed: int) -> None:
    """If rounds take no time. Else eager lets a late worker go on while the newest weights are on their way to it."""
    how: dict[str, Any] = {"workers": workers, "steps": 7, "compute_s": heavy(seed), "network": AT_ONCE}
    twin = ob.simulate(ob.eager("first", sync_every=None, stale="drop", grace=0), TASK, **how)
    run = ob.simulate(ob.ringmaster(1), TASK, **how)
    assert torch.equal(run.weights, twin.weights)
    assert run.lost == twin.lost
    assert run.seconds == twin.seconds


@given(st.integers(1, 7), thresholds, networks, st.integers(0, 999))
@settings(max_examples=40)
def test_each_gradient_is_applied_once_or_named_as_lost(workers: int, R: Any, network: Any, seed: int) -> None:
    run = ob.simulate(ob.ringmaster(R), counting(workers), workers, 9, compute_s=heavy(seed), network=network)
    assert applied(run) == dict.fromkeys(produced(run) - set(run.lost), 1.0)
    assert len(set(run.lost)) == len(run.lost)
    assert R is not None or run.lost == ()
    most = {"workers": workers, None: math.inf}.get(R, R)
    assert all(age < most for r in run.trace.rounds for age in r.staleness.values())


def test_a_higher_threshold_drops_less_and_lets_in_older_gradients() -> None:
    runs = [ob.simulate(ob.ringmaster(R), None, 6, 60, compute_s=heavy(1), parameters=1) for R in (1, 2, 4, 8)]
    lost = [len(run.lost) for run in runs]
    oldest = [max(age for r in run.trace.rounds for age in r.staleness.values()) for run in runs]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > lost[-1]
    assert oldest == [0, 1, 3, 7]


@given(st.integers(2, 6), thresholds, networks, st.integers(0, 999))
@settings(max_examples=30)
def test_at_equal_versions_all_workers_hold_the_same_bits(workers: int, R: Any, network: Any, seed: int) -> None:
    _, seen = watch(ob.ringmaster(R), workers, steps=6, compute_s=heavy(seed), network=network)
    at: dict[int, list[Tensor]] = {}
    for rank in range(workers):
        for x, version in zip(seen.begun[rank], seen.after[rank], strict=True):
            at.setdefault(version, []).append(x)
    assert all(equal_rows(rows) for rows in at.values())
    assert equal_rows(seen.last.values())


def test_a_worker_whose_gradient_is_dropped_goes_on_with_the_newest_weights() -> None:
    """Rank 1's first step lasts five of rank 0's. What it brings is too old; its second step is as short as others'."""
    run, seen = watch(
        ob.ringmaster(2), 2, steps=8, network=AT_ONCE,
        compute_s=lambda step, rank: 5.2 if rank and not step else 1.0,
    )  # fmt: skip
    assert run.lost == ((1, 0),)
    assert seen.after[1][1] == 5


def test_a_gradient_that_comes_while_a_result_is_on_its_way_counts_for_the_version_after_it() -> None:
    """Rank 0 arrives at 1 s; the news takes 0.2 s, the sum 0.4 s. Rank 1 arrives at 1.3 s, with a gradient of age 1."""
    for R, age in ((1, 0), (2, 1)):
        run, seen = watch(
            ob.ringmaster(R), 2, steps=2, network=ob.Network(latency_s=0.2, bandwidth_Bps=1e12),
            compute_s=lambda step, rank: 1.0 + 0.3 * rank + 9.0 * step,
        )  # fmt: skip
        assert ((1, 0) in run.lost) == (R == 1)
        assert [dict(r.staleness) for r in run.trace.rounds[:2]][1:] == ([{1: 1}] if age else [{0: 0}])
        assert seen.after[1][1] == 1 + age, "it goes on with that result, or with its own"
        assert all(r.staleness for r in run.trace.rounds), "nobody starts a round without having something for it"


def test_nobody_waits_for_a_slow_worker_and_a_gradient_waits_for_nobody() -> None:
    run = ob.simulate(
        ob.ringmaster(None), None, 3, seconds=30.0, parameters=1, network=AT_ONCE,
        compute_s=lambda step, rank: 1.0 + 0.1 * rank if rank < 2 else 7.0,
    )  # fmt: skip
    assert sum(run.wait_s) == pytest.approx(0)
    assert len(run.trace.rounds) == pytest.approx(30 / 1.0 + 30 / 1.1 + 30 / 7.0, abs=3)


def test_one_that_is_slower_than_the_threshold_never_contributes_and_is_counted() -> None:
    run = ob.simulate(
        ob.ringmaster(3), None, 2, seconds=40.0, parameters=1, compute_s=lambda step, rank: 5.5 if rank else 1.0
    )
    assert run.gradients[1] > 3
    # Its last one comes when rank 0 has finished, and the weights stand still.
    assert run.lost == tuple((1, step) for step in range(run.gradients[1] - 1))
    assert not any(1 in r.staleness for r in run.trace.rounds[:-1])


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "many"])
def test_a_bad_threshold_is_answered_with_a_sentence(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"ringmaster: threshold is {bad!r}, but must be a whole number of at least 1"):
        ob.ringmaster(bad)
