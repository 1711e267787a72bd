"""Every order of arrivals of three workers, and hundreds of random ones of up to nine: nothing hangs, nothing is lost.

``make long`` draws more.

For eager-SGD a worker's gradient is 1 in the slot of (rank, step); after a run each slot must hold exactly 1/P on every
worker. Whole runs of WAGMA-SGD are compared with a second, slow simulator. And the trace says what happened.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.support.orders import (
    HORIZON,
    ORDERS_DRAWN,
    SLOWLY,
    count,
    interleavings,
    random_end,
    random_network,
    random_times,
    times,
    up_to_names,
)
from tests.support.witness import Witness, descend, heavy, rotating, watch

ORDERS = interleavings(3, 3)
UP_TO_NAMES = up_to_names(ORDERS)


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


def test_there_are_as_many_orders_as_there_should_be() -> None:
    assert len(ORDERS) == 1680  # 9! / 3!³
    assert len(UP_TO_NAMES) * 6 == 1680
    assert {tuple(p[r] for r in order) for order in UP_TO_NAMES for p in permutations(range(3))} == set(ORDERS)


@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize("wait", ["first", "majority", 2])
def test_every_order_of_three_workers_and_three_steps_applies_all_of_it_once(wait: Any, catch_up: Any) -> None:
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
def test_in_every_order_of_three_workers_the_bound_holds(bound: int, catch_up: Any) -> None:
    for order in UP_TO_NAMES:
        how: dict[str, Any] = {"catch_up": catch_up, "sync": "bounded", "staleness": bound}
        run, seen = count(ob.eager(**how), 3, 3, steps=3, compute_s=times(order, 0.025), network=SLOWLY)
        check(run, seen, 3, 3)
        assert all(s <= bound for r in run.trace.rounds if r.started_by >= 0 for s in r.staleness.values())
        run = ob.simulate(ob.wagma(2, **how), None, 3, 3, compute_s=times(order, 0.025), network=SLOWLY, parameters=1)
        assert all(s <= bound for r in run.trace.rounds for s in r.staleness.values())


def random_eager(draw: random.Random) -> tuple[ob.Strategy, int | None]:
    late, bound = draw.choice([0, 0, 1]), draw.choice([None, 1, 2, 5])
    how: dict[str, Any] = {"sync_every": draw.choice([None, 1, 2, 5, 33])} if not bound else {}
    how |= {"sync": "bounded", "staleness": bound + late} if bound else {}
    wait: Any = draw.choice(["first", "majority", "everyone", 1, 2, 3, 0.25, 0.5, 0.9])
    strategy = ob.eager(wait, catch_up=draw.choice(["current", "every_step"]), late=late, **how)
    return strategy, bound and bound + late


def test_random_schedules_of_eager_conserve_every_gradient() -> None:
    for seed in range(ORDERS_DRAWN):
        draw = random.Random(seed)
        (strategy, bound), workers = random_eager(draw), draw.randint(1, 9)
        how: dict[str, Any] = random_end(draw) | {"network": random_network(draw), "compute_s": random_times(draw)}
        run, seen = count(strategy, workers, HORIZON, seed=seed, **how)
        check(run, seen, workers, HORIZON)
        if bound:
            assert all(s <= bound for r in run.trace.rounds for s in r.staleness.values()), (seed, str(strategy))


def test_random_schedules_of_wagma_end_within_their_bound() -> None:
    for seed in range(ORDERS_DRAWN):
        draw = random.Random(seed)
        workers, late, bound = draw.randint(1, 9), draw.choice([0, 0, 1]), draw.choice([None, 1, 2, 4])
        how: dict[str, Any] = {"tau": draw.choice([None, 1, 3, 10])} if not bound else {}
        how |= {"sync": "bounded", "staleness": bound + late} if bound else {}
        wait: Any = draw.choice(["first", "majority", 2, 0.5, "everyone"])
        strategy = ob.wagma(
            draw.choice([None, draw.randint(1, workers)]), wait=wait,
            catch_up=draw.choice(["current", "every_step"]), late=late, **how,
        )  # fmt: skip
        run = ob.simulate(
            strategy, None, workers, seed=seed, parameters=1, network=random_network(draw),
            compute_s=random_times(draw), **random_end(draw),
        )  # fmt: skip
        assert [r.version for r in run.trace.rounds] == list(range(len(run.trace.rounds)))
        for r in run.trace.rounds:  # last weights always answer; shared ones carry new steps only (late implies them)
            assert set(r.staleness) <= set(range(workers)) if late else set(r.staleness) == set(range(workers))
        if bound:
            assert all(s <= bound + late for r in run.trace.rounds for s in r.staleness.values()), (seed, str(strategy))


def reference(
    workers: int,
    steps: int,
    group: int,
    tau: int | None,
    catch_up: str,
    quorum: int,
    seconds: Callable[[int, int], float],
    latency_s: float,
    lr: float = 0.3,
) -> tuple[list[list[list[float]]], list[list[float]]]:
    """WAGMA-SGD once more, slowly and from the text alone: lists of numbers and a heap of (time, what happens)."""
    groups, everyone, dimension = ob.topology.groups(workers, group), list(range(workers)), 3
    w = [[0.0] * dimension for _ in everyone]
    buffer = [list(x) for x in w]  # what answers for a worker
    stamp = [0] * workers  # how many times it has been written
    step, contained, have = [0] * workers, [0] * workers, [0] * workers
    arrived: dict[int, set[int]] = {}
    outcome: dict[tuple[int, int], tuple[list[float], int, int]] = {}  # (round, rank) → mean, group size, my stamp
    begun = [[list(x)] for x in w]
    pending: list[tuple[int, list[int]]] = []
    training, state = set(everyone), {"next": 0}
    merged = [0] * workers
    heap: list[tuple[float, int, str, Any]] = []
    ticket = itertools.count()
    news_s = latency_s * max(0, (workers - 1).bit_length())

    def later(at: float, what: str, about: Any) -> None:
        heapq.heappush(heap, (at, next(ticket), what, about))

    def full(v: int) -> bool:
        return tau is not None and (v + 1) % tau == 0

    def maybe_start(now: float) -> None:
        v = state["next"]
        here = arrived.get(v, set()) & training
        need = len(training) if full(v) else min(quorum, len(training))
        if here and len(here) >= need:
            state["next"] += 1
            later(now + news_s, "news", v)

    def run_blocks(now: float) -> None:
        for v, block in list(pending):
            if all(have[r] == v for r in block):
                pending.remove((v, block))
                total = [sum(buffer[r][k] for r in block) / len(block) for k in range(dimension)]
                later(now + 2 * (len(block) - 1) * latency_s, "result", (v, block, total, [stamp[r] for r in block]))

    def merge(rank: int, v: Any) -> None:
        mean, size, mine = outcome[v, rank]
        if mine == stamp[rank]:
            w[rank] = list(mean)
        elif size > 1:
            w[rank] = [(size * m + x) / (size + 1) for m, x in zip(mean, w[rank], strict=True)]
        merged[rank] = v + 1

    def go_on(rank: int, now: float) -> None:
        """Merge what there is to merge and begin the next step, or end."""
        t = step[rank]
        newest = min(have[rank], t + 1) if catch_up == "every_step" else have[rank]
        if newest > merged[rank]:
            merge(rank, newest - 1)
        contained[rank] = merged[rank]
        step[rank] += 1
        begun[rank].append(list(w[rank]))
        if step[rank] < steps:
            later(now + seconds(step[rank], rank), "step", rank)
        else:
            training.discard(rank)
            maybe_start(now)
            idle(rank)

    def idle(rank: int) -> None:
        """No gradients any more: adopt every result, answer with what one holds."""
        while True:
            if merged[rank] == have[rank]:
                buffer[rank], stamp[rank] = list(w[rank]), stamp[rank] + 1
                return
            w[rank], merged[rank] = list(outcome[merged[rank], rank][0]), merged[rank] + 1

    waits: dict[int, int] = {}
    for rank in everyone:
        later(seconds(0, rank), "step", rank)
    while heap:
        now, _, what, about = heapq.heappop(heap)
        if what == "step":
            rank, t = about, step[about]
            g = descend(rank, t, torch.tensor(w[rank], dtype=torch.float64)).tolist()
            w[rank] = [x - lr * d for x, d in zip(w[rank], g, strict=True)]
            buffer[rank], stamp[rank] = list(w[rank]), stamp[rank] + 1
            v = t if catch_up == "every_step" else have[rank]
            counts = have[rank] <= t if catch_up == "every_step" else contained[rank] == v or full(v)
            if counts:
                arrived.setdefault(v, set()).add(rank)
                waits[rank] = v
                maybe_start(now)
            else:
                go_on(rank, now)
        elif what == "news":
            v = about
            blocks: list[Any] = [everyone] if full(v) else sorted({groups(v).block(r) or () for r in everyone})
            pending += [(v, list(b)) for b in blocks]
            run_blocks(now)
        else:
            v, block, total, stamps = about
            for rank, mine in zip(block, stamps, strict=True):
                outcome[v, rank] = (total, len(block), mine)
                have[rank] = v + 1
            for rank in block:
                if waits.get(rank) == v:
                    del waits[rank]
                    go_on(rank, now)
                elif rank not in training:
                    idle(rank)
            run_blocks(now)
    assert not waits
    return begun, w


SLOW_ONE = lambda step, rank: 0.41 + 0.001 * step if rank == 1 else 0.1 + 0.003 * rank  # noqa: E731


@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize(
    ("workers", "group", "tau", "quorum"),
    [(4, 2, 4, 1), (4, 2, None, 1), (8, 4, 5, 3), (3, 3, 4, 1), (5, 2, 3, 1), (7, 3, 10, 2), (6, 1, 4, 1)],
)
@pytest.mark.parametrize("latency_s", [0.0, 0.004, 0.03])
def test_late_workers_of_wagma_blend_as_the_text_says(
    catch_up: Any, workers: int, group: int, tau: int | None, quorum: int, latency_s: float
) -> None:
    for pattern in (rotating, heavy(1), heavy(2), SLOW_ONE):
        begun, last = reference(workers, 8, group, tau, catch_up, quorum, pattern, latency_s)
        run, seen = watch(
            ob.wagma(group, tau, wait=quorum, catch_up=catch_up), workers, steps=8, compute_s=pattern,
            network=ob.Network(latency_s=latency_s, bandwidth_Bps=1e30),
        )  # fmt: skip
        for rank in range(workers):
            ours = torch.stack(seen.begun[rank])
            assert torch.allclose(ours, torch.tensor(begun[rank], dtype=torch.float64), rtol=0, atol=1e-12)
            assert torch.allclose(seen.last[rank], torch.tensor(last[rank], dtype=torch.float64), rtol=0, atol=1e-12)
        if group > 1:
            ages = [age for r in run.trace.rounds for age in r.staleness.values()]
            assert any(ages), "someone was late"


# The trace.


def test_the_trace_says_who_started_who_was_fresh_how_stale_and_how_long_each_one_waited() -> None:
    # News 0.01, sum 0.02 each round. Rank 0 takes 1.0, rank 1 takes 2.5.
    run = ob.simulate(
        ob.eager("first", 3), None, 2, seconds=5.5, parameters=1, compute_s=lambda step, rank: [1.0, 2.5][rank],
        network=ob.Network(latency_s=0.01, bandwidth_Bps=1e30),
    )  # fmt: skip
    zero, one, two, three = run.trace.rounds[:4]
    assert [r.version for r in run.trace.rounds] == list(range(len(run.trace.rounds)))
    assert (zero.started_by, zero.fresh, dict(zero.staleness)) == (0, (0,), {0: 0})
    assert zero.waited_s == {0: pytest.approx(0.03), 1: 0.0}
    assert (one.started_by, one.fresh, dict(one.staleness)) == (0, (0,), {0: 0})
    assert (two.started_by, two.fresh, dict(two.staleness)) == (0, (0,), {0: 0, 1: 2})  # full
    assert two.waited_s == {0: pytest.approx(0.03), 1: pytest.approx(3.09 - 2.5)}
    assert (three.started_by, three.fresh, dict(three.staleness)) == (0, (0,), {0: 0})
    assert [r.end_s for r in (zero, one, two)] == pytest.approx([1.03, 2.06, 3.09])


@pytest.mark.parametrize("make", [ob.eager, ob.wagma])
@pytest.mark.parametrize("catch_up", ["current", "every_step"])
def test_what_the_rounds_made_workers_wait_is_what_they_waited(make: Any, catch_up: Any) -> None:
    run = ob.simulate(make(catch_up=catch_up), None, 5, 12, compute_s=heavy(8), parameters=1)
    total = [sum(r.waited_s.get(rank, 0.0) for r in run.trace.rounds) for rank in range(5)]
    assert total == pytest.approx(run.wait_s)


def test_the_weights_that_all_begin_with_are_nobodys_fresh_work() -> None:
    run = ob.simulate(ob.wagma(2, tau=None), None, 4, 3, parameters=1, compute_s=lambda step, rank: 1.0 + rank)
    assert run.trace.rounds[0].fresh == (0,)


def test_a_round_of_many_groups_has_one_record() -> None:
    run = ob.simulate(ob.wagma(2, tau=4), None, 8, 10, parameters=1, compute_s=heavy(0))
    assert [r.version for r in run.trace.rounds] == list(range(len(run.trace.rounds)))
    assert all(set(r.staleness) == set(r.waited_s) == set(range(8)) for r in run.trace.rounds)
