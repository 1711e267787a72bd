"""The laws of WAGMA-SGD in virtual time: what it equals, what it keeps, what it loses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.support.witness import descend, equal_rows, heavy, noise, rotating, watch

TASK = ob.tasks.regression(dimension=4, batch=2)
both_ways = pytest.mark.parametrize("catch_up", ["current", "every_step"])


def early(rank: int, step: int, x: torch.Tensor) -> torch.Tensor:
    """Gradients in the first step only; afterwards nothing but mixing."""
    return noise(rank, 0, len(x)) if step == 0 else torch.zeros_like(x)


@pytest.mark.parametrize(
    ("workers", "group", "rounds"), [(4, 2, 2), (8, 2, 3), (16, 4, 2), (16, 2, 4), (9, 9, 1), (8, 8, 1)]
)
def test_with_nobody_late_rounds_preserve_the_mean_and_end_in_consensus(workers: int, group: int, rounds: int) -> None:
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
def test_with_nobody_late_any_number_of_workers_mixes_towards_one_point(workers: int) -> None:
    _, seen = watch(ob.wagma(2, tau=None), workers, early, steps=60)
    rows = torch.stack(list(seen.last.values()))
    assert torch.allclose(rows, rows[:1].expand_as(rows), rtol=0, atol=1e-6)


@both_ways
def test_one_group_of_all_with_nobody_late_is_allreduce(catch_up: Any) -> None:
    twin = ob.simulate(ob.allreduce(), TASK, 5, 9)
    run = ob.simulate(ob.wagma(5, tau=None, catch_up=catch_up), TASK, 5, 9)
    assert torch.allclose(run.weights, twin.weights, rtol=1e-5, atol=1e-6)
    assert equal_rows(run.weights)


@pytest.mark.parametrize("tau", [1, 3])
def test_groups_of_one_are_local_sgd_whatever_the_delays(tau: int) -> None:
    _, seen = watch(ob.wagma(1, tau=tau, catch_up="every_step"), 4, steps=6, compute_s=rotating)
    x = [torch.zeros(3, dtype=torch.float64) for _ in range(4)]
    for t in range(7):
        assert all(torch.allclose(seen.begun[rank][t], x[rank], rtol=0, atol=1e-14) for rank in range(4))
        x = [w - 0.3 * descend(rank, t, w) for rank, w in enumerate(x)]
        if (t + 1) % tau == 0:
            x = [torch.stack(x).mean(0)] * 4


def test_groups_of_one_are_local_sgd_in_the_other_words_too() -> None:
    run = ob.simulate(ob.wagma(1, tau=3), TASK, 4, 9)
    twin = ob.simulate(ob.local_sgd(3), TASK, 4, 9)
    assert torch.allclose(run.weights, twin.weights, rtol=0, atol=1e-6)


@both_ways
def test_a_full_round_at_every_step_is_synchronous_averaging(catch_up: Any) -> None:
    _, seen = watch(ob.wagma(2, tau=1, catch_up=catch_up), 4, steps=6, compute_s=rotating)
    x = torch.zeros(3, dtype=torch.float64)
    for step in range(6):
        assert all(torch.equal(seen.begun[rank][step], seen.begun[0][step]) for rank in range(4))
        assert torch.allclose(seen.begun[0][step], x, rtol=0, atol=1e-14)
        x = torch.stack([x - 0.3 * descend(rank, step, x) for rank in range(4)]).mean(0)


@both_ways
@pytest.mark.parametrize("workers", [2, 4, 5])
def test_replicas_are_bitwise_equal_after_every_full_round(catch_up: Any, workers: int) -> None:
    tau = 3
    _, seen = watch(ob.wagma(2, tau=tau, catch_up=catch_up), workers, steps=9, compute_s=rotating)
    for rank in range(workers):
        versions = [got.version for got in seen.got[rank]]  # the newest only, where several have come
        assert versions == sorted(set(versions))
        assert versions[-1] == seen.got[0][-1].version
    for count in (tau, 2 * tau):
        begun = [x for r in range(workers) for x, n in zip(seen.begun[r], seen.after[r], strict=True) if n == count]
        assert len(begun) >= workers
        assert equal_rows(begun)


@both_ways
def test_weights_stay_between_the_deposits_they_are_made_of(catch_up: Any) -> None:
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


def test_the_mean_is_not_preserved_when_someone_is_late() -> None:
    _, seen = watch(ob.wagma(4, tau=None), 4, early, steps=8, compute_s=rotating)
    mean = -0.3 * torch.stack([noise(rank, 0) for rank in range(4)]).mean(0)
    assert not torch.allclose(torch.stack(list(seen.last.values())).mean(0), mean, rtol=0, atol=1e-3)
