"""m-synchronous SGD in virtual time: the first m count alike, the others not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat as ob
from tests.support.witness import applied, counting, heavy, produced, watch

TASK = ob.tasks.regression(dimension=4, batch=2, noise=1.0, momentum=0.5)
AT_ONCE = ob.Network(latency_s=0.0, bandwidth_Bps=1e30)


@given(st.integers(1, 9), st.integers(0, 8), st.sampled_from([1.0, "100%", "workers"]), st.booleans())
@settings(max_examples=30)
def test_with_all_workers_it_is_allreduce_bit_for_bit_whoever_is_late(
    workers: int, steps: int, m: Any, late: bool
) -> None:
    how: dict[str, Any] = {"compute_s": heavy(5)} if late else {}
    run = ob.simulate(ob.msync(workers if m == "workers" else m), TASK, workers, steps, **how)
    twin = ob.simulate(ob.allreduce(), TASK, workers, steps, **how)
    assert torch.equal(run.weights, twin.weights)
    assert torch.equal(run.final, twin.final)
    assert run.lost == ()


@pytest.mark.parametrize("m", ["75%", 0.5, 2, "3 workers"])
def test_its_rounds_are_those_of_eager_with_that_quorum_where_what_is_late_is_dropped(m: Any) -> None:
    named, plain = (
        ob.simulate(s, TASK, 6, 20, compute_s=heavy(2)) for s in (ob.msync(m), ob.eager(m, None, stale="drop", grace=0))
    )
    assert named.lost == plain.lost != ()
    assert [r.fresh for r in named.trace.rounds] == [r.fresh for r in plain.trace.rounds]


@pytest.mark.parametrize("m", ["75%", 0.5, 1])
def test_a_step_is_the_mean_of_those_that_count_however_many_they_are(m: Any) -> None:
    """Every gradient is one, so every round moves the weights by the learning rate; a sum over P would move less."""
    run, seen = watch(ob.msync(m), 5, lambda rank, step, x: torch.ones_like(x), lr=1.0, steps=12, compute_s=heavy(1))
    assert all(len(r.fresh) < 5 for r in run.trace.rounds[:6]), "there is always someone late"
    for rank in range(5):
        moved = -float(len([r for r in run.trace.rounds if r.fresh]))
        torch.testing.assert_close(seen.last[rank], torch.full_like(seen.last[rank], moved))


@pytest.mark.parametrize("end", [{"steps": 6}, {"samples": 23}, {"seconds": 0.9}], ids=str)
def test_what_is_dropped_is_named_and_all_else_is_applied(end: Any) -> None:
    run = ob.simulate(ob.msync(2), counting(4), 4, **end, delays=ob.delays.exponential(0.2), seed=1)
    assert run.lost
    assert set(applied(run)) == produced(run) - set(run.lost)


@pytest.mark.parametrize("m", ["75%", 0.5, 1])
def test_replicas_are_equal_bit_for_bit_whoever_was_late(m: Any) -> None:
    _, seen = watch(ob.msync(m), 5, steps=12, compute_s=heavy(4))
    assert all(torch.equal(seen.last[rank], seen.last[0]) for rank in range(5))


def test_a_worker_that_is_always_late_costs_the_others_nothing() -> None:
    slow = ob.delays.chronic(rank=3, seconds=0.3)
    how: dict[str, Any] = {"workers": 8, "seconds": 10.0, "delays": slow, "network": AT_ONCE}
    patient, brisk = (ob.simulate(s, None, **how).gradients for s in (ob.allreduce(), ob.msync(7)))
    assert patient[0] == pytest.approx(25, abs=1)
    assert brisk[0] == pytest.approx(100, abs=2)


def test_a_codec_that_leaves_numbers_out_is_refused() -> None:
    with pytest.raises(ValueError, match="msync: nothing sends later what topk"):
        ob.msync(codec=ob.codec.topk(2, 8))
