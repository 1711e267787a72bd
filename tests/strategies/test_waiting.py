"""Who counts in a partial round, and how stale what it applies may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offbeat as ob
from tests.support.witness import heavy, rotating, watch

AT_ONCE = ob.Network(latency_s=0.0, bandwidth_Bps=1e30)
both_ways = pytest.mark.parametrize("catch_up", ["current", "every_step"])


# Who counts.


def test_a_chronic_straggler_starts_no_rounds_of_its_own() -> None:
    slow = lambda step, rank: 0.4 + 0.013 if rank == 0 else 0.1  # noqa: E731
    for strategy in (ob.eager("first", None), ob.wagma(tau=None)):
        run = ob.simulate(strategy, None, 8, seconds=20.0, compute_s=slow, parameters=1)
        fast = max(run.gradients)
        assert abs(len(run.trace.rounds) - fast) <= 2
        assert all(r.started_by != 0 for r in run.trace.rounds[:-2])
        assert min(run.gradients) > fast / 5  # and it goes on at its own pace


def test_the_number_of_rounds_does_not_grow_with_the_number_of_workers() -> None:
    def rounds(workers: int) -> int:
        how: dict[str, Any] = {"seconds": 10.0, "compute_s": ob.delays.uniform(0.09, 0.11), "parameters": 1}
        return len(ob.simulate(ob.eager("first", None), None, workers, **how).trace.rounds)

    assert rounds(4) < 1.15 * rounds(1)
    assert rounds(16) < 1.15 * rounds(1)


@pytest.mark.parametrize(("wait", "least"), [(1, 1), (2, 2), (5, 5), (0.5, 3), (1.0, 5), (0.21, 2)])
@pytest.mark.parametrize("end", [{"steps": 9}, {"samples": 41}], ids=str)
def test_a_hard_quorum_is_there_in_every_round_while_so_many_train(wait: Any, least: int, end: Any) -> None:
    network, round_s = ob.Network(latency_s=1e-5, bandwidth_Bps=1e30), 11e-5  # three hops of news, eight of the sum
    for seed in range(12):
        run = ob.simulate(ob.eager(wait, None), None, 5, **end, compute_s=heavy(seed), parameters=1, network=network)
        for r in run.trace.rounds:
            if r.started_by < 0:
                continue
            training = sum(f > r.end_s - round_s + 1e-9 for f in run.finished_s)
            assert len(r.fresh) >= min(least, training)
        assert sum(run.gradients) == (45 if "steps" in end else 41)


def test_a_quorum_is_counted_anew_when_a_worker_finishes() -> None:
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
def test_nothing_older_than_the_bound_is_ever_applied(bound: int, catch_up: Any) -> None:
    oldest = []
    for seed in range(25):
        for strategy in (
            ob.eager("first", catch_up=catch_up, sync="bounded", staleness=bound),
            ob.wagma(2, catch_up=catch_up, sync="bounded", staleness=bound),
        ):
            run = ob.simulate(strategy, None, 6, 15, compute_s=heavy(seed), seed=seed, parameters=1)
            oldest.append(max(s for r in run.trace.rounds for s in r.staleness.values()))
    assert max(oldest) == bound, "the bound is reached, so it is what holds"


def test_a_bound_waits_only_when_it_must() -> None:
    def end_s(**how: Any) -> float:
        return ob.simulate(ob.eager(**how), None, 6, 40, compute_s=heavy(3), parameters=1).trace.rounds[15].end_s

    free, bounded = end_s(sync_every=None), end_s(sync="bounded", staleness=3)
    assert free < bounded < end_s(wait="everyone")


def test_a_bound_that_is_never_reached_changes_nothing() -> None:
    for catch_up in ("current", "every_step"):
        loose = watch(ob.eager(sync="bounded", staleness=99, catch_up=catch_up), 4, steps=8, compute_s=rotating)
        free = watch(ob.eager(sync_every=None, catch_up=catch_up), 4, steps=8, compute_s=rotating)
        assert loose[0].trace == free[0].trace
        assert torch.equal(loose[1].last[0], free[1].last[0])
