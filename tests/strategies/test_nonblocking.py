"""The laws of non-blocking SGD in virtual time: what it equals, and that every sample is used once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat as ob
from tests.support.micro_witness import FORMS, LATE, TASK, close, column, weights, witnessed


@pytest.mark.parametrize("over", ["allreduce", "server"])
@pytest.mark.parametrize("micro", [1, 3, 8, 20, "auto"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_with_nobody_late_it_is_large_batch_allreduce(over: str, micro: Any, workers: int) -> None:
    close(weights(ob.nonblocking(micro=micro, over=over), workers), weights(ob.allreduce(), workers))


@pytest.mark.parametrize("stop", ["first", "auto", 2, 0.01])
def test_one_micro_batch_is_allreduce_whatever_the_delays(stop: Any) -> None:
    close(weights(ob.nonblocking(1, stop=stop), delays=LATE), weights(ob.allreduce()))
    close(weights(ob.nonblocking(1, "server", stop=stop), delays=LATE), weights(ob.allreduce()))


@pytest.mark.parametrize("graph", ["ring", "exponential", "torus", ((0, 1), (1, 2), (2, 3), (3, 4))])
def test_one_micro_batch_along_a_graph_is_dpsgd(graph: Any) -> None:
    assert torch.equal(weights(ob.nonblocking(1, graph), delays=LATE), weights(ob.dpsgd(graph, order="atc")))


@pytest.mark.parametrize("budget", [0.3, 1.0])
def test_one_micro_batch_along_matchings_is_matcha(budget: Any) -> None:
    ours = weights(ob.nonblocking(1, "matcha", budget=budget), delays=LATE, seed=4)
    assert torch.equal(ours, weights(ob.matcha(budget=budget), seed=4))


@pytest.mark.parametrize("over", ["ring", "matcha"])
def test_with_nobody_late_the_forms_along_a_graph_are_dpsgd_and_matcha(over: str) -> None:
    plain = ob.matcha() if over == "matcha" else ob.dpsgd(order="atc")
    close(weights(ob.nonblocking(4, over)), weights(plain))


STOPS = [{"stop": "first"}, {"stop": 3}, {"stop": 0.08}, {"stop": "auto"}, {"at_least": 0}, {"at_least": 3}]


@pytest.mark.parametrize("over", FORMS)
@pytest.mark.parametrize("rule", STOPS, ids=str)
def test_the_invariants_of_a_round(over: str, rule: Any) -> None:
    workers, steps, micro = 5, 12, 4
    strategy, seen = witnessed(ob.nonblocking(micro, over, **rule))
    ob.simulate(strategy, TASK, workers=workers, steps=steps, delays=LATE)
    late = 0
    for r in range(steps):
        done = [seen.rounds[rank][r][1] for rank in range(workers)]
        assert all(0 <= d.pieces <= micro for d in done)
        assert all(d.samples == 2 * d.pieces for d in done)
        assert min(d.pieces for d in done) >= min(rule.get("at_least", 1), micro)
        if rule.get("stop", "first") in ("first", 3):
            needed = rule["stop"] if rule.get("stop") == 3 else 1
            assert sum(d.pieces == micro for d in done) >= needed
        late += any(d.pieces < micro for d in done)
    assert late, "nobody was ever late: this test shows nothing"
    if over in ("allreduce", "server"):
        for states in zip(*seen.weights.values(), strict=True):
            assert all(torch.equal(states[0], other) for other in states)
    for rank in range(workers):  # what is told of each worker is what it did, on every worker
        told = seen.used[rank]
        assert told == [sum(d.samples for _, d, _ in seen.rounds[k]) for k in range(workers)]


def gradient_sum(w: Tensor, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ of least-squares gradients over (x, y) rows, by hand."""
    x, y = torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
    return 2 * x.T @ (x @ w - y)


