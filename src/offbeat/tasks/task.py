"""What is trained: a model, its loss, its data and its optimiser, in a form that any number of workers can share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat.basics import draw


@dataclass(frozen=True)
class Task:
    """A workload, as functions.

    ```python
    task = Task(
        model=lambda: nn.Linear(10, 1),
        loss=nn.functional.mse_loss,
        batch=lambda rank, step: (x[rank, step], y[rank, step]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    ```

    Arguments:
        model: makes a new model; see ``build`` for where its randomness comes from.
        loss: the mean loss of ``(output, target)``.
        batch: ``(rank, step) -> (*inputs, target)``, the batch that this worker takes at this step of its own. It must
            be a pure function: workers of a simulation ask in any order, and a worker that resumes asks again.
        optimizer: makes the optimiser of one worker from its parameters.
        scheduler: makes the learning-rate scheduler of that optimiser, if there is to be one.
        evaluate: ``model -> {"loss": …, "accuracy": …}`` on held-out data. A task may leave a key out or add its own.
        name: what reports call it.

    Where the functions are importable (not lambdas), a task can be pickled and sent to other processes.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[int, int], tuple[Tensor, ...]]
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    name: str = "task"

    def build(self, seed: int) -> nn.Module:
        """The model as ``torch.manual_seed(seed)`` would have it, with the global generators left as they were.

        It depends on nothing but the seed, whatever was drawn before, and covers the global generators of torch (CPU
        and CUDA), numpy and ``random``.
        """
        cuda_was_awake = torch.cuda.is_initialized()
        with draw.seeded(seed):
            model = self.model()
        if torch.cuda.is_initialized() and not cuda_was_awake:
            # Waking CUDA only to fork generators that most models never touch would cost every worker a context, so
            # it is left asleep. This model woke it up and drew from generators that nobody had seeded: rewind, repeat.
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())
            with draw.seeded(seed):
                model = self.model()
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"the model of task {self.name!r} is a {type(model).__name__}; let `model` be a function without "
                "arguments that returns a torch.nn.Module"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                f"the model of task {self.name!r} has no trainable parameters; give it at least one with "
                "requires_grad=True"
            )
        return model

    def take(self, rank: int, step: int) -> tuple[Tensor, ...]:
        """The checked batch of worker ``rank`` at its step ``step``: the inputs, then the target."""
        batch: object = self.batch(rank, step)
        whose = f"the batch of rank {rank} at step {step} of task {self.name!r}"
        if not isinstance(batch, Sequence) or len(batch) < 2 or not all(isinstance(part, Tensor) for part in batch):
            raise ValueError(
                f"{whose} is {_described(batch)}; return a tuple of tensors, the inputs and then the target"
            )
        parts: tuple[Tensor, ...] = tuple(batch)
        if any(part.dim() == 0 for part in parts):
            raise ValueError(f"{whose} holds a tensor without dimensions; let the first dimension count the samples")
        rows = [len(part) for part in parts]
        if len(set(rows)) > 1:
            counts = ", ".join(map(str, rows))
            raise ValueError(f"{whose} has parts of {counts} samples; give the inputs and the target equally many")
        if rows[0] == 0:
            raise ValueError(
                f"{whose} is empty, and the mean loss of nothing is not a number; give every worker at least one "
                "sample a step, for instance by drawing with replacement, or train fewer steps"
            )
        return parts

    def value(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """The loss of this model on this batch."""
        *inputs, target = batch
        return self.loss(model(*inputs), target)


def _described(batch: object) -> str:
    if not isinstance(batch, tuple | list):
        return f"a {type(batch).__name__}"
    return f"a {type(batch).__name__} of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
