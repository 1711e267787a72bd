"""Steps in proportion to speed: who takes how many, what they count for, and that equal speeds change nothing."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import offbeat as ob
from offbeat.method import pacing
from offbeat.strategies.by_speed import Came
from tests.support.formulas import AT_ONCE, HEAVY, LR, MOMENTUM, close, start
from tests.support.long import LONG

DILOCO_S = (0.58, 0.75, 1.51, 3.33)
PAIRS = {
    "local_sgd": (ob.local_sgd(4), ob.local_sgd(4, pace="speed")),
    "local_sgd, coded": (ob.local_sgd(4, ob.codec.int8()), ob.local_sgd(4, ob.codec.int8(), pace="speed")),
    "local_sgd, topk": (ob.local_sgd(3, ob.codec.topk(2, 4)), ob.local_sgd(3, ob.codec.topk(2, 4), pace="speed")),
    "diloco": (ob.diloco(4), ob.diloco(4, pace="speed")),
    "diloco, merged": (ob.diloco(3, merge=0.5), ob.diloco(3, merge=0.5, pace="speed")),
    "diloco, coded": (ob.diloco(4, codec=ob.codec.int8()), ob.diloco(4, codec=ob.codec.int8(), pace="speed")),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("workers", "steps"), [(1, 6), (2, 8), (5, 13), (3, 2)])
def test_workers_of_equal_speed_end_with_the_bits_of_an_equal_pace(name: str, workers: int, steps: int) -> None:
    equal, speed = (ob.simulate(s, HEAVY, workers, steps, compute_s=0.1) for s in PAIRS[name])
    assert torch.equal(speed.weights, equal.weights)
    assert torch.equal(speed.final, equal.final)


def test_each_worker_is_given_its_share_of_the_steps() -> None:
    assert pacing.in_proportion(10, [10] * 4, [10 * s for s in DILOCO_S]) == [10, 8, 4, 1]
    assert pacing.in_proportion(50, [50] * 4, [50 * s for s in DILOCO_S]) == [50, 40, 20, 9]
    assert pacing.in_proportion(10, [10, 10], [10.0, 10.03]) == [10, 10], "a third of a percent is no reason"
    assert pacing.in_proportion(4, [4, 4], [0.4, 40.0]) == [4, 1], "one step at least"
    assert pacing.in_proportion(4, [4, 0, 2], [0.4, 0.0, 0.4]) == [4, 4, 2], "who took no step has no speed"
    assert pacing.in_proportion(4, [3, 4], [0.0, 0.0]) == [4, 4], "nor has anybody where time stands still"


@given(st.integers(1, 100), st.lists(st.tuples(st.integers(1, 50), st.floats(1e-3, 1e3)), min_size=1, max_size=9))
def test_the_fastest_takes_the_whole_period_and_nobody_more(period: int, did: list[tuple[int, float]]) -> None:
    plan = pacing.in_proportion(period, [n for n, _ in did], [n * s for n, s in did])
    assert max(plan) == period
    assert min(plan) >= 1
    assert plan[min(range(len(did)), key=lambda rank: did[rank][1])] == period


@given(st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any))
def test_the_weights_of_an_average_sum_to_one_worker_each(steps: list[int]) -> None:
    came = Came(tuple(steps), (1.0,) * len(steps), (True,) * len(steps), len(steps))
    weights = [came.weight(rank) for rank in range(len(steps))]
    assert math.fsum(weights) == pytest.approx(len(steps), rel=1e-12)
    assert all((w == 0) == (n == 0) for w, n in zip(weights, steps, strict=True))
    if len(set(steps)) == 1:
        assert weights == [1.0] * len(steps), "exactly: nothing is multiplied where all are alike"


def by_hand(H: int, seconds: tuple[float, ...], steps: int) -> Tensor:
    """Every worker has ``steps`` batches; the mean of what they hold in the end."""
    P = len(seconds)
    w, v, done, plan = start(P, HEAVY), torch.zeros(P, 7, dtype=torch.float64), [0] * P, [H] * P
    while any(d < steps for d in done):
        took = [min(n, steps - d) for n, d in zip(plan, done, strict=True)]
        for rank, n in enumerate(took):
            for t in range(done[rank], done[rank] + n):
                x, y = HEAVY.batch(rank, t)
                v[rank] = MOMENTUM * v[rank] + 2 / len(x) * x.T @ (x @ w[rank] - y[:, 0])
                w[rank] = w[rank] - LR * v[rank]
            done[rank] += n
        if all(n < planned for n, planned in zip(took, plan, strict=True)):
            break
        w = (torch.tensor(took, dtype=torch.float64) / sum(took) @ w).expand_as(w).clone()
        fastest = max(1 / s for s, n in zip(seconds, took, strict=True) if n)
        plan = [
            max(1, min(H, math.floor(1.05 / s / fastest * H))) if n else H for s, n in zip(seconds, took, strict=True)
        ]
    return w.mean(0)


@pytest.mark.parametrize("steps", [4, 9, 22])
@pytest.mark.parametrize("seconds", [(0.1, 0.2, 0.4), (0.3, 0.1, 0.1, 0.25), (0.5, 0.1)])
def test_an_average_counts_steps(seconds: tuple[float, ...], steps: int) -> None:
    speed = ob.local_sgd(4, pace="speed")
    run = ob.simulate(speed, HEAVY, len(seconds), steps, compute_s=lambda step, rank: seconds[rank])
    close(run.final, by_hand(4, seconds, steps))


def share_of_throughput(strategy: ob.Strategy, seconds: float) -> float:
    """Against workers that never wait."""
    spec = ob.delays.profile("async-diloco")
    run = ob.simulate(strategy, None, workers=4, seconds=seconds, compute_s=spec, network=AT_ONCE)
    return sum(run.gradients) / sum(run.seconds / s for s in DILOCO_S)


@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_chronically_slow_workers_cost_a_tenth_instead_of_two_thirds(method: str) -> None:
    assert share_of_throughput(ob.strategy(method, period=10), 2000) == pytest.approx(0.30, abs=0.02)
    assert share_of_throughput(ob.strategy(method, period=10, pace="speed"), 2000) > 0.90
    assert share_of_throughput(ob.strategy(method, period=50, pace="speed"), 20_000) > 0.96


def test_workers_that_are_nearly_alike_lose_nothing() -> None:
    """Rounded down, all but the fastest would be a step short: a tenth of the work."""
    spec = ob.delays.profile("bytedance-st")
    equal, speed = (
        ob.simulate(ob.local_sgd(10, pace=pace), None, 16, seconds=200.0, compute_s=spec, network=AT_ONCE)
        for pace in ("equal", "speed")
    )
    assert sum(speed.gradients) > 0.99 * sum(equal.gradients)


def test_a_worker_that_becomes_slow_is_given_fewer_steps_from_the_next_period_on() -> None:
    """Rank 1 takes half the speed from its 13th step on; it has 6 steps a period before, and 3 later."""
    run = ob.simulate(
        ob.local_sgd(6, pace="speed"),
        None,
        workers=2,
        samples=120,
        compute_s=lambda step, rank: 0.2 if rank == 1 and step >= 12 else 0.1,
        network=AT_ONCE,
        spans=True,
    )
    waits = [s for s in run.trace.spans if s.doing == "wait" and s.rank == 0 and s.end_s - s.start_s > 1e-9]
    assert len(waits) == 1, "one period is waited for, and none after it"
    assert waits[0].end_s - waits[0].start_s == pytest.approx(0.6)


ENDS: list[dict[str, Any]] = [{"samples": 23}, {"seconds": 1.55}, {"steps": 0}, {"steps": 7}, {"samples": 3}]


@pytest.mark.parametrize("end", ENDS, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_any_end_and_uneven_data_use_every_sample(name: str, end: dict[str, Any]) -> None:
    run = ob.simulate(PAIRS[name][1], HEAVY, 5, compute_s=lambda step, rank: 0.1 * (1 + rank), **end)
    assert "samples" not in end or sum(run.gradients) == end["samples"]
    assert torch.isfinite(run.final).all()


@pytest.mark.parametrize("name", PAIRS)
def test_time_alone_takes_the_same_steps(name: str) -> None:
    how: dict[str, Any] = {"workers": 4, "seconds": 40.0, "compute_s": ob.delays.profile("async-diloco")}
    real, time = (ob.simulate(PAIRS[name][1], task, network=AT_ONCE, **how) for task in (HEAVY, None))
    assert time.gradients == real.gradients
    assert time.finished_s == pytest.approx(real.finished_s)


def test_fragments_do_not_go_with_a_pace() -> None:
    with pytest.raises(
        ValueError, match=r"diloco: pace='speed' sends the whole model .* use fragments=1 and overlap=0"
    ):
        ob.diloco(4, fragments=2, pace="speed")
    with pytest.raises(ValueError, match="local_sgd: pace is 'fast', but must be one of 'equal', 'speed'"):
        ob.local_sgd(pace="fast")  # type: ignore[arg-type]


SHORT: dict[str, tuple[Any, dict[str, Any], int]] = {
    "local_sgd": (ob.local_sgd, {}, 8),
    "local_sgd, coded": (ob.local_sgd, {"codec": ob.codec.int8(), "moments": 1}, 8),
    "local_sgd, said twice": (ob.local_sgd, {"pace": "speed"}, 8),
    "diloco": (ob.diloco, {}, 500),
    "diloco, said twice": (ob.diloco, {"pace": "speed", "merge": 0.5}, 500),
}


@pytest.mark.parametrize("name", [name for name in SHORT if LONG or name != "diloco, said twice"])
def test_speed_as_the_period_is_the_default_one_with_steps_by_speed_bit_for_bit(name: str) -> None:
    """Of two workers, one of half the speed: H steps each, then H and H/2, and their average."""
    make, others, period = SHORT[name]
    short, long = (
        ob.simulate(
            made, HEAVY, 2, samples=period * 7 // 2, compute_s=lambda step, rank: 0.1 * (1 + rank), network=AT_ONCE
        )
        for made in (make("speed", **others), make(period, **others | {"pace": "speed"}))
    )
    assert short.hash == long.hash
    assert torch.equal(short.final, long.final)
    assert short.gradients == long.gradients
    assert short.gradients[0] > 1.25 * short.gradients[1]


@pytest.mark.parametrize("make", [ob.local_sgd, ob.diloco])
def test_a_number_alone_is_an_equal_pace(make: Any) -> None:
    """Where one is three times slower, with steps by speed the other would have taken more."""
    alone, equal = (
        ob.simulate(made, HEAVY, 2, samples=16, compute_s=lambda step, rank: 0.1 * (1 + 2 * rank), network=AT_ONCE)
        for made in (make(4), make(4, pace="equal"))
    )
    assert alone.hash == equal.hash
    assert alone.gradients == equal.gradients == (8, 8)


@pytest.mark.parametrize("name", SHORT)
def test_speed_as_the_period_is_printed_sent_and_written_as_it_was_given(name: str) -> None:
    make, others, _ = SHORT[name]
    made = make("speed", **others)
    assert made.settings["period"] == "speed"
    assert str(make(**made.settings)) == str(made) == str(pickle.loads(pickle.dumps(made)))
    assert json.loads(json.dumps(made.written()))["settings"]["period"] == "speed"


@pytest.mark.parametrize("make", [ob.local_sgd, ob.diloco])
def test_a_period_that_is_none_and_a_pace_against_it_are_refused(make: Any) -> None:
    for wrong in ("fast", "equal", 0, 2.5):
        with pytest.raises(
            ValueError, match=f"period is {wrong!r}, but must be a whole number of at least 1, or 'speed'"
        ):
            make(period=wrong)
    with pytest.raises(
        ValueError,
        match=r"period='speed' is a period of .* with pace='speed', but pace is 'equal'; leave pace out, or give",
    ):
        make(period="speed", pace="equal")


def test_fragments_do_not_go_with_speed_as_the_period_either() -> None:
    with pytest.raises(ValueError, match=r"diloco: pace='speed' sends the whole model .* or an equal pace"):
        ob.diloco("speed", fragments=3)
