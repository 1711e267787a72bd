"""AD-PSGD: what meetings of two do to the sum of all weights, for any order of arrivals, in virtual time."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat as ob
from tests.support.witness import applied, counting, produced

GRAPHS = ["exponential", "ring", "complete"]
LATE = [None, ob.delays.exponential(0.3), ob.delays.chronic(rank=0, seconds=0.7), ob.delays.pareto(0.05, alpha=1.3)]


@given(
    st.sampled_from(GRAPHS),
    st.integers(1, 9),
    st.integers(0, 12),
    st.sampled_from(LATE),
    st.sampled_from([0.0, 0.03, 0.4]),
    st.integers(0, 999),
)
@settings(max_examples=60)
def test_the_sum_of_all_weights_changes_only_by_the_steps_taken(
    graph: Any, workers: int, steps: int, late: Any, latency_s: float, seed: int
) -> None:
    network = ob.Network(latency_s=latency_s)
    run = ob.simulate(ob.ad_psgd(graph), counting(workers), workers, steps, delays=late, network=network, seed=seed)
    assert applied(run).keys() == produced(run)
    assert all(abs(times - 1.0) < 1e-9 for times in applied(run).values())


def test_ones_own_gradient_counts_fully_for_oneself_until_the_end() -> None:
    run = ob.simulate(ob.ad_psgd(), counting(4), 4, 10, delays=ob.delays.exponential(0.3), seed=3)
    assert run.weights.max() == 1.0  # the last step of the last worker, which nobody has met since
    assert torch.allclose(run.final[run.final > 0], torch.tensor(0.25, dtype=torch.float64))


def test_one_worker_is_serial_sgd() -> None:
    alone = ob.simulate(ob.ad_psgd(), ob.tasks.regression(), 1, 20)
    serial = ob.simulate(ob.allreduce(), ob.tasks.regression(), 1, 20)
    assert torch.allclose(alone.final, serial.final)


def test_a_straggler_delays_nobody() -> None:
    late = ob.delays.chronic(rank=0, seconds=5.0)
    run = ob.simulate(ob.ad_psgd(), counting(5), 5, 6, delays=late)
    undisturbed = ob.simulate(ob.ad_psgd(), counting(5), 5, 6)
    assert max(run.finished_s[1:]) < 1.05 * max(undisturbed.finished_s[1:])


def test_the_staleness_of_every_gradient_is_noted() -> None:
    late = ob.delays.chronic(rank=0, seconds=5.0)
    run = ob.simulate(ob.ad_psgd("complete"), counting(4), 4, 8, delays=late, seed=1)
    by_rank = {rank: [r.staleness[rank] for r in run.trace.rounds if r.started_by == rank] for rank in range(4)}
    assert all(len(ages) == 8 for ages in by_rank.values())
    assert max(by_rank[0]) > 3 * max(max(by_rank[rank]) for rank in (1, 2, 3)), "many visit the one that is slow"


def test_the_same_seed_draws_the_same_meetings() -> None:
    runs = [ob.simulate(ob.ad_psgd(), counting(5), 5, 8, delays=LATE[1], seed=7) for _ in range(2)]
    assert torch.equal(runs[0].final, runs[1].final)
    assert [r.end_s for r in runs[0].trace.rounds] == [r.end_s for r in runs[1].trace.rounds]
