"""Nodes in virtual time: ranks that average their gradients in step, and are one worker to the other nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat as ob

TASK = ob.tasks.regression(dimension=4, batch=2)
STEPS = 9
SHAPES = [(2, 2), (4, 2), (6, 3), (6, 2), (8, 4), (8, 2), (9, 3)]
shapes = pytest.mark.parametrize(("workers", "per_node"), SHAPES)
METHODS = {
    "eager": lambda n: ob.eager(per_node=n),
    "eager, every step": lambda n: ob.eager(per_node=n, catch_up="every_step", sync_every=4),
    "eager, late": lambda n: ob.eager(per_node=n, late=1),
    "eager, quorum, bounded": lambda n: ob.eager(0.5, per_node=n, sync="bounded", staleness=3),
    "ringmaster": lambda n: ob.ringmaster(None, per_node=n),
    "wagma, correct": lambda n: ob.wagma(per_node=n, merge="correct"),
    "wagma, late": lambda n: ob.wagma(per_node=n, late=1),
    "wagma": lambda n: ob.wagma(per_node=n),
}


class Slots(torch.nn.Module):
    """One weight for each sample; the gradient of a sample is −1 in its own slot."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(9 * STEPS, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def one_hot(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(1, 9 * STEPS, dtype=torch.float64)
    x[0, rank * STEPS + step] = 1.0
    return x, torch.zeros(1)


COUNTING = ob.Task(Slots, lambda out, y: -out.mean(), one_hot, lambda p: torch.optim.SGD(p, lr=1.0))


@shapes
@pytest.mark.parametrize("name", ["eager", "ringmaster", "wagma", "wagma, correct"])
def test_one_node_of_all_is_allreduce_bit_for_bit(workers: int, per_node: int, name: str) -> None:
    how: dict[str, Any] = {"workers": workers, "steps": STEPS, "delays": ob.delays.exponential(0.3)}
    run, twin = ob.simulate(METHODS[name](workers), TASK, **how), ob.simulate(ob.allreduce(), TASK, **how)
    assert torch.equal(run.weights, twin.weights) or name == "wagma, correct"  # which adds differences: to rounding
    torch.testing.assert_close(run.weights, twin.weights)


