"""The live world: strategies on ``torch.distributed``. The only folder that imports it."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from offbeat.live.attached import Attached, check_optimizer
from offbeat.live.board import Board
from offbeat.live.errors import ConfigMismatch, OffbeatError, PeerFailed
from offbeat.strategy import Strategy, whole

__all__ = ["Attached", "ConfigMismatch", "OffbeatError", "PeerFailed", "attach", "init"]

_attached = itertools.count()
_ours = False


def init(timeout_s: float = 1800.0) -> None:
    """Start ``torch.distributed``, if nobody has: from torchrun's environment, or as a single worker without one."""
    global _ours
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    _ours = True


def attach(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    strategy: Strategy,
    *,
    max_norm: float | None = None,
    accumulate: int = 1,
    steps: int | None = None,
    seed: int = 0,
    patience_s: float = 1800.0,
) -> Attached:
    """Let ``strategy`` decide what each ``optimizer.step()`` exchanges. Every rank must call it.

    Rank 0's parameters and buffers are given to all. ``max_norm`` clips what the inner optimiser is given;
    ``accumulate`` declares how many ``backward()`` calls make a step; ``steps`` tells strategies that plan ahead how long the
    run is; ``patience_s`` is the longest wait for a peer before the run is given up.
    """
    check_optimizer(optimizer, model, strategy)
    whole("attach", "accumulate", accumulate, 1)
    init()
    global _ours
    owns, _ours = _ours, False
    store = dist.distributed_c10d._get_default_store()
    board = Board(store, f"offbeat/{next(_attached)}", dist.get_rank(), dist.get_world_size())
    return Attached(
        optimizer,
        model,
        strategy,
        board,
        max_norm=max_norm,
        accumulate=accumulate,
        seed=seed,
        steps=steps,
        patience_s=patience_s,
        owns_default_group=owns,
    )
