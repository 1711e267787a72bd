"""Counting: a model with one slot for each sample and learning rate 1 shows what became of every sample.

The gradient of a sample is −1 in its own slot, so after a run each slot holds (times applied) / P. ``witnessed``
does the same without autograd, and writes down what each worker sees, for the thousands of schedules of other files.
"""

from __future__ import annotations

import dataclasses
import random
import types
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.method.effects import Got, Grad, Next, Offer, Rest
from offbeat.method.replica import Replica
from offbeat.tensors.vector import Vec

Gradient = Callable[[int, int, Tensor], Tensor]  # of a rank's step, at its weights
AT_MOST = 40  # steps of one worker, so that every sample has a slot


class Slots(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def one_hot(slot: int, count: int) -> Tensor:
    x = torch.zeros(count, dtype=torch.float64)
    x[slot] = 1.0
    return x


def counting(workers: int) -> ob.Task:
    count = workers * AT_MOST
    return ob.Task(
        model=lambda: Slots(count),
        loss=lambda output, target: -output.sum(),
        batch=lambda rank, step: (one_hot(rank * AT_MOST + step, count)[None], torch.zeros(1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )


def applied(run: ob.Run) -> dict[tuple[int, int], float]:
    """(rank, step) → how many times that sample was applied, where it was at all."""
    return {divmod(slot, AT_MOST): times for slot, times in enumerate((run.final * run.workers).tolist()) if times}


def produced(run: ob.Run) -> set[tuple[int, int]]:
    return {(rank, step) for rank, taken in enumerate(run.gradients) for step in range(taken)}


@dataclass
class Witness:
    """What the workers of one run saw."""

    got: dict[int, list[Got]] = field(default_factory=lambda: defaultdict(list))  # by rank, in order
    begun: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # weights each step begins with
    after: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # results taken by then
    sent: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # deposits
    last: dict[int, Tensor] = field(default_factory=dict)  # weights at the end, nothing averaged for the closing


def witnessed(
    strategy: ob.Strategy, gradient: Gradient, dimension: int, lr: float = 1.0
) -> tuple[ob.Strategy, Witness]:
    """``strategy`` on weights of our own, with ``gradient(rank, step, weights)``, where only time is simulated."""
    seen = Witness()

    @types.coroutine
    def body(me: Replica) -> Generator[Any, Any, None]:
        x = torch.zeros(dimension, dtype=torch.float64)

        def update(g: Vec) -> None:
            if g.parts:
                x.sub_(g.parts[0], alpha=lr)

        mine = Replica(me.rank, me.size, Vec([x]), Vec(()), update, lambda: [{"lr": lr}], me.seed, me.horizon)
        inner, rank, step = strategy.body(mine), me.rank, 0
        answer: Any = None
        try:
            while True:
                effect = inner.send(answer)
                if isinstance(effect, Next):
                    seen.begun[rank].append(x.clone())
                    seen.after[rank].append(seen.got[rank][-1].version + 1 if seen.got[rank] else 0)
                elif isinstance(effect, Offer):
                    seen.sent[rank].append(effect.x.parts[0].clone())
                answer = yield effect
                if isinstance(effect, Grad):
                    answer, step = Vec([gradient(rank, step, x)]), step + 1
                elif isinstance(effect, Offer):
                    seen.got[rank] += answer
                elif isinstance(effect, Rest) and answer is not None:
                    seen.got[rank].append(answer)
        except StopIteration:
            seen.last[rank] = x
        finally:
            inner.close()

    return dataclasses.replace(strategy, body=body), seen


def noise(rank: int, step: int, dimension: int = 3) -> Tensor:
    draw = random.Random(hash((rank, step)))
    return torch.tensor([draw.uniform(-1, 1) for _ in range(dimension)], dtype=torch.float64)


def descend(rank: int, step: int, x: Tensor) -> Tensor:
    """A gradient that depends on the weights: of ‖x − target‖²/2, with a target of each sample's own."""
    return x - 4.0 * noise(rank, step, len(x))


def watch(
    strategy: ob.Strategy, workers: int, gradient: Gradient = descend, lr: float = 0.3, dimension: int = 3, **how: Any
) -> tuple[ob.Run, Witness]:
    watched, seen = witnessed(strategy, gradient, dimension, lr)
    return ob.simulate(watched, None, workers, parameters=1, **how), seen


def heavy(seed: int) -> Callable[[int, int], float]:
    return lambda step, rank: 0.05 * random.Random(hash((seed, step, rank))).paretovariate(1.2)


def rotating(step: int, rank: int) -> float:
    return 0.1 + 0.13 * ((rank + 2 * step) % 5) + 0.001 * rank


def equal_rows(rows: Iterable[Tensor]) -> bool:
    first, *rest = rows
    return all(torch.equal(first, row) for row in rest)
