"""A gradient with a NaN or an infinity in it harms nobody, and is named."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job
from tests.support.methods import EVERY_KIND
from tests.support.nets import backward, flat, net, sgd

pytestmark = pytest.mark.live

SIZE, STEPS, BAD = 3, 6, {1: math.nan, 4: -math.inf}
# Where ranks average gradients while backward runs, all or those of a node, step() sees their mean: see below.
METHODS = [name for name in EVERY_KIND if name != "allreduce()" and "per_node=3" not in name]


def learns(rank: int, method: str, who: int) -> tuple[list[float], list[list[float]], list[str], list[str]]:
    """Its weights at the end and what its optimiser remembers, the warnings, and what the summary says of it."""
    model = net()
    optimizer = ob.attach(sgd(model), model, EVERY_KIND[method])
    remembered = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for t in range(STEPS):
            backward(optimizer, model, rank, t)
            if rank == who and t in BAD:
                with torch.no_grad():
                    for p in model.parameters():
                        if p.grad is not None:
                            p.grad.view(-1)[0] = BAD[t]
            optimizer.step()
        optimizer.finish()
    remembered = [optimizer.state[p]["momentum_buffer"].view(-1).tolist() for p in model.parameters()]
    said = [str(one.message) for one in heard if "not finite" in str(one.message)]
    assert all(one.filename == __file__ for one in heard if "not finite" in str(one.message))
    told = [line for line in optimizer.summary().sentences if "not finite" in line]
    return flat(model).tolist(), remembered, said, told


@pytest.fixture(scope="module")
def ended() -> dict[str, Any]:
    jobs = [Job(learns, SIZE, (method, k % SIZE), timeout_s=90) for k, method in enumerate(METHODS)]
    return dict(zip(METHODS, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_is_not_finite_reaches_nobody_and_is_named_by_rank_step_and_parameter(
    ended: dict[str, Any], method: str
) -> None:
    who = METHODS.index(method) % SIZE
    for rank, (weights, remembered, said, told) in enumerate(forge.values(ended[method])):
        assert torch.tensor(weights).isfinite().all()
        assert all(torch.tensor(one).isfinite().all() for one in remembered)
        if rank == who:
            assert [line.partition(" is not finite in ")[0].rpartition(" ")[2] for line in said] == [
                str(t) for t in BAD
            ]
            assert all(line.startswith(f"rank {who}: its gradient of step ") for line in said)
            assert all(
                line.endswith("0.weight, 0.bias, 2.weight and 1 more parameters, and counts as zero") for line in said
            )
            assert told == [f"Rank {who}: gradients that were not finite counted as zero: of step 1, 4."]
        else:
            assert (said, told) == ([], [])


def stops(rank: int) -> None:
    model = net()
    with ob.attach(sgd(model), model, "eager", nonfinite="stop") as optimizer:
        for t in range(STEPS):
            backward(optimizer, model, rank, t)
            if (rank, t) == (1, 2):
                next(model.parameters()).grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
            optimizer.step()


def test_who_wants_to_stop_stops_and_the_others_hear_of_it() -> None:
    (outcomes,) = forge.run([Job(stops, 3)])
    words = 'rank 1: its gradient of step 2 is not finite in 0.weight; nonfinite="stop" ends the run for that'
    assert all(words in one.error for one in outcomes)


def averaged_while_backward_runs(rank: int) -> tuple[list[float], list[str]]:
    model = net()
    optimizer = ob.attach(sgd(model), model, "allreduce")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for t in range(STEPS):
            optimizer.zero_grad()
            (flat_of(model) * (math.nan if (rank, t) == (1, 2) else 1.0)).backward()
            optimizer.step()
        optimizer.finish()
    return flat(model).tolist(), [str(one.message) for one in heard]


def flat_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.reshape(-1) for p in model.parameters()]).sum()


def test_a_mean_that_was_made_while_backward_ran_is_left_out_by_all() -> None:
    (outcomes,) = forge.run([Job(averaged_while_backward_runs, 3)])
    found = forge.values(outcomes)
    assert len({tuple(weights) for weights, _ in found}) == 1
    assert torch.tensor(found[0][0]).isfinite().all()
    for rank, (_, said) in enumerate(found):
        assert said == [
            f"rank {rank}: the mean gradient of step 2 is not finite in 0.weight, 0.bias, 2.weight and 1 more "
            "parameters, and counts as zero"
        ]


def many(rank: int) -> tuple[list[str], list[str]]:
    model = net()
    optimizer = ob.attach(sgd(model), model)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for t in range(9):
            backward(optimizer, model, rank, t)
            [*model.parameters()][-1].grad[1] = math.inf  # type: ignore[index]
            optimizer.step()
        optimizer.finish()
    return [str(one.message) for one in heard], [*optimizer.summary().sentences]


def test_of_many_a_few_are_told_at_once_and_the_summary_counts_them() -> None:
    ((said, sentences),) = forge.values(forge.run([Job(many, 1)])[0])
    assert len(said) == 5
    assert said[-1].endswith("2.bias, and counts as zero; of further ones summary() tells")
    assert "Rank 0: gradients that were not finite counted as zero: of step 0, 1, 2 … (9 in all)." in sentences


def test_another_word_is_refused() -> None:
    model = net()
    with pytest.raises(ValueError, match='attach: nonfinite is \'pass\'; use "skip" or "stop"'):
        ob.attach(sgd(model), model, nonfinite="pass")  # type: ignore[arg-type]
