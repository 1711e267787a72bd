"""Counting samples in virtual time: each is applied exactly once, or it is named among those that were lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat as ob
from tests.support.witness import applied, counting, produced

WAITS = ["first", "majority", "everyone", 2, 0.5]
eagers = st.builds(
    lambda bound, **how: ob.eager(**how, **({"sync": "bounded", "staleness": bound} if bound else {})),
    wait=st.sampled_from(WAITS),
    sync_every=st.sampled_from([None, 1, 3, 7]),
    catch_up=st.sampled_from(["current", "every_step"]),
    late=st.sampled_from([0, 1]),
    bound=st.sampled_from([None, 2, 4]),
)
ends = st.one_of(
    st.builds(lambda n: {"steps": n}, st.integers(0, 7)),
    st.builds(lambda n: {"samples": n}, st.integers(0, 30)),
    st.builds(lambda s: {"seconds": s}, st.floats(0.05, 0.6)),
)
SPREADS = [
    None, ob.delays.exponential(0.2), ob.delays.chronic(rank=0, seconds=0.35), ob.delays.rotating(0.0, 0.4),
    ob.delays.pareto(0.05, alpha=1.3),
]  # fmt: skip
NETWORKS = [ob.Network(), ob.Network(latency_s=0.0), ob.Network(latency_s=0.03)]


@given(eagers, ends, st.integers(1, 9), st.sampled_from(SPREADS), st.sampled_from(NETWORKS), st.integers(0, 999))
@settings(max_examples=40)
def test_eager_applies_every_sample_exactly_once(
    strategy: ob.Strategy, end: Any, workers: int, delays: Any, network: Any, seed: int
) -> None:
    run = ob.simulate(strategy, counting(workers), workers, **end, delays=delays, network=network, seed=seed)
    assert applied(run) == dict.fromkeys(produced(run), 1.0)
    assert run.lost == ()


@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("end", [{"steps": 6}, {"samples": 23}, {"seconds": 0.9}], ids=str)
def test_what_is_dropped_is_named_and_everything_else_applied_once(catch_up: Any, late: Any, end: Any) -> None:
    strategy = ob.eager("first", sync_every=4, stale="drop", catch_up=catch_up, late=late)
    run = ob.simulate(strategy, counting(4), 4, **end, delays=ob.delays.exponential(0.2), seed=1)
    assert run.lost, "someone was late, so something is lost"
    assert len(set(run.lost)) == len(run.lost)
    assert set(applied(run).values()) == {1.0}
    assert set(applied(run)) == produced(run) - set(run.lost)
    assert set(run.lost) <= produced(run)


@given(st.sampled_from(WAITS), st.integers(1, 9), st.integers(0, 9), st.sampled_from([0, 1]))
@settings(max_examples=20)
def test_nothing_is_dropped_when_nobody_is_late(wait: Any, workers: int, steps: int, late: Any) -> None:
    run = ob.simulate(ob.eager(wait, stale="drop", late=late), counting(workers), workers, steps)
    # With late results the gradients of the last step are still on their way when the work is over.
    assert {step for _, step in run.lost} <= {steps - 1} if late else run.lost == ()
    assert applied(run) == dict.fromkeys(produced(run) - set(run.lost), 1.0)


def test_a_gradient_that_just_missed_its_round_is_lost_also_where_results_come_late() -> None:
    # Rank 1 arrives for round 0 after the snapshot and before the result; what it brings would be in round 1.
    strategy = ob.eager("first", sync_every=None, stale="drop", late=1)
    network = ob.Network(latency_s=0.2, bandwidth_Bps=1e12)  # news 0.2 s, the sum 0.4 s
    run = ob.simulate(strategy, counting(2), 2, 3, network=network, compute_s=lambda step, rank: 1.0 + 0.3 * rank)
    assert (1, 0) in run.lost


def test_a_run_of_nothing_applies_nothing() -> None:
    for end in ({"steps": 0}, {"samples": 0}, {"seconds": 0.0}):
        run = ob.simulate(ob.eager(), counting(3), 3, **end)
        assert applied(run) == {}
        assert run.trace.rounds == []
