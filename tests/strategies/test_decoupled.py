"""The laws of Decoupled DiLoCo in virtual time: what it equals, whom it waits for, and what a late learner brings."""

from __future__ import annotations

import dataclasses
import math
import types
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat as ob
from offbeat.method import Grad, Offer, Replica, Rest
from offbeat.strategies.decoupled import packed
from tests.support.formulas import close
from tests.support.witness import equal_rows, heavy

LR = 0.1
SHAPES = [(4, 3), (4,), (1, 4), (1,)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 3, generator=draw).double(), torch.randn(4, 1, generator=draw).double()


TASK = ob.Task(net, nn.functional.mse_loss, batch, lambda p: torch.optim.SGD(p, lr=LR))


def by_decoupled(every: int, fragments: list[list[int]], merge: str, workers: int, steps: int) -> Tensor:
    """With everybody there: models of all workers, and a Θ that nobody shares, tensor by tensor."""
    models, eta, mu = [net() for _ in range(workers)], 0.7, 0.9
    theta = [p.detach().clone() for p in models[0].parameters()]
    buf = [torch.zeros_like(p) for p in theta]
    for t in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            x, y = batch(rank, t)
            nn.functional.mse_loss(model(x), y).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.data -= LR * p.grad
        if (t + 1) % every:
            continue
        for i in fragments[((t + 1) // every - 1) % len(fragments)]:
            ways = [theta[i] - list(model.parameters())[i].data for model in models]
            delta = torch.stack(ways).mean(0)
            if merge == "radial":
                directions = torch.stack([v / v.norm() for v in ways]).mean(0)
                length = torch.stack([v.norm() for v in ways]).mean()
                delta = length * directions / directions.norm() if directions.norm() > 1e-6 else 0 * directions
            buf[i] = mu * buf[i] + delta
            theta[i] = theta[i] - eta * (delta + mu * buf[i])
            for model in models:
                list(model.parameters())[i].data.copy_(theta[i])
    return torch.stack([nn.utils.parameters_to_vector(model.parameters()).detach() for model in models])


@pytest.mark.parametrize("merge", ["direct", "radial"])
@pytest.mark.parametrize(
    ("every", "count", "fragments"), [(3, 1, [[0, 1, 2, 3]]), (2, 2, [[0], [1, 2, 3]]), (1, 24, [[0], [1], [2], [3]])]
)
def test_with_everybody_there_it_is_the_papers_formula(
    every: int, count: int, fragments: list[list[int]], merge: Any
) -> None:
    run = ob.simulate(ob.decoupled(every, count, "everyone", merge), TASK, 4, 13, delays=ob.delays.exponential(0.2))
    close(run.weights, by_decoupled(every, fragments, merge, 4, 13))


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 14), st.sampled_from([(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)]))
@settings(max_examples=20)
def test_one_fragment_and_a_direct_mean_of_all_make_it_diloco(
    workers: int, every: int, steps: int, outer: tuple[float, float]
) -> None:
    one = ob.decoupled(every, 1, "everyone", "direct", *outer)
    close(*(ob.simulate(s, TASK, workers, steps).weights for s in (one, ob.diloco(every, *outer))))


@pytest.mark.parametrize("fragments", [1, 3])
def test_alone_a_radial_mean_is_a_direct_one(fragments: int) -> None:
    close(*(ob.simulate(ob.decoupled(2, fragments, merge=m), TASK, 1, 13).final for m in ("radial", "direct")))


