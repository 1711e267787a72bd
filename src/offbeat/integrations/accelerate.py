"""Accelerate: ``model, optimizer, loader = prepare(accelerator, model, optimizer, loader)``.

In place of ``accelerator.prepare``: the model gets its device, autocast and compilation, but no DDP, and the optimiser
is attached. ``accelerator.save_state`` saves the average of the workers. The work of loaders that shuffle is shared,
and a scheduler follows it. The loop stays as it is, inside ``with attached(optimizer):``, at whose end all workers have
the same weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import RandomSampler

from offbeat.integrations.needs import needed, trainer
from offbeat.integrations.shares import TrainersShare, shared, work_of
from offbeat.live.attached.attach import attach
from offbeat.live.attached.optimizer import Attached
from offbeat.live.work.follow import follow
from offbeat.method.strategy import Method
from offbeat.strategies import as_method

AT_LEAST = "1.1"


def prepare(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    *others: Any,
    method: Method | str | None = None,
    max_norm: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    patience_s: float = 1800.0,
    log: Any = None,
    share: bool = True,
) -> tuple[Any, ...]:
    """The model, the optimiser and the others (loaders, a scheduler), prepared, in this order. Every rank must call it.

    ``method`` and the rest are as in ``ob.attach``. Accumulation is the accelerator's. ``share=False``: fixed shares of
    the data, as Accelerate's own; otherwise workers share the work of loaders that shuffle. (Earlier the method came
    before the model: ``prepare(accelerator, ob.eager(), model, optimizer, loader)``, which is still understood.)
    """
    needed("accelerate", AT_LEAST, "accelerate")
    if isinstance(model, Method) and others and method is None:
        method, model, optimizer, others = model, optimizer, others[0], others[1:]
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "prepare takes (accelerator, model, optimizer, …, method=…), but after the accelerator came "
            f"({type(model).__name__}, {type(optimizer).__name__}); give the model first, then the optimizer"
        )
    if misplaced := [one for one in others if isinstance(one, Method)]:
        raise TypeError(f"{misplaced[0]} came among what is to be prepared; say method={misplaced[0]}")
    method = as_method(method)
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    inside = attach(
        optimizer,
        accelerator.unwrap_model(prepared),
        method,
        max_norm=max_norm,
        accumulate=accelerator.gradient_accumulation_steps,
        steps=steps,
        seed=seed,
        patience_s=patience_s,
        log=log,
    )

    def before_saving(models: Any, states: list[dict[str, Any]], folder: Any) -> None:
        """Called on all ranks. What is to be saved are the model's own tensors, so they may still change."""
        if not inside.is_over:
            inside.average()

    accelerator.register_save_state_pre_hook(before_saving)
    given = [_shared(one, accelerator, method, seed) if share else one for one in others]
    works = [work for one in given if (work := work_of(one)) is not None]
    for work in works:
        # Accelerate steps a scheduler once for each process, as schedules are made for the loader of one process.
        each = accelerator.gradient_accumulation_steps
        if accelerator.step_scheduler_with_optimizer:
            work.scale = accelerator.num_processes
            work.per_epoch = work.batches / each / work.scale
        else:
            work.per_epoch = -(-len(work) // each)
        accelerator.register_for_checkpointing(work)
    for one in given:
        if works and isinstance(one, LRScheduler) and not isinstance(one, ReduceLROnPlateau):
            follow(one, works[0])
    rest = accelerator.prepare(inside, *given)
    return (prepared, *(rest if others else (rest,)))


def _shared(one: Any, accelerator: Any, method: Method, seed: int) -> Any:
    if accelerator.split_batches or accelerator.dispatch_batches:
        return one
    if not isinstance(getattr(one, "sampler", None), RandomSampler):
        return one
    dealt = shared(one, method, seed)
    return one if dealt is None else placed(dealt, accelerator)


def placed(loader: Any, accelerator: Any) -> Any:
    """A shared loader as Accelerate prepares it, but for the shares: batches come on the device."""
    library = trainer("accelerate.data_loader", "accelerate", AT_LEAST, "accelerate")
    made = library.prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )
    made._is_accelerate_prepared = True
    work: TrainersShare = made.batch_sampler
    work.loader = made
    return accelerator.prepare_data_loader(made)


def attached(optimizer: Any) -> Attached:
    """The attached optimiser inside a prepared one: for ``average()``, ``finish()``, ``summary()`` and ``with``."""
    found = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(found, Attached):
        raise TypeError(
            f"{type(optimizer).__name__} was not made by offbeat.integrations.accelerate.prepare; "
            "give what prepare returned"
        )
    return found
