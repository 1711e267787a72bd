"""Orders in which workers finish their steps, every one of few or drawn ones of many, and a count of what came of each.

A worker's gradient is −1 in the slot of (rank, step), so that slots say what became of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import offbeat as ob
from tests.support.long import unless_long
from tests.support.witness import Witness, one_hot, witnessed

ORDERS_DRAWN = unless_long(400, 3000)
HORIZON = 24  # steps of one worker that have a slot
SLOWLY = ob.Network(latency_s=0.01)  # of the order of the gaps between arrivals: some come while a round is under way


def count(strategy: ob.Strategy, workers: int, horizon: int, **how: Any) -> tuple[ob.Run, Witness]:
    slots = workers * horizon
    watched, seen = witnessed(strategy, lambda rank, step, x: -one_hot(rank * horizon + step, slots), slots)
    return ob.simulate(watched, None, workers, parameters=1, **how), seen


def interleavings(workers: int, steps: int) -> list[tuple[int, ...]]:
    """All orders in which ``workers`` can finish ``steps`` each: (0, 2, 0, 1, …) says who is next."""
    return sorted(set(_orders((steps,) * workers)))


def _orders(left: tuple[int, ...]) -> list[tuple[int, ...]]:
    if not any(left):
        return [()]
    return [
        (rank, *rest) for rank, n in enumerate(left) if n for rest in _orders((*left[:rank], n - 1, *left[rank + 1 :]))
    ]


def times(order: tuple[int, ...], gap_s: float) -> Callable[[int, int], float]:
    """Step times for which workers that never wait finish in this order, ``gap_s`` apart."""
    finish: dict[int, list[int]] = {}
    for k, rank in enumerate(order, start=1):
        finish.setdefault(rank, [0]).append(k)
    return lambda step, rank: gap_s * (finish[rank][step + 1] - finish[rank][step])


def up_to_names(orders: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those in which workers are numbered as they come: the others are these, with other names."""
    return [order for order in orders if [*(seen := dict.fromkeys(order))] == sorted(seen)]


def random_times(draw: random.Random) -> float | Callable[[int, int], float]:
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


def random_end(draw: random.Random) -> dict[str, Any]:
    return draw.choice([{"steps": draw.randrange(8)}, {"samples": draw.randrange(HORIZON)}])


def random_network(draw: random.Random) -> ob.Network:
    return ob.Network(latency_s=draw.choice([0.0, 1e-4, 0.01, 0.05]))