def test_where_all_ways_have_one_length_a_radial_mean_keeps_it_and_a_direct_one_does_not() -> None:
    """Each worker goes a way of its own, at right angles to those of the others."""
    task = ob.Task(
        model=lambda: nn.Linear(5, 1, bias=False).double(),
        loss=lambda output, target: output.sum(),
        batch=lambda rank, step: (torch.eye(5)[rank : rank + 1].double(), torch.zeros(1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    )

    def length(merge: Any) -> float:
        strategy = ob.decoupled(2, 1, "everyone", merge, 1.0, 0.0)
        begin, end = (ob.simulate(strategy, task, 4, steps).final for steps in (0, 2))
        return float((end - begin).norm())

    assert length("radial") == pytest.approx(0.6)
    assert length("direct") == pytest.approx(0.6 / math.sqrt(4))


@pytest.mark.parametrize("merge", ["radial", "direct"])
def test_ways_that_cancel_out_move_nothing_whatever_rounding_leaves_of_them(merge: Any) -> None:
    """Three workers part like the spokes of a wheel, which floats do not hold exactly."""
    turn = 2 * math.pi / 3
    spokes = [[math.cos(turn * rank), math.sin(turn * rank)] for rank in range(3)]
    task = ob.Task(
        model=lambda: nn.Linear(2, 1, bias=False).double(),
        loss=lambda output, target: output.sum(),
        batch=lambda rank, step: (torch.tensor([spokes[rank]], dtype=torch.float64), torch.zeros(1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    )
    begin, end = (ob.simulate(ob.decoupled(3, 1, "everyone", merge), task, 3, steps).final for steps in (0, 30))
    close(begin, end)


# Who is there, and who is not.


@dataclass
class Seen:
    """What happened, by rank: (round it was made for, its weight, steps taken by then, whether it was in)."""

    shares: dict[int, list[tuple[int, float, int, bool]]] = field(default_factory=lambda: defaultdict(list))
    renewed: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))  # round, steps by then
    theta: dict[int, Tensor] = field(default_factory=dict)
    buf: dict[int, Tensor] = field(default_factory=dict)


def watch(strategy: ob.Strategy, workers: int, **how: Any) -> tuple[ob.Run, Seen]:
    seen = Seen()

    @types.coroutine
    def body(me: Replica) -> Generator[Any, Any, None]:
        inner: Any = strategy.body(me)
        answer, rank, steps = None, me.rank, 0
        try:
            while True:
                effect = inner.send(answer)
                made_for = me.memory.rounds
                weight = float(effect.x.parts[-1][-1]) if isinstance(effect, Offer) else 0.0
                answer = yield effect
                steps += isinstance(effect, Grad)
                results = answer if isinstance(effect, Offer) else []
                if isinstance(effect, Rest) and answer is not None:
                    results = [answer]
                if isinstance(effect, Offer):
                    is_in = any(rank in got.contributors for got in results)
                    seen.shares[rank].append((made_for, weight, steps, is_in))
                seen.renewed[rank] += [(got.version, steps) for got in results]
        except StopIteration:
            seen.theta[rank], seen.buf[rank] = (v.parts[0].clone() for v in (me.memory.theta, me.memory.buf))
        finally:
            inner.close()

    return ob.simulate(dataclasses.replace(strategy, body=body), TASK, workers, **how), seen


quorums = st.sampled_from([1, 2, "50%", "majority", "everyone"])
networks = st.sampled_from([ob.Network(latency_s=0.0), ob.Network(latency_s=0.01), ob.Network(latency_s=0.2)])


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 5), quorums, networks, st.integers(0, 999))
@settings(max_examples=40)
def test_whoever_is_late_what_a_learner_brings_is_its_own_and_counts_once_and_all_hold_the_same_bits(
    workers: int, every: int, fragments: int, quorum: Any, network: Any, seed: int
) -> None:
    strategy, steps = ob.decoupled(every, fragments, quorum), 7
    run, seen = watch(strategy, workers, steps=steps, compute_s=heavy(seed), network=network)
    F = min(fragments, len(SHAPES))
    for rank in range(workers):
        times = [sum(rank in r.staleness for r in run.trace.rounds), sum(is_in for *_, is_in in seen.shares[rank])]
        assert times[0] == times[1] <= steps // every
        assert times[0] == steps // every or quorum != "everyone"
        assert [version for version, _ in seen.renewed[rank]] == list(range(len(run.trace.rounds)))
        for made_for, weight, by_then, _ in seen.shares[rank]:
            before = [t for v, t in seen.renewed[rank] if v < made_for and v % F == made_for % F]
            assert weight == by_then - (before[-1] if before else 0), "the steps since its fragment was renewed"
            assert weight > 0, "who has nothing of its own brings nothing, and starts no round"
    assert equal_rows(seen.theta.values())
    assert equal_rows(seen.buf.values())
    assert run.lost == ()


