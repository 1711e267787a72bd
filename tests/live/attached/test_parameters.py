"""Parameters and buffers of a model whose optimiser is attached: what they may be, and what becomes of them."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat as ob
from tests.support.forge import attempt
from tests.support.nets import SIZE, batch, distance, flat, loss, net, same, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live


@scenario(SIZE)
def start(rank: int) -> Any:
    norm: Any = nn.BatchNorm1d(3).double()
    model = nn.Sequential(net(seed=rank), norm)
    model.register_buffer("table", torch.polar(torch.ones(2), torch.full((2,), float(rank))))
    model.register_buffer("mask", torch.tensor([rank == 0, True]))
    frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
    model.register_parameter("frozen", frozen)
    norm.running_mean.fill_(rank)
    norm.num_batches_tracked.fill_(rank)
    optimizer = ob.attach(sgd(model), model, ob.local_sgd())
    out = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer.finish()
    return out


def test_attach_gives_all_ranks_the_parameters_and_buffers_of_rank_0(told: Told) -> None:
    first, *rest = told(start)
    assert first["1.running_mean"].abs().sum() == 0
    assert first["frozen"].abs().sum() == 0
    for other in rest:
        assert {n: t.tolist() for n, t in other.items()} == {n: t.tolist() for n, t in first.items()}


class Odd(nn.Module):
    """Tied, frozen, unused and sometimes unused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outer.weight = self.inner.weight
        self.frozen, self.never, self.some = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, some: bool) -> Tensor:
        x = self.frozen(self.outer(torch.tanh(self.inner(x))))
        return self.some(x) if some else x


@scenario(SIZE)
def odd_parameters(rank: int) -> Any:
    torch.manual_seed(rank)
    out = {}
    for strategy in (ob.allreduce(), ob.qsgd(bits=16)):
        model = Odd().double()
        reference = copy.deepcopy(model)
        optimizer = ob.attach(sgd(model, weight_decay=0.1), model, strategy)
        reference.load_state_dict(model.state_dict())
        inner = sgd(reference, weight_decay=0.1)
        for t in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(batch(rank, t)[0], some=rank == 1), torch.ones(4, 6).double()).backward()
            optimizer.step()
            inner.zero_grad()
            for r in range(SIZE):
                y = torch.ones(4, 6).double()
                (F.mse_loss(reference(batch(r, t)[0], some=r == 1), y) / SIZE).backward()
            inner.step()
        never = [p.grad is None for p in model.never.parameters()]
        tied = model.inner.weight is model.outer.weight
        optimizer.finish()
        out[strategy.name] = distance(flat(model), flat(reference)), never, tied
    return out


def test_tied_frozen_and_unused_parameters_train_as_in_one_process(told: Told) -> None:
    for out in told(odd_parameters):
        difference, never, tied = out["allreduce"]
        assert difference < 1e-14
        assert all(never)
        assert tied
        difference, never, _ = out["qsgd"]
        assert difference < 1e-3  # 16 bits a gradient
        assert all(never)


@scenario(SIZE)
def mixed_dtypes(rank: int) -> Any:
    out = {}
    for strategy in (ob.allreduce(), ob.local_sgd(period=2), ob.dpsgd(), ob.qsgd(), ob.sgp(), ob.diloco(period=2)):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 5).bfloat16(), nn.Linear(5, 4), nn.Linear(4, 3).double()])
        optimizer = ob.attach(sgd(model, lr=0.05), model, strategy)
        for t in range(4):
            x, y = batch(rank, t)
            optimizer.zero_grad()
            F.mse_loss(model[2](model[1](model[0](x.bfloat16()).float()).double()), y).backward()
            optimizer.step()
        optimizer.finish()
        out[strategy.name] = flat(model), [p.dtype for p in model.parameters()]
    return out


