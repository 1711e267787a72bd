"""Ray Train: ``model, optimizer, loader = prepare(model, optimizer, loader=loader)`` in the loop of each worker.

In place of ``ray.train.torch.prepare_model`` and ``prepare_data_loader``: the model gets its device, but no DDP, the
optimiser is attached, and workers share the work of the loader, whose batches come on the device. The loop stays as it
is, inside ``with optimizer:``, at whose end all workers have the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from offbeat.integrations.needs import trainer
from offbeat.integrations.shares import shared
from offbeat.live.attached.attach import attach
from offbeat.method.strategy import Method
from offbeat.strategies import as_method

AT_LEAST = "2.51"


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method | str | None = None,
    *,
    loader: DataLoader[Any] | None = None,
    share: bool = True,
    max_norm: float | None = None,
    accumulate: int = 1,
    steps: int | None = None,
    seed: int = 0,
    patience_s: float = 1800.0,
    log: Any = None,
) -> tuple[Any, ...]:
    """The model on its device, and the attached optimiser; every worker calls it. The rest is as in ``ob.attach``.

    With a ``loader``, as it is made for one process, that comes third: its work is shared, and its batches come on the
    device. With ``share=False``, and where the loader has a sampler of its own, it is what Ray's
    ``prepare_data_loader`` makes of it.
    """
    method = as_method(method)
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
    if loader is None:
        return placed, inside
    dealt = shared(loader, method, seed) if share else None
    return placed, inside, ray.prepare_data_loader(loader) if dealt is None else _Placed.over(dealt, ray.get_device())


class _Placed(DataLoader[Any]):
    """A shared loader whose batches come on the device, as Ray's do."""

    _device: torch.device

    @classmethod
    def over(cls, loader: DataLoader[Any], device: torch.device) -> DataLoader[Any]:
        loader.__class__ = cls
        made: Any = loader
        made._device = device
        return loader

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (_moved(batch, self._device) for batch in super().__iter__())


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _moved(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(part, device) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(part, device) for part in batch)
    return batch
