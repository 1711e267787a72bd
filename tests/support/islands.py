"""Two islands of two ranks each, and a task for both of them and for two workers with a whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import offbeat as ob

OF = 2  # ranks of an island


@cache
def mesh(kind: str = "cpu") -> DeviceMesh:
    """This rank's island, of four ranks; of ``"cuda"``: all on one GPU."""
    return init_device_mesh(kind, (2, OF), mesh_dim_names=("between", "inside"))["inside"]


M = TypeVar("M", bound=nn.Module)


def sharded(model: M, over: DeviceMesh | None = None) -> M:
    """Over its island, layer by layer; or all of it ``over`` another mesh."""
    own = mesh(next(model.parameters()).device.type) if over is None else over
    for layer in model.children() if over is None else ():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=own)
    fully_shard(model, mesh=own)
    return model


def task() -> ob.Task:
    """One that every rank has its own data of. 13 rows do not make two equal shards."""
    return ob.tasks.digits(batch=8, hidden=13, momentum=0.9, lr=0.05, dtype=torch.float64)


def joined() -> ob.Task:
    """The same for as many workers as there are islands: each has the data of an island's ranks."""
    own = task()

    def batch(worker: int, step: int) -> tuple[Tensor, ...]:
        parts = [own.take(OF * worker + shard, step) for shard in range(OF)]
        return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))

    return replace(own, batch=batch)


@torch.no_grad()
def weights(model: nn.Module) -> Tensor:
    """All of them; the ranks of an island ask together."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.reshape(-1) for p in whole]).clone()