@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "dpsgd", "qsgd", "sgp", "diloco"])
def test_a_model_of_three_dtypes_trains_and_keeps_them(told: Told, name: str) -> None:
    outs = [out[name] for out in told(mixed_dtypes)]
    assert same(weights for weights, _ in outs)
    assert set(outs[0][1]) == {torch.bfloat16, torch.float32, torch.float64}
    assert bool(torch.isfinite(outs[0][0]).all())


@scenario(SIZE)
def channels_last(rank: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).double()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    reference = copy.deepcopy(model)
    optimizer, inner = ob.attach(sgd(model), model, ob.allreduce()), sgd(reference)
    images = torch.randn(SIZE, 3, 2, 3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for t in range(3):
        optimizer.zero_grad()
        model(images[rank, t].to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
        inner.zero_grad()
        for r in range(SIZE):
            (reference(images[r, t]).square().mean() / SIZE).backward()
        inner.step()
    kept = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    optimizer.finish()
    return distance(flat(model), flat(reference)), kept


def test_channels_last_weights_stay_so_and_train_right(told: Told) -> None:
    for difference, kept in told(channels_last):
        assert difference < 1e-14
        assert kept


@scenario(SIZE)
def batch_norm(rank: int) -> Any:
    out = {}
    for name, strategy in {"finish": ob.allreduce(), "sync": ob.local_sgd(period=2)}.items():
        norm: Any = nn.BatchNorm1d(6, affine=False)
        model = nn.Sequential(norm, nn.Linear(6, 3)).double()
        optimizer = ob.attach(sgd(model), model, strategy)
        for t in range(2 + rank if name == "finish" else 2):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
        local = norm.running_mean.clone()
        if name == "finish":
            optimizer.finish()
        out[name] = local, norm.running_mean.clone(), int(norm.num_batches_tracked)
        optimizer.finish()
    return out


def test_floating_buffers_take_the_mean_and_integer_ones_the_maximum_at_the_end(told: Told) -> None:
    outs = [out["finish"] for out in told(batch_norm)]
    mean = torch.stack([local for local, _, _ in outs]).mean(dim=0)
    assert not same(local for local, _, _ in outs)
    assert all(distance(final, mean) < 1e-15 for _, final, _ in outs)
    assert [count for _, _, count in outs] == [4, 4, 4]


def test_local_sgd_averages_floating_buffers_with_the_weights(told: Told) -> None:
    outs = [out["sync"] for out in told(batch_norm)]
    assert same(local for local, _, _ in outs)


@scenario(SIZE)
def buffers_put_anew(rank: int) -> Any:
    class Shift(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + dist.get_rank() + 1.0
            return self.layer(x)

    model = Shift().double()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    for t in range(2):
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()
    return model.seen.item()


def test_a_buffer_that_the_model_replaces_is_averaged_too(told: Told) -> None:
    assert told(buffers_put_anew) == [4.0, 4.0, 4.0]  # the mean of 2, 4 and 6


@scenario(SIZE)
def parameters_only_the_optimizer_knows(rank: int) -> Any:
    model, extra = net(), nn.Parameter(torch.full((3,), float(rank), dtype=torch.float64))
    inner = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    optimizer = ob.attach(inner, model, ob.allreduce())
    began = extra.detach().clone()
    for t in range(3):
        optimizer.zero_grad()
        x, y = batch(rank, t)
        F.mse_loss(model(x) + extra, y).backward()
        optimizer.step()
    optimizer.finish()
    return began, extra.detach().clone()


def test_parameters_that_only_the_optimizer_knows_are_trained_alike(told: Told) -> None:
    outs = told(parameters_only_the_optimizer_knows)
    assert all(began.abs().sum() == 0 for began, _ in outs)
    assert same(end for _, end in outs)
    assert outs[0][1].abs().sum() > 0


@scenario(SIZE)
def broken_views(rank: int) -> Any:
    model = net()
    first: Any = model[0]
    state = copy.deepcopy(net(7).state_dict())
    optimizer = ob.attach(sgd(model, momentum=0), model, ob.local_sgd(period=1))
    for t in range(4):
        if t == 1:
            for p in model.parameters():
                p.data = p.data * 0.5
        if t == 2:
            model.load_state_dict(state)
        if t == 3:
            first.weight.data = first.weight.data.flip(0)
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()
    reference = net(7)
    other: Any = reference[0]
    inner = sgd(reference, momentum=0)
    for t in (2, 3):
        if t == 3:
            other.weight.data = other.weight.data.flip(0)
        inner.zero_grad()
        sum((loss(reference, r, t) / SIZE for r in range(SIZE)), torch.tensor(0.0)).backward()
        inner.step()
    return distance(flat(model), flat(reference))


def test_weights_that_the_user_replaces_are_taken_over(told: Told) -> None:
    assert max(told(broken_views)) < 1e-14


@scenario(SIZE)
def converted_model(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.local_sgd())
    model.float()
    x, y = batch(rank, 0)
    said = attempt(lambda: F.mse_loss(model(x.float()), y.float()).backward())
    model.double()
    optimizer.finish()
    return said


def test_a_model_converted_after_attach_is_refused_with_both_dtypes(told: Told) -> None:
    for said in told(converted_model):
        assert "parameter 2.bias" in said or "parameter 0.weight" in said
        assert "torch.float64" in said
        assert "torch.float32" in said
        assert "before attach" in said


@scenario(SIZE)
def full_state(rank: int) -> Any:
    """Workers that have not met since the beginning; then the full state, a step more, and the state after the end."""
    model = nn.Sequential(Odd(), nn.BatchNorm1d(6))
    optimizer = ob.attach(sgd(model), model, ob.local_sgd(1000))
    body: Any = model[0]

    def learn(step: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * rank + step))
        model[1](body(x, True)).square().mean().backward()
        optimizer.step()

    learn(0)
    own = flat(model)
    state = optimizer.full_state_dict()
    held = {name: torch.equal(value, state[name]) for name, value in model.state_dict().items()}
    apart = [value.untyped_storage().nbytes() == value.numel() * value.element_size() for value in state.values()]
    tied = state["0.outer.weight"] is state["0.inner.weight"]
    again = nn.Sequential(Odd(), nn.BatchNorm1d(6))
    again.load_state_dict(state)
    then = flat(again)
    learn(1)
    later = flat(model)
    again.load_state_dict(state)
    optimizer.finish()
    ended = optimizer.full_state_dict()
    end = all(torch.equal(value, ended[name]) for name, value in model.state_dict().items())
    return own, then, flat(again), later, [*held.values(), *apart, tied, end]


def test_the_full_state_is_the_average_in_copies_that_later_steps_leave_alone(told: Told) -> None:
    outs = told(full_state)
    mean = sum(own for own, *_ in outs) / SIZE
    for own, then, still, later, facts in outs:
        assert distance(own, mean) > 1e-3, "they were apart"
        assert distance(then, mean) < 1e-6
        assert torch.equal(then, still)
        assert distance(later, then) > 1e-3
        assert all(facts), "values, memory of its own, tied, after the end"


@scenario(SIZE)
def a_part_saved(rank: int) -> tuple[int, int]:
    def saved_bytes(model: nn.Module) -> int:
        file = io.BytesIO()
        torch.save(model[0].state_dict(), file)  # type: ignore[index]
        return len(file.getvalue())

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400))
    before = saved_bytes(model)
    with ob.attach(sgd(model), model, ob.wagma()):
        return before, saved_bytes(model)


def test_a_part_of_an_attached_model_is_saved_by_itself(told: Told) -> None:
    for before, attached in told(a_part_saved):
        assert attached == before


def given_up() -> str:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.local_sgd())
    with contextlib.suppress(KeyError), optimizer:
        raise KeyError
    return attempt(optimizer.full_state_dict)


def test_a_run_that_was_given_up_has_no_full_state() -> None:
    assert "this rank's weights are its own, not the average; model.state_dict() has them" in given_up()
