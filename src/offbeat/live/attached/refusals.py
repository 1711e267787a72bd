"""What cannot be attached is refused with a sentence, and what must be equal on all ranks is compared first."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offbeat.basics.version import __version__
from offbeat.live.attached.flat import Flat
from offbeat.live.carriers import hosts
from offbeat.method.strategy import Method


def check(optimizer: object, model: object, method: object) -> None:
    """Sentences for what cannot be attached."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        raise TypeError(
            "attach takes (optimizer, model, method), but got "
            f"({type(optimizer).__name__}, {type(model).__name__}, {type(method).__name__})"
        )
    if isinstance(model, DistributedDataParallel):
        raise ValueError("the model is wrapped in DistributedDataParallel, which averages too; attach model.module")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure: it evaluates the loss inside its step, where no exchange can "
            "happen; use an optimizer whose step() needs none, such as SGD or AdamW"
        )


def check_sharded(method: Method) -> None:
    """Sentences for what cannot be done with a sharded model."""
    if method.facts.cuts_batches:
        raise ValueError(
            f"{method} lets every rank stop in the middle of its batch, but the ranks of a sharded model must take "
            "all backward passes together; use one that takes whole batches, such as ob.self_clocked()"
        )


def facts(flat: Flat, method: Method, **arguments: object) -> dict[str, str]:
    """What every rank must have alike. A difference in any of these would end in a hang, or in silent nonsense."""
    return {
        "Offbeat version": __version__,
        "torch version": torch.__version__,
        "method": str(method),
        hosts.VARIABLE: hosts.wanted() or "(not set)",
        **{name: str(value) for name, value in arguments.items()},
        "parameters": flat.facts(),
    }
