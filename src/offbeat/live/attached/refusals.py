"""What cannot be attached, or not be done while attached, is refused; what must be equal on all ranks is compared."""

from __future__ import annotations

import inspect
import sys
from types import FrameType

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offbeat.basics.version import __version__
from offbeat.basics.warn import warn
from offbeat.live.attached.flat import Flat
from offbeat.live.transport import elsewhere, hosts
from offbeat.live.transport.errors import OffbeatError
from offbeat.method.strategy import Method


def check(optimizer: object, model: object, method: object) -> None:
    """Sentences for what cannot be attached."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        raise TypeError(
            "attach takes (optimizer, model, method), but got "
            f"({type(optimizer).__name__}, {type(model).__name__}, {type(method).__name__}); give them in this order"
        )
    _check_wrappers(model)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure: it evaluates the loss inside its step, where no exchange can "
            "happen; use an optimizer whose step() needs none, such as SGD or AdamW"
        )
    if any(isinstance(hook, OnlyAttachedSteps) for hook in optimizer._optimizer_step_pre_hooks.values()):
        raise ValueError(
            f"this {type(optimizer).__name__} is attached already, and its run has not ended; call finish() on what "
            "ob.attach returned for it, or build another optimizer"
        )
    _check_parameters(optimizer, model)


def _check_wrappers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        which = f"its part {name}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{which} is wrapped in DistributedDataParallel, which averages gradients too; remove the line that "
                "wraps it (model = DistributedDataParallel(model, …)), and build the optimizer from the model itself"
            )
        if kind == "FullyShardedDataParallel":  # by its name: importing it takes a while
            raise ValueError(
                f"{which} is wrapped in FullyShardedDataParallel, whose shards cannot be averaged; shard the model "
                "with torch.distributed.fsdp.fully_shard instead"
            )


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    left_out = [name for name, p in learning.items() if id(p) not in given]
    if learning and len(left_out) == len(learning):
        raise ValueError(
            f"the optimizer has none of the model's {len(learning)} parameters, so a step would leave the model as it "
            "is; build it from the very model that is attached: torch.optim.SGD(model.parameters(), …)"
        )
    if elsewhere.holds(learning.values()):
        warn(
            "another optimizer is attached to parameters of this model, and its run has not ended, so both would "
            "average them; call finish() on it first, or attach each optimizer to its own part of the model"
        )
    if left_out:
        some = ", ".join(left_out[:3]) + (f" and {len(left_out) - 3} more" if len(left_out) > 3 else "")
        warn(
            f"the optimizer has {len(learning) - len(left_out)} of the model's {len(learning)} parameters that require "
            f"gradients; {some} will not be trained, and travel all the same; give them to the optimizer, freeze them "
            "with requires_grad_(False), or attach the part of the model that it trains"
        )


class OnlyAttachedSteps:
    """Refuses a step of the inner optimiser that the attached one has not asked for.

    ``optimizer = ob.attach(inner, model)``, and then ``inner.step()``: this worker would train alone, and nobody would
    notice. Schedulers and scalers that hold the inner one do not step it by themselves; ``get_state_dict`` of
    ``torch.distributed.checkpoint`` does, with a learning rate of 0, to make its state.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._asked = False
        self._hook = inner.register_step_pre_hook(self)

    def __call__(self, inner: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not self._asked and not _caller().startswith("torch.distributed.checkpoint"):
            raise OffbeatError(
                f"step() was called on the {type(inner).__name__} that is attached, with which this worker would train "
                "alone; call step() on what ob.attach returned: optimizer = ob.attach(optimizer, model)"
            )

    def step(self, inner: torch.optim.Optimizer) -> None:
        """The step that the attached optimiser asks for."""
        self._asked = True
        try:
            inner.step()
        finally:
            self._asked = False

    def release(self) -> None:
        """The run is over: the inner optimiser is the user's again."""
        self._hook.remove()


def _caller() -> str:
    """The module that has called ``step()``: the first one that is not the optimiser's own."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.optim", "torch.utils")):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


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