def test_a_slow_learner_joins_the_round_that_is_open_with_all_it_has_learned_of_that_fragment() -> None:
    """Rank 2 takes twice as long. With four fragments it has something of its own for every round it comes to."""
    run, seen = watch(
        ob.decoupled(1, 4, 2), 3, steps=24, compute_s=lambda step, rank: 2.05 if rank == 2 else 1.0 + rank / 100
    )
    slow, quick = ([weight for _, weight, _, is_in in seen.shares[rank] if is_in] for rank in (2, 0))
    assert len(slow) == len(quick) == 24, "both are in a round after each of their steps"
    assert max(slow) > 1, "not only its last step"
    assert sum(slow[:12]) < sum(quick[:12])
    assert any(not is_in for *_, is_in in seen.shares[2]), "it must have come late once to prove anything"
    assert all(age == 0 for r in run.trace.rounds for age in r.staleness.values())


def test_nobody_waits_for_a_learner_that_has_stalled_where_the_quorum_is_there_without_it() -> None:
    never_s = 1e6
    compute: Any = lambda step, rank: never_s if rank == 3 and step == 2 else 1.0  # noqa: E731
    half, all_of_them = (
        ob.simulate(ob.decoupled(1, 2, quorum), TASK, 4, 8, compute_s=compute) for quorum in ("50%", "everyone")
    )
    assert max(half.finished_s[:3]) < 10
    assert min(all_of_them.finished_s[:3]) > never_s


def test_a_round_sends_one_fragment_and_a_number_for_each_tensor() -> None:
    """In time alone a model is one tensor, which is cut evenly."""
    runs = [ob.simulate(ob.decoupled(1, F, "everyone"), None, 2, 24, parameters=1200) for F in (1, 24)]
    rounds = [len(run.trace.rounds) for run in runs]
    assert rounds == [24, 24]
    assert [run.wire_bytes for run in runs] == [24 * 2 * (4 * n + 16) for n in (1200, 50)]


def test_the_largest_tensors_are_laid_out_first() -> None:
    assert packed([1, 1, 1, 1, 4], 2) == [[4], [0, 1, 2, 3]]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 12))
def test_fragments_are_whole_tensors_as_equal_as_the_largest_allows(nbytes: list[int], count: int) -> None:
    heaps = packed(nbytes, count)
    assert sorted(i for heap in heaps for i in heap) == list(range(len(nbytes)))
    assert len(heaps) == min(count, len(nbytes))
    assert all(heaps), "none is empty"
    sizes = [sum(nbytes[i] for i in heap) for heap in heaps]
    assert max(sizes) - min(sizes) <= max(nbytes)


def test_a_model_of_several_dtypes_is_merged_tensor_by_tensor() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(3, 4).double(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)).float()).double()

    task = dataclasses.replace(TASK, model=Mixed)
    for fragments in (1, 3):
        both = [ob.decoupled(2, fragments, "everyone", "direct"), ob.decoupled(2, fragments, "everyone")]
        runs = [ob.simulate(s, task, 3, 12) for s in both]
        assert all(torch.isfinite(run.final).all() for run in runs)
        if fragments == 1:
            twin = ob.simulate(ob.diloco(2), task, 3, 12)
            torch.testing.assert_close(runs[0].final, twin.final, rtol=1e-5, atol=1e-6)


def test_a_worker_that_was_saved_when_others_had_seen_other_rounds_is_told_so() -> None:
    strategy = ob.decoupled(1, 2)

    async def body(me: Replica) -> None:
        me.recall(rounds=3 if me.rank else 0)
        await strategy.body(me)

    with pytest.raises(
        ValueError, match=r"worker 1 has seen 3 rounds, but this is number 0: .* optimizer\.average\(\)"
    ):
        ob.simulate(dataclasses.replace(strategy, body=body), TASK, 2, 4)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        ({"every": 0}, "decoupled: every is 0"),
        ({"fragments": 0}, "decoupled: fragments is 0"),
        ({"merge": "mean"}, "decoupled: merge is 'mean', but must be one of 'radial', 'direct'"),
        ({"quorum": 0}, "decoupled: a quorum of 0 means nothing"),
        ({"outer_momentum": 2}, "decoupled: outer_momentum is 2"),
    ],
)
def test_a_bad_setting_is_answered_with_a_sentence(made: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ob.decoupled(**made)
