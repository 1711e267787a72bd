"""SparseLoCo: what is sent, what is owed, and how few bytes that takes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat as ob
from offbeat.method import Mix, Replica

P, H, CHUNK = 4, 3, 10
TASK = ob.tasks.regression(dimension=30, batch=4, noise=1.0, lr=0.05, momentum=0.5)


def exchanged(strategy: ob.Strategy, steps: int = 15) -> tuple[list[list[Tensor]], list[list[Tensor]], list[Tensor]]:
    """By rank: the ways given to each round, the answers, and what is owed in the end."""
    ways: list[list[Tensor]] = [[] for _ in range(P)]
    answers: list[list[Tensor]] = [[] for _ in range(P)]
    owed: dict[int, Tensor] = {}

    @types.coroutine
    def body(me: Replica) -> Generator[Any, Any, None]:
        inner: Any = strategy.body(me)
        answer = None
        while True:
            try:
                effect = inner.send(answer)
            except StopIteration:
                owed[me.rank] = me.memory.e.parts[0].clone()
                return
            if isinstance(effect, Mix):
                ways[me.rank].append(effect.x.parts[0].clone())
            answer = yield effect
            if isinstance(effect, Mix):
                answers[me.rank].append(answer.parts[0].clone())

    ob.simulate(dataclasses.replace(strategy, body=body), TASK, P, steps)
    return ways, answers, [owed[rank] for rank in range(P)]


@pytest.mark.parametrize("decay", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "codec", [ob.codec.topk(2, CHUNK), ob.codec.topk(1, CHUNK, True), ob.codec.qsgd(2)], ids=lambda c: c.name
)
def test_what_is_owed_is_the_discounted_sum_of_what_was_not_sent(decay: float, codec: Any) -> None:
    """Of all workers together, as only the mean of what they send is seen."""
    ways, answers, owed = exchanged(ob.sparseloco(H, decay, codec=codec))
    due = torch.zeros_like(owed[0])
    for delta, sent in zip(zip(*ways, strict=True), answers[0], strict=True):
        due = decay * due + torch.stack(delta).mean(0) - sent
    torch.testing.assert_close(torch.stack(owed).mean(0), due, rtol=1e-9, atol=1e-9)
    assert due.abs().max() > 1e-3, "something must be owed"


def test_of_each_chunk_every_worker_sends_its_k_largest_and_nothing_codes_their_sum() -> None:
    _, answers, _ = exchanged(ob.sparseloco(H, codec=ob.codec.topk(1, CHUNK)))
    counts = [int((part != 0).sum()) for answer in answers[0] for part in answer.split(CHUNK)]
    assert max(counts) <= P
    assert max(counts) > 1, "workers must differ, else a coded sum would look the same"


def test_with_whole_chunks_sent_as_floats_nothing_is_owed_and_no_bit_changes() -> None:
    task = ob.tasks.regression(dimension=30, batch=4, dtype=torch.float32)
    every = ob.codec.topk(CHUNK, CHUNK, floats=True)
    coded, plain = (ob.simulate(ob.sparseloco(H, codec=c), task, P, 15) for c in (every, None))
    assert torch.equal(coded.weights, plain.weights)


def test_between_two_workers_the_default_sends_128_times_fewer_bytes() -> None:
    sparse, dense = (
        ob.simulate(s, None, 2, 60, parameters=4096 * 50).wire_bytes for s in (ob.sparseloco(), ob.local_sgd(30))
    )
    assert dense == 128 * sparse


def test_a_direction_that_all_rounds_share_comes_through_though_it_is_never_the_largest() -> None:
    """One number takes a step of 1 each time, another of ±3 in turn; one of the two is sent."""
    task = ob.Task(
        model=lambda: torch.nn.Linear(2, 1, bias=False),
        loss=lambda output, target: output.sum(),
        batch=lambda rank, step: (torch.tensor([[1.0, 3.0 * (-1) ** step]]), torch.zeros(1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )
    strategy = ob.sparseloco(1, codec=ob.codec.topk(1, 2, floats=True))
    begin, end = (ob.simulate(strategy, task, 2, steps).final for steps in (0, 40))
    assert begin[0] - end[0] > 20


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"period": 0}, "sparseloco: period is 0"),
        ({"decay": 1.5}, "sparseloco: decay is 1.5"),
        ({"outer_lr": -1}, "sparseloco: outer_lr is -1"),
    ],
)
def test_a_bad_setting_is_answered_with_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ob.sparseloco(**settings)