@shapes
@pytest.mark.parametrize("name", ["eager", "eager, every step", "eager, quorum, bounded", "wagma of all"])
def test_nodes_with_nobody_late_are_allreduce(workers: int, per_node: int, name: str) -> None:
    """To rounding: a mean of means is summed in another order."""
    of_all = ob.wagma(group=workers // per_node, per_node=per_node)
    run = ob.simulate(of_all if name == "wagma of all" else METHODS[name](per_node), TASK, workers, STEPS)
    torch.testing.assert_close(run.weights, ob.simulate(ob.allreduce(), TASK, workers, STEPS).weights)


@pytest.mark.parametrize("name", METHODS)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_the_ranks_of_a_node_never_differ_whoever_is_late(name: str, shape: Any, seed: int) -> None:
    workers, per_node = shape
    run = ob.simulate(METHODS[name](per_node), TASK, workers, STEPS, seed=seed, delays=ob.delays.exponential(0.3))
    for first in range(0, workers, per_node):
        node = run.weights[first : first + per_node]
        assert all(torch.equal(node[0], row) for row in node)


@pytest.mark.parametrize("name", [n for n in METHODS if n != "wagma"])
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_every_sample_is_applied_once_whoever_is_late(name: str, shape: Any, seed: int) -> None:
    workers, per_node = shape
    run = ob.simulate(METHODS[name](per_node), COUNTING, workers, STEPS, seed=seed, delays=ob.delays.exponential(0.3))
    applied = run.final.reshape(9, STEPS) * workers
    assert torch.allclose(applied[:workers], torch.ones(workers, STEPS, dtype=torch.float64), rtol=0, atol=1e-9)
    assert not applied[workers:].any()


@pytest.mark.parametrize("slow_s", [0.2, 0.3])
@pytest.mark.parametrize("late", [0, 1])
def test_a_node_that_comes_to_rest_during_the_last_flush_gets_its_result(late: Any, slow_s: float) -> None:
    """The leader still passes a result on when the flush begins, and asks for the next while it is under way."""
    network = ob.Network(latency_s=0.08, bandwidth_Bps=1e12)
    slow = lambda step, rank: slow_s if rank < 2 else 0.1  # noqa: E731
    run = ob.simulate(ob.eager(late=late, per_node=2), COUNTING, 4, 1, compute_s=slow, network=network)
    assert (4 * run.final.reshape(9, STEPS)[:4, 0]).tolist() == [1.0] * 4
    assert run.trace.rounds[-1].version == len(run.trace.rounds) - 1


def test_what_a_node_loses_is_named_by_those_who_had_data() -> None:
    strategy = ob.eager(stale="drop", sync_every=None, per_node=2)
    run = ob.simulate(strategy, TASK, 4, samples=13, delays=ob.delays.exponential(0.3))
    assert len(set(run.gradients[:2])) == 2 or len(set(run.gradients[2:])) == 2, "someone of a node has less data"
    assert run.lost
    assert all(step < run.gradients[rank] for rank, step in run.lost)


def test_a_slow_worker_holds_up_its_node_and_no_other() -> None:
    slow = ob.delays.chronic(5, 0.4)
    how: dict[str, Any] = {"workers": 8, "steps": 20, "compute_s": 0.1, "delays": slow}
    how["network"] = ob.Network(0.0, 1e12)
    run = ob.simulate(ob.eager(per_node=2, sync_every=None), TASK, **how)
    assert run.finished_s[4] == run.finished_s[5] == pytest.approx(20 * 0.5)
    assert max(t for rank, t in enumerate(run.finished_s) if rank not in (4, 5)) < 20 * 0.1 + 0.6
    assert ob.simulate(ob.eager(per_node=8), TASK, **how).seconds == pytest.approx(20 * 0.5)


def test_rounds_name_whole_nodes_and_a_bound_on_their_staleness_is_held() -> None:
    strategy = ob.eager("first", per_node=2, sync="bounded", staleness=2)
    run = ob.simulate(strategy, TASK, 8, 30, delays=ob.delays.exponential(0.5))
    rounds = [r for r in run.trace.rounds if r.started_by >= 0]
    assert [r.version for r in rounds] == list(range(len(rounds)))
    for r in rounds:
        assert r.started_by % 2 == 0
        assert all((rank ^ 1) in r.fresh for rank in r.fresh)
        assert all(r.staleness[rank ^ 1] == old for rank, old in r.staleness.items())
        assert max(r.staleness.values(), default=0) <= 2
    assert max(old for r in rounds for old in r.staleness.values()) == 2


def test_only_leaders_talk_between_nodes() -> None:
    """Bytes: nodes all-reduce inside; leaders all-reduce among themselves; each passes one result on."""
    model_bytes, workers, per_node, steps = 4 * 1000, 8, 4, 5
    run = ob.simulate(ob.eager(per_node=per_node), None, workers, steps, parameters=1000)
    inside = workers // per_node * 2 * (per_node - 1) * model_bytes
    between = 2 * (workers // per_node - 1) * model_bytes
    passed_on = workers // per_node * (per_node - 1) * model_bytes
    assert run.wire_bytes == steps * (inside + between + passed_on)


def test_a_codec_is_for_what_travels_between_nodes() -> None:
    plain, coded = (
        ob.simulate(ob.eager(per_node=4, codec=c), None, 4, 5, parameters=1000) for c in (None, ob.codec.qsgd(8))
    )
    assert plain.wire_bytes == coded.wire_bytes  # one node: nothing does


@pytest.mark.parametrize("make", [ob.eager, ob.wagma])
def test_nodes_that_do_not_fit_are_refused_in_a_sentence(make: Any) -> None:
    with pytest.raises(ValueError, match=r"nodes of 3 do not make up 8 workers; use one of 1, 2, 4, 8"):
        ob.simulate(make(per_node=3), TASK, 8, 2)
    with pytest.raises(ValueError, match="per_node is 0, but must be a whole number of at least 1"):
        make(per_node=0)


def test_the_mixing_of_nodes_is_the_mean_inside_each() -> None:
    schedule = ob.topology.nodes(6, 3)
    assert schedule.is_doubly_stochastic()
    assert schedule.spectral_gap() == pytest.approx(0)
    assert [schedule(7).block(rank) for rank in range(6)] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
