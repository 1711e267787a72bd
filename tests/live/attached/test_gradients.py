"""Gradients of an attached optimiser: averaged, accumulated, clipped and scaled as a user may rely on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat as ob
from offbeat.method.effects import GradMix
from offbeat.topology import Mixing
from tests.support.nets import PATIENCE_S, SIZE, batch, distance, flat, flat_grad, loss, net, same, serial, sgd, trained
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live


@scenario(SIZE)
def clipping_as_ddp(rank: int) -> Any:
    out = {}
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    }
    for name, make in makers.items():
        models = []
        for attached in (False, True):
            model = net()
            forward = model if attached else nn.parallel.DistributedDataParallel(model)
            inner = make(model.parameters())
            optimizer = ob.attach(inner, model, ob.allreduce()) if attached else inner
            for t in range(6):
                optimizer.zero_grad()
                loss(forward, rank, t).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            if isinstance(optimizer, ob.Attached):
                optimizer.finish()
            models.append(flat(model))
        out[name] = distance(*models)
    return out


def test_clipping_between_backward_and_step_gives_the_weights_that_ddp_gives(told: Told) -> None:
    for differences in told(clipping_as_ddp):
        assert differences["SGD"] < 1e-12
        assert differences["AdamW"] < 1e-12


@scenario(SIZE)
def grad_is_the_mean_after_backward(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    loss(model, rank, 0).backward()
    mean = flat_grad(model)
    optimizer.step()
    optimizer.finish()
    reference = net()
    sum((loss(reference, r, 0) / SIZE for r in range(SIZE)), torch.tensor(0.0)).backward()
    return distance(mean, flat_grad(reference))


def test_with_allreduce_the_gradient_is_the_mean_when_backward_returns(told: Told) -> None:
    assert max(told(grad_is_the_mean_after_backward)) < 1e-15


@scenario(SIZE)
def sparse_gradients(rank: int) -> str:
    model = nn.Embedding(10, 3, sparse=True)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ob.OffbeatError) as raised, ob.attach(inner, model, ob.allreduce(), patience_s=PATIENCE_S):
        model(torch.tensor([rank])).sum().backward()
    return str(raised.value)


def test_a_sparse_gradient_is_refused_by_name(told: Told) -> None:
    for words in told(sparse_gradients):
        assert "the gradient of weight is sparse; make its layer's gradients dense" in words


@scenario(4)
def means_of_all_and_of_three(rank: int) -> list[bool]:
    """Whether a long gradient has the bits of a sum that is divided by those who have data."""
    everyones = [torch.randn(100_003, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    model = nn.ParameterList([nn.Parameter(torch.zeros(100_003))])
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.allreduce(), patience_s=PATIENCE_S)
    out = []
    for those in (everyones, everyones[:3]):
        if rank < len(those):
            optimizer.zero_grad()
            (model[0] * everyones[rank]).sum().backward()
            assert model[0].grad is not None
            out.append(torch.equal(model[0].grad, sum(those[1:], those[0]) / len(those)))
            optimizer.step()
    optimizer.finish()
    return out


def test_a_mean_has_the_same_bits_however_many_have_data(told: Told) -> None:
    assert told(means_of_all_and_of_three) == [[True, True]] * 3 + [[True]]


@scenario(SIZE)
def gradients_in_groups(rank: int) -> Any:

    async def body(me: Any) -> None:
        async for _ in me.steps():
            me.step(await GradMix(Mixing.uniform_blocks(SIZE, [[0, 2], [1]])))

    base = ob.allreduce()
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.Strategy(base.paper, base.make, base.settings, body))
    for t in range(4):
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()
    before = flat(model)
    optimizer.finish()
    return distance(before, serial(sgd, 4, ranks=lambda t: [1] if rank == 1 else [0, 2]))


def test_gradients_are_averaged_among_the_groups_a_strategy_asks_for(told: Told) -> None:
    assert max(told(gradients_in_groups)) < 1e-14


def _two_groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "weight_decay": 0.1}],
        lr=0.02,
        momentum=0.5,
    )


@scenario(SIZE)
def parameter_groups(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(_two_groups(model), model, ob.allreduce())
    for t in range(5):
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()
    return distance(flat(model), serial(_two_groups, 5)), [g["lr"] for g in optimizer.param_groups]


def test_parameter_groups_keep_their_own_settings(told: Told) -> None:
    for difference, rates in told(parameter_groups):
        assert difference < 1e-14
        assert rates == [0.1, 0.02]


@scenario(SIZE)
def max_norm(rank: int) -> Any:
    return distance(trained(rank, ob.allreduce(), max_norm=0.1), serial(sgd, 5, clip=0.1))


def test_max_norm_clips_what_the_optimizer_is_given(told: Told) -> None:
    assert max(told(max_norm)) < 1e-14


@scenario(SIZE)
def accumulate(rank: int) -> Any:
    out = {}
    for declared, really in ((4, 4), (1, 3), (4, 2), (2, 5)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = net()
            optimizer = ob.attach(sgd(model), model, ob.allreduce(), accumulate=declared)
            for t in range(3):
                optimizer.zero_grad(set_to_none=t % 2 == 0)
                for m in range(really):
                    loss(model, rank, really * t + m).backward()
                optimizer.step()
            optimizer.finish()
        reference = serial(sgd, 3, micro=really)
        said = [str(w.message) for w in seen]
        out[declared, really] = distance(flat(model), reference), said
    return out


def test_accumulation_as_declared_is_right_and_silent(told: Told) -> None:
    for out in told(accumulate):
        difference, said = out[4, 4]
        assert difference < 1e-14
        assert said == []


@pytest.mark.parametrize("case", [(1, 3), (4, 2), (2, 5)])
def test_another_number_of_backwards_than_declared_is_right_and_said_once(told: Told, case: tuple[int, int]) -> None:
    for out in told(accumulate):
        difference, said = out[case]
        assert difference < 1e-14
        assert len(said) == 1
        assert f"accumulate={case[0]}" in said[0]


@scenario(SIZE)
def accumulate_with_local_gradients(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model, momentum=0), model, ob.local_sgd(period=1), accumulate=2)
    for t in range(3):
        optimizer.zero_grad()
        for m in range(2):
            loss(model, rank, 2 * t + m).backward()
        optimizer.step()
    optimizer.finish()
    return distance(flat(model), serial(lambda m: sgd(m, momentum=0), 3, micro=2))


def test_accumulation_needs_nothing_where_gradients_stay_local(told: Told) -> None:
    assert max(told(accumulate_with_local_gradients)) < 1e-14


@scenario(SIZE)
def mixed_precision(rank: int) -> Any:
    torch.manual_seed(0)
    out = {}
    for strategy in (ob.allreduce(), ob.local_sgd(period=2), ob.qsgd()):
        for zero in ("optimizer", "model"):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                model = net(rank).float()
                inner = sgd(model)
                steps = [0]
                inner.register_step_post_hook(lambda *_, steps=steps: steps.__setitem__(0, steps[0] + 1))
                optimizer = ob.attach(inner, model, strategy, patience_s=PATIENCE_S)
                scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
                for t in range(6):
                    x, y = batch(rank, t)
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        value = F.mse_loss(model(x.float()), y.float())
                    if t == 2 and rank == 1:
                        value = value * float("inf")
                    scaler.scale(value).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                    (optimizer if zero == "optimizer" else model).zero_grad()
                optimizer.finish()
            said = [str(w.message) for w in seen]
            out[strategy.name, zero] = flat(model), steps[0], scaler.get_scale(), said
    return out


@pytest.mark.parametrize("zero", ["optimizer", "model"])
@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "qsgd"])
def test_mixed_precision_skips_a_step_with_infinite_gradients(told: Told, name: str, zero: str) -> None:
    outs = [out[name, zero] for out in told(mixed_precision)]
    assert same(weights for weights, _, _, _ in outs)
    assert all(bool(torch.isfinite(weights).all()) for weights, _, _, _ in outs)
    skipped = [0, 1, 2] if name == "allreduce" else [1]  # the mean of an infinite gradient is infinite everywhere
    for rank, (_, steps, scale, said) in enumerate(outs):
        if name != "qsgd":
            assert steps == (5 if rank in skipped else 6)
        assert scale == (4.0 if rank in skipped else 8.0)
        assert said == []


@scenario(SIZE)
def zero_grad(rank: int) -> Any:
    ways: dict[str, Callable[[Any, Any], None]] = {
        "none": lambda o, m: o.zero_grad(),
        "zeros": lambda o, m: o.zero_grad(set_to_none=False),
        "model": lambda o, m: m.zero_grad(),
        "model zeros": lambda o, m: m.zero_grad(set_to_none=False),
    }
    out = {}
    for strategy in (ob.allreduce(), ob.local_sgd(period=2), ob.qsgd()):
        for name, way in ways.items():
            model = net()
            optimizer = ob.attach(sgd(model), model, strategy)
            for t in range(4):
                loss(model, rank, t).backward()
                optimizer.step()
                way(optimizer, model)
            optimizer.finish()
            out[strategy.name, name] = flat(model)
    return out


@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "qsgd"])
def test_all_ways_to_zero_gradients_are_alike(told: Told, name: str) -> None:
    for out in told(zero_grad):
        assert same(weights for (strategy, _), weights in out.items() if strategy == name)


@scenario(SIZE)
def closure(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    seen = []
    for t in range(5):

        def closure(t: int = t) -> Tensor:
            optimizer.zero_grad()
            value = loss(model, rank, t)
            value.backward()
            return value

        seen.append(optimizer.step(closure).item())
    optimizer.finish()
    return distance(flat(model), serial(sgd, 5)), all(v > 0 for v in seen)


def test_step_takes_a_closure_and_gives_back_its_loss(told: Told) -> None:
    for difference, positive in told(closure):
        assert difference < 1e-14
        assert positive


@scenario(SIZE)
def a_backward_without_its_step(rank: int) -> Any:
    out = {}
    for strategy in (ob.allreduce(), ob.local_sgd(period=2), ob.dpsgd(), ob.qsgd()):
        model = net()
        optimizer = ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S)
        for t in range(4):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            if t == 2 and rank == 1:
                break
            optimizer.step()
        optimizer.finish()
        out[strategy.name] = flat(model)
    return out


@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "dpsgd", "qsgd"])
def test_a_rank_that_leaves_between_backward_and_step_lets_the_others_finish(told: Told, name: str) -> None:
    assert same(out[name] for out in told(a_backward_without_its_step))
