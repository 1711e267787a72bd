"""Self-clocked averaging in every order of arrivals of three and four workers, and in random ones of up to nine.

A worker's step is 1 in the slot of (rank, step), so the sum of all weights must hold 1 in each slot at the end, whoever
was in which round with whom, and whatever was handed in while it was under way. ``make long`` draws more.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.support.orders import (
    HORIZON,
    ORDERS_DRAWN,
    count,
    interleavings,
    random_end,
    random_network,
    random_times,
    times,
    up_to_names,
)
from tests.support.witness import Witness

ORDERS = {(3, 3): interleavings(3, 3), (4, 2): up_to_names(interleavings(4, 2))}  # of (workers, steps of each)
GAP_S = 0.025  # between two arrivals
NETWORKS = [ob.Network(latency_s=seconds) for seconds in (0.0, 0.01, 0.04)]  # rounds end before the next, or much later
FREE = {  # who waits for nobody
    "all, a quorum of one": ob.self_clocked(1, None, "first"),
    "all, a quorum of half": ob.self_clocked(1, None, 0.5),
    "pairs": ob.self_clocked(1, 2, "first", pause=0.0),
    "pairs that draw": ob.self_clocked(1, 2, "first", draw=2),
}
WAITING = {
    "pairs, not late": ob.self_clocked(1, 2, late=0),
    "all, not late": ob.self_clocked(1, None, "first", late=0),
}
KINDS = {**FREE, **WAITING}


def check(run: ob.Run, seen: Witness, horizon: int) -> None:
    """Every step is in the sum of all weights once, and nothing else is."""
    once = torch.zeros(run.workers, horizon, dtype=torch.float64)
    for rank, taken in enumerate(run.gradients):
        once[rank, :taken] = 1.0
    total = torch.stack([seen.last[rank] for rank in range(run.workers)]).sum(0)
    assert torch.allclose(total, once.reshape(-1), rtol=0, atol=1e-12)
    versions = sorted(r.version for r in run.trace.rounds)
    assert versions == list(range(len(versions)))


def test_there_are_as_many_orders_as_there_should_be() -> None:
    assert len(ORDERS[3, 3]) == 1680  # 9! / 3!³
    assert len(ORDERS[4, 2]) * 24 == 2520  # 8! / 2!⁴


@pytest.mark.parametrize(("workers", "steps"), ORDERS)
@pytest.mark.parametrize("name", KINDS)
def test_in_every_order_of_few_workers_the_sum_of_all_is_that_of_their_steps(
    name: str, workers: int, steps: int
) -> None:
    # Pairs of three with every name, as a draw goes by names; else one order of those that differ by them alone.
    orders = ORDERS[workers, steps] if name == "pairs" else up_to_names(ORDERS[workers, steps])
    for k, order in enumerate(orders):
        how: dict[str, Any] = {"compute_s": times(order, GAP_S), "network": NETWORKS[k % 3], "seed": k}
        run, seen = count(KINDS[name], workers, steps, steps=steps, **how)
        check(run, seen, steps)
        assert run.gradients == (steps,) * workers
        assert name in WAITING or sum(run.wait_s) == 0.0


def random_self_clocked(draw: random.Random, workers: int) -> ob.Strategy:
    group, late = draw.choice([None, 2, 2, 3, draw.randint(1, workers)]), draw.choice([0, 1, 1])
    wait: Any = draw.choice(["first", "majority", "everyone", 2, 0.125, 0.5])
    drawn = draw.choice([0, 1, 2]) if group == 2 else 0
    return ob.self_clocked(draw.choice([1, 1, 2, 3]), group, wait, late, draw.choice([0.0, 1.0]), drawn)


def test_random_schedules_of_self_clocked_conserve_every_step() -> None:
    for seed in range(ORDERS_DRAWN):
        draw = random.Random(seed)
        workers = draw.randint(1, 9)
        strategy = random_self_clocked(draw, workers)
        how: dict[str, Any] = random_end(draw) | {"network": random_network(draw), "compute_s": random_times(draw)}
        run, seen = count(strategy, workers, HORIZON, seed=seed, **how)
        check(run, seen, HORIZON)
