"""A small network, its data and its losses for live tests, and what one process makes of everybody's data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat as ob

SIZE = 3
PATIENCE_S = 120.0  # bounds a hang, and is never reached


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rank: int, t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + t)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return x, y


def loss(model: nn.Module, rank: int, t: int) -> Tensor:
    x, y = batch(rank, t)
    return F.mse_loss(model(x), y)


def backward(optimizer: ob.Attached, model: nn.Module, rank: int, t: int) -> None:
    """The gradients of a step, in micro-batches where the method cuts batches."""
    optimizer.zero_grad()
    if optimizer.method.facts.cuts_batches:
        for x, y in optimizer.micro_batches(batch(rank, t)):
            F.mse_loss(model(x), y).backward()
    else:
        loss(model, rank, t).backward()


def end(optimizer: ob.Attached) -> None:
    """Finish, whatever samples of cut batches nobody has reached."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*samples of this worker were never used")
        optimizer.finish()


def flat(model: nn.Module | Iterable[Tensor]) -> Tensor:
    tensors = model.parameters() if isinstance(model, nn.Module) else model
    return torch.cat([p.detach().reshape(-1).double() for p in tensors])


def flat_grad(model: nn.Module) -> Tensor:
    return flat(p.grad for p in model.parameters() if p.grad is not None)


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


def serial(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    steps: int,
    ranks: Callable[[int], Iterable[int]] = lambda t: range(SIZE),
    clip: float | None = None,
    micro: int = 1,
) -> Tensor:
    """One process that takes the mean of everybody's gradients: what allreduce must equal."""
    model = net()
    inner = optimizer(model)
    for t in range(steps):
        inner.zero_grad()
        members = list(ranks(t))
        for rank in members:
            for m in range(micro):
                (loss(model, rank, micro * t + m) / len(members)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        inner.step()
    return flat(model)


def trained(rank: int, strategy: ob.Strategy, steps: int = 5, seed: int = 0, **settings: Any) -> Tensor:
    model = net(seed)
    with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S, **settings) as optimizer:
        for t in range(steps):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
    return flat(model)


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def same(tensors: Iterable[Tensor]) -> bool:
    first, *rest = tensors
    return all(torch.equal(first, other) for other in rest)
