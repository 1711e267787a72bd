"""Least squares with a known answer: convex, and its distance from the optimum is exact."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.basics import draw
from offbeat.tasks.task import Task

_BATCH, _OPTIMUM = 0x4E61, 0x4E62  # so that no other draw shares our keys


def regression(
    dimension: int = 16,
    batch: int = 16,
    noise: float = 0.1,
    lr: float = 0.05,
    momentum: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Task:
    """Find w in ``y = x·w* + noise·ε``, with x and ε standard normal: every batch is fresh, and the optimum is known.

    ``evaluate`` is exact, not sampled: the expected loss over all data is ``‖w − w*‖² + noise²``, reported as
    ``"loss"``, and ``‖w − w*‖`` is reported as ``"distance"``.

    Arguments:
        dimension: how many weights there are.
        batch: samples a worker takes each step.
        noise: standard deviation of the targets around ``x·w*``.
        lr: of ``torch.optim.SGD``.
        momentum: of ``torch.optim.SGD``.
        seed: which w* is to be found, and which samples are drawn. (The initial weights come from the seed of the run.)
        dtype: of the model and the data.
        device: of the model and the data. All is drawn in double precision on the CPU, so every dtype and device
            sees the same numbers, rounded.
    """
    if dimension < 1:
        raise ValueError(f"a regression of dimension {dimension} has nothing to learn; use dimension=1 or more")
    if batch < 1:
        raise ValueError(f"a batch of {batch} samples teaches nothing; use batch=1 or more")
    if noise < 0:
        raise ValueError(f"noise={noise} is not a standard deviation; use 0 or more")
    device = torch.device(device)
    goal = optimum(dimension, seed)
    return Task(
        model=partial(_model, dimension, dtype, device),
        loss=F.mse_loss,
        batch=partial(_batch, goal, batch, noise, seed, dtype, device),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum),
        evaluate=partial(_evaluate, goal, noise),
        name="regression",
    )


def optimum(dimension: int = 16, seed: int = 0) -> Tensor:
    """w*, the weights that ``regression(dimension, seed=seed)`` is looking for, in double precision on the CPU."""
    return _normal(dimension, _OPTIMUM, seed)


def _model(dimension: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    return nn.Linear(dimension, 1, bias=False, device="cpu", dtype=torch.float64).to(device, dtype)


def _batch(
    goal: Tensor, size: int, noise: float, seed: int, dtype: torch.dtype, device: torch.device, rank: int, step: int
) -> tuple[Tensor, ...]:
    x, epsilon = _normal(size * (len(goal) + 1), _BATCH, seed, rank, step).split([size * len(goal), size])
    x = x.view(size, len(goal))
    y = x @ goal + noise * epsilon
    return x.to(device, dtype), y[:, None].to(device, dtype)


@torch.no_grad()
def _evaluate(goal: Tensor, noise: float, model: nn.Module) -> dict[str, float]:
    (w,) = model.parameters()
    distance = torch.linalg.vector_norm(w.flatten().to("cpu", torch.float64) - goal).item()
    return {"loss": distance**2 + noise**2, "distance": distance}


def _normal(count: int, *key: int) -> Tensor:
    return torch.randn(count, generator=draw.generator(*key), dtype=torch.float64, device="cpu")
