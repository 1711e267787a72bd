"""Counting: a model with one slot for each sample and learning rate 1 shows what became of every sample.

The gradient of a sample is −1 in its own slot, so after a run each slot holds (times applied) / P. ``witnessed``
does the same without autograd, and writes down what each worker sees, for the thousands of schedules of other files.
"""

from __future__ import annotations

import dataclasses
import types
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat as ob
from offbeat.method.effects import Got, Grad, Next, Offer, Rest
from offbeat.method.replica import Replica
from offbeat.tensors.vector import Vec

AT_MOST = 40  # steps of one worker, so that every sample has a slot


class Slots(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def one_hot(slot: int, count: int) -> Tensor:
    x = torch.zeros(count, dtype=torch.float64)
    x[slot] = 1.0
    return x


def counting(workers: int) -> ob.Task:
    count = workers * AT_MOST
    return ob.Task(
        model=lambda: Slots(count),
        loss=lambda output, target: -output.sum(),
        batch=lambda rank, step: (one_hot(rank * AT_MOST + step, count)[None], torch.zeros(1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )


def applied(run: ob.Run) -> dict[tuple[int, int], float]:
    """(rank, step) → how many times that sample was applied, where it was at all."""
    return {divmod(slot, AT_MOST): times for slot, times in enumerate((run.final * run.workers).tolist()) if times}


def produced(run: ob.Run) -> set[tuple[int, int]]:
    return {(rank, step) for rank, taken in enumerate(run.gradients) for step in range(taken)}


@dataclass
class Witness:
    """What the workers of one run saw."""

    got: dict[int, list[Got]] = field(default_factory=lambda: defaultdict(list))  # by rank, in order
    begun: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # weights each step begins with
    after: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # results taken by then
    sent: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # deposits
    last: dict[int, Tensor] = field(default_factory=dict)  # weights at the end, nothing averaged for the closing


def witnessed(strategy: ob.Strategy, gradient, dimension: int, lr: float = 1.0) -> tuple[ob.Strategy, Witness]:
    """``strategy`` on weights of our own, with ``gradient(rank, step, weights)``, where only time is simulated."""
    seen = Witness()

    @types.coroutine
    def body(me: Replica):
        x = torch.zeros(dimension, dtype=torch.float64)
        mine = Replica(
            me.rank, me.size, Vec([x]), Vec(()), lambda g: x.sub_(g.parts[0], alpha=lr) if g.parts else None,
            lambda: lr, me.seed, me.horizon,
        )  # fmt: skip
        inner, rank, answer, step = strategy.body(mine), me.rank, None, 0
        try:
            while True:
                effect = inner.send(answer)
                if isinstance(effect, Next):
                    seen.begun[rank].append(x.clone())
                    seen.after[rank].append(len(seen.got[rank]))
                elif isinstance(effect, Offer):
                    seen.sent[rank].append(effect.x.parts[0].clone())
                answer = yield effect
                if isinstance(effect, Grad):
                    answer, step = Vec([gradient(rank, step, x)]), step + 1
                elif isinstance(effect, Offer):
                    seen.got[rank] += answer
                elif isinstance(effect, Rest) and answer is not None:
                    seen.got[rank].append(answer)
        except StopIteration:
            seen.last[rank] = x
        finally:
            inner.close()

    return dataclasses.replace(strategy, body=body), seen


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
def test_eager_applies_every_sample_exactly_once(strategy, end, workers, delays, network, seed):
    run = ob.simulate(strategy, counting(workers), workers, **end, delays=delays, network=network, seed=seed)
    assert applied(run) == dict.fromkeys(produced(run), 1.0)
    assert run.lost == ()


@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("end", [{"steps": 6}, {"samples": 23}, {"seconds": 0.9}], ids=str)
def test_what_is_dropped_is_named_and_everything_else_applied_once(catch_up, late, end):
    strategy = ob.eager("first", sync_every=4, stale="drop", catch_up=catch_up, late=late)
    run = ob.simulate(strategy, counting(4), 4, **end, delays=ob.delays.exponential(0.2), seed=1)
    assert run.lost, "someone was late, so something is lost"
    assert len(set(run.lost)) == len(run.lost)
    assert set(applied(run).values()) == {1.0}
    assert set(applied(run)) == produced(run) - set(run.lost)
    assert set(run.lost) <= produced(run)


@given(st.sampled_from(WAITS), st.integers(1, 9), st.integers(0, 9), st.sampled_from([0, 1]))
@settings(max_examples=20)
def test_nothing_is_dropped_when_nobody_is_late(wait, workers, steps, late):
    run = ob.simulate(ob.eager(wait, stale="drop", late=late), counting(workers), workers, steps)
    # With late results the gradients of the last step are still on their way when the work is over.
    assert {step for _, step in run.lost} <= {steps - 1} if late else run.lost == ()
    assert applied(run) == dict.fromkeys(produced(run) - set(run.lost), 1.0)


def test_a_gradient_that_just_missed_its_round_is_lost_also_where_results_come_late():
    # Rank 1 arrives for round 0 after the snapshot and before the result; what it brings would be in round 1.
    strategy = ob.eager("first", sync_every=None, stale="drop", late=1)
    network = ob.Network(latency_s=0.2, bandwidth_Bps=1e12)  # news 0.2 s, the sum 0.4 s
    run = ob.simulate(strategy, counting(2), 2, 3, network=network, compute_s=lambda step, rank: 1.0 + 0.3 * rank)
    assert (1, 0) in run.lost


def test_a_run_of_nothing_applies_nothing():
    for end in ({"steps": 0}, {"samples": 0}, {"seconds": 0.0}):
        run = ob.simulate(ob.eager(), counting(3), 3, **end)
        assert applied(run) == {}
        assert run.trace.rounds == []
