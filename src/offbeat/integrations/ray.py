"""Ray Train: ``model, optimizer = prepare(model, optimizer)`` in the loop of each worker.

In place of ``ray.train.torch.prepare_model``: the model gets its device, but no DDP, and the optimiser is attached. The
loop stays as it is, inside ``with optimizer:``, at whose end all workers have the same weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offbeat.integrations.needs import trainer
from offbeat.live.attached.attach import attach
from offbeat.live.attached.optimizer import Attached
from offbeat.method.strategy import Method

AT_LEAST = "2.51"


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method | str | None = None,
    *,
    max_norm: float | None = None,
    accumulate: int = 1,
    steps: int | None = None,
    seed: int = 0,
    patience_s: float = 1800.0,
    log: Any = None,
) -> tuple[nn.Module, Attached]:
    """The model on its device, and the attached optimiser; every worker calls it. The rest is as in ``ob.attach``."""
    ray = trainer("ray.train.torch", "ray", AT_LEAST, "ray")
    placed: nn.Module = ray.prepare_model(model, parallel_strategy=None)
    inside = attach(
        optimizer,
        placed,
        method,
        max_norm=max_norm,
        accumulate=accumulate,
        steps=steps,
        seed=seed,
        patience_s=patience_s,
        log=log,
    )
    return placed, inside