def rows_in_order(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in itertools.count():
        x, y = TASK.batch(rank, step)
        yield from zip(x, y[:, 0], strict=True)


@pytest.mark.parametrize("over", ["allreduce", "server"])
@pytest.mark.parametrize("weighting", ["samples", "workers"])
@pytest.mark.parametrize("scale_lr", [False, True])
def test_the_update_is_one_process_s_gradient_on_the_union_of_what_was_finished(
    over: str, weighting: Any, scale_lr: bool
) -> None:
    workers, steps, micro = 4, 10, 4
    task = dataclasses.replace(TASK, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    strategy, seen = witnessed(ob.nonblocking(micro, over, weighting=weighting, scale_lr=scale_lr))
    ob.simulate(strategy, task, workers=workers, steps=steps, delays=LATE)
    streams = [rows_in_order(rank) for rank in range(workers)]
    for r in range(steps):
        w = seen.weights[0][r]
        done = [seen.rounds[rank][r][1] for rank in range(workers)]
        taken = [list(itertools.islice(streams[k], d.samples)) for k, d in enumerate(done)]
        if weighting == "samples":
            union = [row for rows in taken for row in rows]
            g = gradient_sum(w, union) / len(union)
        else:
            g = torch.stack([gradient_sum(w, rows) / len(rows) for rows in taken]).mean(0)
        lr = 0.05 * (sum(d.pieces for d in done) / (workers * micro) if scale_lr else 1.0)
        close(seen.weights[0][r + 1], w - lr * g)


@pytest.mark.parametrize("over", ["ring", "matcha"])
def test_mixing_preserves_the_mean(over: str) -> None:
    task = dataclasses.replace(TASK, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    strategy, seen = witnessed(ob.nonblocking(4, over))
    ob.simulate(strategy, task, workers=5, steps=10, delays=LATE)
    streams = [rows_in_order(k) for k in range(5)]
    for r in range(10):
        moved = []
        for k in range(5):
            w, done, _ = seen.rounds[k][r]
            rows = list(itertools.islice(streams[k], done.samples))
            moved.append(w - 0.05 * gradient_sum(w, rows) / len(rows))
        after = torch.stack([seen.weights[k][r + 1] for k in range(5)])
        close(after.mean(0), torch.stack(moved).mean(0))


# Counting: slot k of the model belongs to sample k; its gradient is −1 there.


class Slots(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def counting(workers: int, batch: int, batches: int) -> ob.Task:
    """Sample s of worker k has slot k · batch · batches + s."""
    each = batch * batches
    eye = torch.eye(workers * each, dtype=torch.float64)

    def take(rank: int, step: int) -> tuple[Tensor, Tensor]:
        start = rank * each + (step % batches) * batch
        return eye[start : start + batch], torch.zeros(batch)

    return ob.Task(
        model=lambda: Slots(workers * each),
        loss=lambda output, target: -output.mean(),
        batch=take,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )


@settings(max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from([1, 3, 4, 8, "auto"]),
    st.sampled_from(["first", 1, "auto", 0.07]),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 10**6),
    st.sampled_from(["steps", "samples", "seconds"]),
)
def test_every_sample_is_used_once_and_in_order(
    workers: int, batch: int, micro: Any, stop: Any, at_least: int, seed: int, ending: str
) -> None:
    strategy, seen = witnessed(ob.nonblocking(micro, stop=stop, at_least=at_least))
    end: Any = {"steps": 9, "samples": 9 * workers - 1, "seconds": 0.9}[ending]
    task = counting(workers, batch, 40)
    run = ob.simulate(strategy, task, workers=workers, **{ending: end}, delays=ob.delays.Exponential(0.1), seed=seed)
    used = [sum(d.samples for _, d, _ in seen.rounds[k] if d is not None) for k in range(workers)]
    assert all(seen.used[k] == used for k in range(workers))
    slots = run.final.view(workers, -1)
    for k in range(workers):
        assert torch.equal(slots[k] > 0, torch.arange(slots.shape[1]) < used[k])
    total = sum(  # Σ over rounds of what was learnt: each round's mean has the weight 1, shared by its samples alike
        1.0 for r in range(len(seen.rounds[0])) if any(d is not None and d.samples for _, d, _ in column(seen, r))
    )
    assert slots.sum().item() == pytest.approx(total)
    assert len({len(rounds) for rounds in seen.rounds.values()}) == 1


def test_an_epoch_uses_every_sample_exactly_once() -> None:
    workers, batch = 4, 6
    task = counting(workers, batch, 30)
    strategy, seen = witnessed(ob.nonblocking(3, scale_lr=True))
    run = ob.simulate(strategy, task, workers=workers, steps=40, compute_s=lambda t, k: 0.4 if k == 0 else 0.1)
    slots = run.final.view(workers, -1) * workers * batch  # each sample counts 1 / (P · batch): like zeros for the late
    used = seen.used[0]
    assert used[1] == 40 * batch > 30 * batch > used[0]
    twice = used[1] - 30 * batch
    assert torch.allclose(slots[1], 1.0 + (torch.arange(30 * batch) < twice).double())
    assert torch.allclose(slots[0], (torch.arange(30 * batch) < used[0]).double())


# What is refused.


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"micro": 0}, "micro"),
        ({"micro": "many"}, "micro"),
        ({"stop": "last"}, "nobody can stop at 'last'"),
        ({"stop": 0}, "nobody can stop at 0"),
        ({"stop": -1.0}, "nobody can stop at -1.0"),
        ({"stop": True}, "nobody can stop at True"),
        ({"weighting": "none"}, "weighting"),
        ({"at_least": -1}, "at_least"),
        ({"over": "nowhere"}, "nowhere"),
        ({"over": "matcha", "budget": 0.0}, "never mixes"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(settings: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ob.nonblocking(**settings)


def test_a_bell_that_waits_for_more_workers_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="the bell waits for 5 workers, but there are 4"):
        weights(ob.nonblocking(stop=5), workers=4)
