"""Every order of arrivals of three workers, and thousands of random ones of up to nine: nothing hangs, nothing is lost.

A worker's gradient is 1 in the slot of (rank, step); after a run each slot must hold exactly 1/P on every worker.
"""

from __future__ import annotations

import random
from itertools import permutations

import pytest
import torch
from test_counting import Witness, one_hot, witnessed

import offbeat as ob

HORIZON = 24  # steps of one worker that have a slot
SLOWLY = ob.Network(latency_s=0.01)  # of the order of the gaps between arrivals: some come while a round is under way


def count(strategy: ob.Strategy, workers: int, horizon: int, **how) -> tuple[ob.Run, Witness]:
    slots = workers * horizon
    watched, seen = witnessed(strategy, lambda rank, step, x: -one_hot(rank * horizon + step, slots), slots)
    return ob.simulate(watched, None, workers, parameters=1, **how), seen


def check(run: ob.Run, seen: Witness, workers: int, horizon: int) -> None:
    """Exactly once, on every worker, from the same results."""
    once = torch.zeros(workers * horizon, dtype=torch.float64)
    for rank, taken in enumerate(run.gradients):
        once[rank * horizon : rank * horizon + taken] = 1.0 / workers
    first = seen.got[0]
    assert [got.version for got in first] == list(range(len(first)))
    for rank in range(workers):
        assert torch.equal(seen.last[rank], once)
        assert [g.version for g in seen.got[rank]] == [g.version for g in first]
        assert all(torch.equal(a.value.parts[0], b.value.parts[0]) for a, b in zip(seen.got[rank], first, strict=True))
    assert [r.version for r in run.trace.rounds] == list(range(len(run.trace.rounds)))


def interleavings(workers: int, steps: int) -> list[tuple[int, ...]]:
    """All orders in which ``workers`` can finish ``steps`` each: (0, 2, 0, 1, …) says who is next."""
    return sorted(set(_orders((steps,) * workers)))


def _orders(left: tuple[int, ...]) -> list[tuple[int, ...]]:
    if not any(left):
        return [()]
    return [
        (rank, *rest)
        for rank, n in enumerate(left)
        if n
        for rest in _orders((*left[:rank], n - 1, *left[rank + 1 :]))
    ]


def times(order: tuple[int, ...], gap_s: float):
    """Step times for which workers that never wait finish in this order, ``gap_s`` apart."""
    finish: dict[int, list[int]] = {}
    for k, rank in enumerate(order, start=1):
        finish.setdefault(rank, [0]).append(k)
    return lambda step, rank: gap_s * (finish[rank][step + 1] - finish[rank][step])


ORDERS = interleavings(3, 3)
UP_TO_NAMES = [order for order in ORDERS if [*dict.fromkeys(order)] == [0, 1, 2]]


def test_there_are_as_many_orders_as_there_should_be():
    assert len(ORDERS) == 1680  # 9! / 3!³
    assert len(UP_TO_NAMES) * 6 == 1680
    assert {tuple(p[r] for r in order) for order in UP_TO_NAMES for p in permutations(range(3))} == set(ORDERS)


@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize("wait", ["first", "majority", 2])
def test_every_order_of_three_workers_and_three_steps_applies_all_of_it_once(wait, catch_up):
    # Ranks have names only where one of them is drawn.
    for k, order in enumerate(ORDERS if wait == "majority" else UP_TO_NAMES):
        for late in (0, 1) if wait != "majority" else (k % 2,):
            strategy = ob.eager(wait, sync_every=3, catch_up=catch_up, late=late)
            network = SLOWLY if k % 3 else ob.Network(latency_s=0.0)
            run, seen = count(strategy, 3, 3, steps=3, compute_s=times(order, 0.025), network=network, seed=k)
            check(run, seen, 3, 3)
            if not late:  # from one full round to the next, two others
                assert all(s <= 2 for r in run.trace.rounds if r.started_by >= 0 for s in r.staleness.values())


