"""The mistakes of a first hour: each is refused, or warned of, in a sentence with the way out."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from tests.support.forge import attempt
from tests.support.nets import PATIENCE_S, flat, loss, net, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

RETURNED = "call step() on what ob.attach returned: optimizer = ob.attach(optimizer, model)"


def warned(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        action()
    return [str(one.message) for one in seen]


@scenario(2)
def stepping_the_inner_one(rank: int) -> Any:
    model, inner = net(), None
    inner = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)  # made on the inner one, before
    optimizer = ob.attach(inner, model, patience_s=PATIENCE_S)
    late = torch.optim.lr_scheduler.StepLR(inner, 1)  # and after
    said, before = [], flat(model).clone()
    loss(model, rank, 0).backward()
    said.append(attempt(inner.step))
    said.append(attempt(lambda: torch.amp.GradScaler("cpu", enabled=False).step(inner)))
    same = torch.equal(before, flat(model))
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    scheduler.step()
    late.step()
    optimizer.finish()
    loss(model, rank, 1).backward()
    return said, same, attempt(inner.step)


def test_the_inner_optimiser_refuses_to_step_while_it_is_attached(told: Told) -> None:
    for said, unchanged, after in told(stepping_the_inner_one):
        assert all(RETURNED in words and "SGD" in words for words in said)
        assert unchanged
        assert after == ""  # it is the user's again


@scenario(2)
def never_stepping(rank: int) -> Any:
    def run(steps: int, backwards: int) -> None:
        model = net()
        with ob.attach(sgd(model), model, patience_s=PATIENCE_S) as optimizer:
            for t in range(steps):
                loss(model, rank, t).backward()
                optimizer.step()
            for t in range(backwards):
                loss(model, rank, t).backward()

    return warned(lambda: run(0, 1)), warned(lambda: run(1, 1)), warned(lambda: run(0, 0))


def test_a_run_with_gradients_and_no_step_ends_with_a_warning(told: Told) -> None:
    for never, once, nothing in told(never_stepping):
        assert [RETURNED in words for words in never] == [True]
        assert once == nothing == []


@scenario(2)
def wrong_models(rank: int) -> Any:
    model, other = net(), net()
    both = nn.Sequential(model, nn.Linear(3, 1).double())
    twice = sgd(other)
    attached = ob.attach(twice, other, patience_s=PATIENCE_S)
    out: dict[str, Any] = {
        "another's": attempt(lambda: ob.attach(sgd(copy.deepcopy(model)), model)),
        "twice": attempt(lambda: ob.attach(twice, other)),
        "ddp": attempt(lambda: ob.attach(sgd(model), DistributedDataParallel(model))),
        "ddp inside": attempt(lambda: ob.attach(sgd(model), nn.Sequential(DistributedDataParallel(model)))),
    }
    out["same model"] = warned(lambda: ob.attach(sgd(other), other, patience_s=PATIENCE_S).finish())
    attached.finish()
    out["again"] = attempt(lambda: ob.attach(twice, other, patience_s=PATIENCE_S).finish())
    out["a part"] = warned(lambda: ob.attach(sgd(model), both, patience_s=PATIENCE_S).finish())
    both[1].requires_grad_(False)
    out["frozen"] = warned(lambda: ob.attach(sgd(model), both, patience_s=PATIENCE_S).finish())
    return out


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another's", "the optimizer has none of the model's 4 parameters"),
        ("twice", "this SGD is attached already, and its run has not ended; call finish()"),
        ("ddp", "remove the line that wraps it (model = DistributedDataParallel(model, …))"),
        ("ddp inside", "its part 0 is wrapped in DistributedDataParallel"),
    ],
)
def test_an_optimiser_and_a_model_that_do_not_belong_together_are_refused(told: Told, case: str, words: str) -> None:
    for out in told(wrong_models):
        assert out[case].startswith("ValueError: ")
        assert words in out[case]


def test_an_optimiser_may_be_attached_again_after_its_run(told: Told) -> None:
    assert [out["again"] for out in told(wrong_models)] == ["", ""]


def test_a_model_that_another_run_averages_is_warned_of(told: Told) -> None:
    for out in told(wrong_models):
        (words,) = out["same model"]
        assert "another optimizer is attached to parameters of this model" in words


def test_parameters_that_the_optimiser_lacks_are_warned_of_unless_they_are_frozen(told: Told) -> None:
    for out in told(wrong_models):
        (words,) = out["a part"]
        assert "4 of the model's 6 parameters" in words
        assert "1.weight, 1.bias will not be trained" in words
        assert out["frozen"] == []


def _attached(inner: torch.optim.Optimizer, model: nn.Module, method: ob.Strategy | None) -> None:
    ob.attach(inner, model, method, patience_s=PATIENCE_S).finish()


@scenario(2)
def late_gradients(rank: int) -> dict[str, list[str]]:
    makers: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
    methods = {"late": ob.eager(late=1), "no window": ob.eager(grace=0), "window": ob.eager(), "default": None}
    out = {}
    for (kind, make), (name, method) in itertools.product(makers.items(), methods.items()):
        model = net()
        inner = make(model.parameters(), lr=0.01)
        out[f"{kind}, {name}"] = warned(partial(_attached, inner, model, method))
    return out


def test_adam_with_late_gradients_is_warned_of_and_nothing_else(told: Told) -> None:
    for out in told(late_gradients):
        assert {name for name, words in out.items() if words} == {"AdamW, late", "AdamW, no window"}
        (words,) = out["AdamW, late"]
        assert words.startswith("eager applies gradients that are a step old or older, and AdamW may not get off")


@scenario(2)
def called_through_ddp(rank: int) -> Any:
    model, bystander = net(), DistributedDataParallel(net(seed=1))
    wrapped = DistributedDataParallel(model)
    with ob.attach(sgd(model), model, patience_s=PATIENCE_S) as optimizer:
        said = attempt(lambda: loss(wrapped, rank, 0))
        with torch.no_grad():
            evaluated = attempt(lambda: loss(wrapped, rank, 0))
        loss(bystander, rank, 0).backward()  # another model's DDP is the script's own affair
        loss(model, rank, 0).backward()
        optimizer.step()
    return said, evaluated, attempt(lambda: loss(wrapped, rank, 0).backward())


def test_an_attached_model_that_is_called_through_ddp_is_refused(told: Told) -> None:
    for said, evaluated, after in told(called_through_ddp):
        assert "called through DistributedDataParallel, which averages its gradients too" in said
        assert "remove the line that wraps it" in said
        assert evaluated == after == ""


@scenario(2)
def state_of_another(rank: int) -> Any:
    def of(strategy: ob.Strategy) -> dict[str, Any]:
        model = net()
        with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
            loss(model, rank, 0).backward()
            optimizer.step()
            return optimizer.state_dict()

    def loaded(state: dict[str, Any]) -> str:
        model = net()
        with ob.attach(sgd(model), model, ob.local_sgd(8), patience_s=PATIENCE_S) as optimizer:
            return attempt(lambda: optimizer.load_state_dict(state))

    another, otherwise = of(ob.wagma()), of(ob.local_sgd(4))
    plain = {key: value for key, value in another.items() if key != "offbeat"}
    return loaded(another), loaded(otherwise), loaded(plain)


def test_a_state_of_another_method_is_refused_with_what_differs_and_the_way_out(told: Told) -> None:
    for another, otherwise, plain in told(state_of_another):
        assert "the state was saved with wagma, but local_sgd is attached;" in another
        assert "the state was saved with period=4, but local_sgd is attached with period=8;" in otherwise
        for words in (another, otherwise):
            assert 'if k != "offbeat"' in words
            assert len(words) < 300
        assert plain == ""  # the way out that is named
