"""What the inner optimiser is given to read: a sum where it lies, if it only reads, and a copy of it else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.live.attached.gradient import READERS, only_reads_gradients
from tests.support.nets import SIZE, flat, flat_grad, loss, net
from tests.support.scenarios import Told, scenario

Make = Callable[[list[Tensor]], torch.optim.Optimizer]

SETTINGS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (kind, {"lr": 0.1, **more, **how})
    for kind in READERS
    for more in ({}, {"weight_decay": 0.1}, {"maximize": True}, {"maximize": True, "weight_decay": 0.1})
    for how in ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
]
SETTINGS += [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": f}) for f in (True, False)]
SETTINGS += [(kind, {"amsgrad": True, "foreach": f}) for kind in READERS[1:] for f in (True, False)]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_an_optimiser_that_is_said_to_only_read_gradients_leaves_every_bit_of_them(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(5, generator=draw)) for _ in range(3)]
    inner = kind(params, **settings)
    assert only_reads_gradients(inner)
    for _ in range(3):
        grads = [torch.randn(5, generator=draw) for _ in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        inner.step()
        assert all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))


class Centred(torch.optim.SGD):
    """As some do: it changes the gradients that it is given."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sub_(p.grad.mean())
        return super().step(closure)


def _hooked(params: list[Tensor]) -> torch.optim.Optimizer:
    inner = torch.optim.SGD(params, lr=0.1)
    inner.register_step_pre_hook(lambda *_: None)
    return inner


def _scaled(params: list[Tensor]) -> torch.optim.Optimizer:
    inner: Any = torch.optim.AdamW(params, fused=True)
    inner.grad_scale = torch.tensor(2.0)
    return inner


WRITERS: list[Make] = [
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    lambda params: Centred(params, lr=0.1),
    torch.optim.Rprop,
    _hooked,
    _scaled,
]


@pytest.mark.parametrize("make", WRITERS)
def test_one_that_may_write_to_gradients_is_not_trusted_with_those_of_others(make: Make) -> None:
    assert not only_reads_gradients(make([nn.Parameter(torch.zeros(3))]))


MAKES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "reads": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "writes": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "centres": lambda m: Centred(m.parameters(), lr=0.1),
}


@scenario(SIZE)
def sums_of_all(rank: int) -> Any:
    out = {}
    for name, make in MAKES.items():
        model = net()
        reference = copy.deepcopy(model)
        inner = make(reference)
        optimizer = ob.attach(make(model), model, ob.eager(wait="everyone", sync_every=None))
        own = []
        for t in range(4):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            before = flat_grad(model)
            optimizer.step()
            own.append(torch.equal(flat_grad(model), before))
            inner.zero_grad()
            for r in range(SIZE):
                (loss(reference, r, t) / SIZE).backward()
            inner.step()
        optimizer.finish()
        out[name] = flat(model), flat(reference), own
    return out


@pytest.mark.live
def test_all_take_the_same_step_whether_their_optimiser_reads_or_writes(told: Told) -> None:
    everyones = told(sums_of_all)
    for name in MAKES:
        for weights, reference, _ in (out[name] for out in everyones):
            torch.testing.assert_close(weights, reference, rtol=1e-12, atol=1e-14)
            assert torch.equal(weights, everyones[0][name][0]), name


@pytest.mark.live
def test_after_a_step_that_only_read_the_sum_each_worker_has_its_own_gradient_again(told: Told) -> None:
    assert all(all(out["reads"][2]) for out in told(sums_of_all))