@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize("bound", [1, 2])
def test_in_every_order_of_three_workers_the_bound_holds(bound, catch_up):
    for order in UP_TO_NAMES:
        how = {"catch_up": catch_up, "sync": "bounded", "staleness": bound}
        run, seen = count(ob.eager(**how), 3, 3, steps=3, compute_s=times(order, 0.025), network=SLOWLY)
        check(run, seen, 3, 3)
        assert all(s <= bound for r in run.trace.rounds if r.started_by >= 0 for s in r.staleness.values())
        run = ob.simulate(ob.wagma(2, **how), None, 3, 3, compute_s=times(order, 0.025), network=SLOWLY, parameters=1)
        assert all(s <= bound for r in run.trace.rounds for s in r.staleness.values())


def random_eager(draw: random.Random) -> tuple[ob.Strategy, int | None]:
    late, bound = draw.choice([0, 0, 1]), draw.choice([None, 1, 2, 5])
    how = {"sync": "bounded", "staleness": bound + late} if bound else {"sync_every": draw.choice([None, 1, 2, 5, 33])}
    wait = draw.choice(["first", "majority", "everyone", 1, 2, 3, 0.25, 0.5, 0.9])
    strategy = ob.eager(wait, catch_up=draw.choice(["current", "every_step"]), late=late, **how)
    return strategy, bound and bound + late


def random_times(draw: random.Random):
    kind, seed = draw.randrange(5), draw.randrange(1 << 30)
    if kind == 0:
        return lambda step, rank: random.Random(hash((seed, step, rank))).choice([0.0, 0.05, 0.1, 0.25])  # many ties
    if kind == 1:
        return lambda step, rank: 0.1 if rank else 1.0  # one is always slow
    if kind == 2:
        return lambda step, rank: 0.05 * random.Random(hash((seed, step, rank))).paretovariate(0.8)
    if kind == 3:
        return lambda step, rank: random.Random(hash((seed, step, rank))).expovariate(10)
    return 0.1


def random_end(draw: random.Random) -> dict[str, float]:
    return draw.choice([{"steps": draw.randrange(8)}, {"samples": draw.randrange(HORIZON)}])


def random_network(draw: random.Random) -> ob.Network:
    return ob.Network(latency_s=draw.choice([0.0, 1e-4, 0.01, 0.05]))


def test_thousands_of_random_schedules_of_eager_conserve_every_gradient():
    for seed in range(3000):
        draw = random.Random(seed)
        (strategy, bound), workers = random_eager(draw), draw.randint(1, 9)
        how = random_end(draw) | {"network": random_network(draw), "compute_s": random_times(draw)}
        run, seen = count(strategy, workers, HORIZON, seed=seed, **how)
        check(run, seen, workers, HORIZON)
        if bound:
            assert all(s <= bound for r in run.trace.rounds for s in r.staleness.values()), (seed, str(strategy))


def test_thousands_of_random_schedules_of_wagma_end_within_their_bound():
    for seed in range(2500):
        draw = random.Random(seed)
        workers, late, bound = draw.randint(1, 9), draw.choice([0, 0, 1]), draw.choice([None, 1, 2, 4])
        how = {"sync": "bounded", "staleness": bound + late} if bound else {"tau": draw.choice([None, 1, 3, 10])}
        strategy = ob.wagma(
            draw.choice([None, draw.randint(1, workers)]), wait=draw.choice(["first", "majority", 2, 0.5, "everyone"]),
            catch_up=draw.choice(["current", "every_step"]), late=late, **how,
        )  # fmt: skip
        run = ob.simulate(
            strategy, None, workers, seed=seed, parameters=1, network=random_network(draw),
            compute_s=random_times(draw), **random_end(draw),
        )  # fmt: skip
        assert [r.version for r in run.trace.rounds] == list(range(len(run.trace.rounds)))
        assert all(set(r.staleness) == set(range(workers)) for r in run.trace.rounds)
        if bound:
            assert all(s <= bound + late for r in run.trace.rounds for s in r.staleness.values()), (seed, str(strategy))
