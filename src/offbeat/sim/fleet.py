"""All replicas of a simulated run in a few tables, and their gradients in one batched call.

Row i of every table belongs to worker i: weights, gradients, floating buffers, integer buffers. Gradients that are
due at about the same moment are computed together with ``torch.func.vmap``, on the device the model lives on; those of
a model that draws something (dropout) one after the other, each with the draws of its own batch.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from offbeat.basics import draw
from offbeat.basics.warn import warn
from offbeat.tasks.task import Task
from offbeat.tensors.layout import Layout
from offbeat.tensors.vector import Vec

Key = tuple[int, int, int]  # rank, batch, first row: what a model draws depends on these


class Fleet:
    """The workers' models, optimisers and gradients."""

    def __init__(self, task: Task, workers: int, seed: int) -> None:
        self.task = task
        self.skeleton = task.build(seed)
        self.skeleton.train()
        trainable = [(n, p) for n, p in self.skeleton.named_parameters() if p.requires_grad]
        buffers = list(self.skeleton.named_buffers())
        self.layout = Layout.of(trainable)
        self.floating = Layout.of((n, b) for n, b in buffers if b.is_floating_point())
        self.counting = Layout.of((n, b) for n, b in buffers if not b.is_floating_point())
        self.X, self.G = self.layout.empty(workers), self.layout.empty(workers)
        self.B, self.N = self.floating.empty(workers), self.counting.empty(workers)
        for layout, table, tensors in (
            (self.layout, self.X, [p for _, p in trainable]),
            (self.floating, self.B, [b for _, b in buffers if b.is_floating_point()]),
            (self.counting, self.N, [b for _, b in buffers if not b.is_floating_point()]),
        ):
            for slot, tensor in zip(layout.slots, tensors, strict=True):
                slot.rows(table[slot.part]).copy_(tensor.detach().expand(workers, *slot.shape))
        self.x = [Vec([part[i] for part in self.X]) for i in range(workers)]
        self.g = [Vec([part[i] for part in self.G]) for i in range(workers)]
        self.buffers = [Vec([part[i] for part in self.B]) for i in range(workers)]
        self._optimizers = [self._optimizer(i) for i in range(workers)]
        self._schedulers = [task.scheduler(o) if task.scheduler else None for o in self._optimizers]
        self._ticked = [0] * workers
        self.steps_of_the_job: Callable[[], int] | None = None  # where schedules are to follow them
        self._due: dict[int, int] = {}  # rank: the batch whose gradient it computes
        self._seed, self.cuda = seed, draw.cuda_of(chain(self.skeleton.parameters(), self.skeleton.buffers()))
        self._one_by_one = self._has_begun = False
        self._loss_sum: dict[int, float] = defaultdict(float)
        self._loss_count: dict[int, int] = defaultdict(int)

    def _optimizer(self, rank: int) -> torch.optim.Optimizer:
        params = [nn.Parameter(slot.view(self.X[slot.part][rank])) for slot in self.layout.slots]
        for slot, p in zip(self.layout.slots, params, strict=True):
            p.grad = slot.view(self.G[slot.part][rank])
        optimizer = self.task.optimizer(params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the task's optimizer gave {optimizer!r}; it must return a torch.optim.Optimizer")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the loss inside its step; use an optimizer whose step needs no closure")
        return optimizer

    def groups(self, rank: int) -> list[dict[str, Any]]:
        return self._optimizers[rank].param_groups

    def states(self, rank: int) -> Mapping[Any, Mapping[str, Any]]:
        return self._optimizers[rank].state

    def update(self, rank: int, g: Vec) -> None:
        """One optimiser step of worker ``rank``."""
        if g is not self.g[rank]:
            self.g[rank].copy_(g)
        self._optimizers[rank].step()

    def take_over(self, rank: int, other: int) -> int:
        """Worker ``rank`` has from now on what the other one has by now: so many bytes."""
        self._due.pop(rank, None)  # it was computing when it died
        for table in (self.X, self.B, self.N):
            for part in table:
                part[rank] = part[other]
        mine, theirs = (self._optimizers[one] for one in (rank, other))
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
        for own, of_other in ((self._schedulers[rank], self._schedulers[other]),):
            if own is not None and of_other is not None:
                own.load_state_dict(copy.deepcopy(of_other.state_dict()))
        self._ticked[rank] = self._ticked[other]
        held = [value for state in theirs.state.values() for value in state.values() if isinstance(value, Tensor)]
        return sum(part[other].nbytes for table in (self.X, self.B, self.N) for part in table) + sum(
            value.nbytes for value in held
        )

    def tick(self, rank: int) -> None:
        """An optimiser step is over: the learning-rate schedule moves on, to where the job is if work is shared."""
        scheduler = self._schedulers[rank]
        if scheduler is not None:
            goal = self._ticked[rank] + 1 if self.steps_of_the_job is None else self.steps_of_the_job()
            for _ in range(goal - self._ticked[rank]):
                scheduler.step()
            self._ticked[rank] = goal

    def ask(self, rank: int, step: int) -> None:
        """Worker ``rank`` begins to compute the gradient of its batch ``step`` at its weights of now."""
        assert rank not in self._due, "a worker computes one gradient at a time"
        self._due[rank] = step

    def gradient(self, rank: int) -> Vec:
        """The gradient that was asked for; all that were asked for since are computed with it.

        Weights of a worker that is computing must not change before this (rule 5 of the effects), so the rows may be
        read now instead of when they were asked for.
        """
        if rank in self._due:
            self._compute()
        return self.g[rank]

    def rows(self, rank: int, step: int) -> int:
        """How many samples worker ``rank``'s batch ``step`` has."""
        return int(self.task.take(rank, step)[0].shape[0])

    def union(self, rank: int, pieces: list[tuple[int, int, int, int]]) -> Vec:
        """Σ over samples of their gradients at the weights of now. A piece is (batch, from row, to row, round)."""
        total = self.g[rank].zero_()
        groups: dict[tuple[int, int], list[tuple[int, Key, tuple[Tensor, ...]]]] = defaultdict(list)
        alone = bool(self.floating.slots or self.counting.slots)  # BatchNorm moves on with every micro-batch
        for k, (step, lo, hi, r) in enumerate(pieces):
            batch = tuple(b[lo:hi] for b in self.task.take(rank, step))
            groups[hi - lo, k if alone else 0].append((r, (rank, step, lo), batch))
        for (samples, _), members in groups.items():
            stacked = [torch.stack(columns) for columns in zip(*(batch for _, _, batch in members), strict=True)]
            grads, values, state = self._evaluate([key for _, key, _ in members], stacked)
            for k, part in enumerate(total.parts):
                columns = [grads[s.name].reshape(len(members), -1) for s in self.layout.slots if s.part == k]
                part.add_(torch.cat(columns, dim=1).sum(dim=0), alpha=float(samples))
            last = torch.tensor([rank])
            self._store(self.floating, self.B, last, {n: s[-1:] for n, s in state.items()})
            self._store(self.counting, self.N, last, {n: s[-1:] for n, s in state.items()})
            for (r, _, _), value in zip(members, values.tolist(), strict=True):
                self._loss_sum[r] += value * samples
                self._loss_count[r] += samples
        return total

    def losses(self) -> Tensor:
        """The training loss of each step, averaged over the workers that took it."""
        steps = max(self._loss_count, default=-1) + 1
        nan = float("nan")
        values = [self._loss_sum[t] / self._loss_count[t] if self._loss_count[t] else nan for t in range(steps)]
        return torch.tensor(values, dtype=torch.float64)

    def _compute(self) -> None:
        groups: dict[Any, list[tuple[int, int, tuple[Tensor, ...]]]] = defaultdict(list)
        for rank, step in self._due.items():
            batch = self.task.take(rank, step)
            groups[tuple((b.shape, b.dtype) for b in batch)].append((rank, step, batch))
        self._due.clear()
        for members in groups.values():
            stacked = [torch.stack(columns) for columns in zip(*(batch for _, _, batch in members), strict=True)]
            values = self._gradients([(rank, step, 0) for rank, step, _ in members], stacked)
            for (_, step, _), value in zip(members, values.tolist(), strict=True):
                self._loss_sum[step] += value
                self._loss_count[step] += 1

    def _gradients(self, keys: list[Key], batch: list[Tensor]) -> Tensor:
        grads, values, state = self._evaluate(keys, batch)
        ranks = torch.tensor([rank for rank, _, _ in keys])
        self._store(self.layout, self.G, ranks, grads)
        self._store(self.floating, self.B, ranks, state)
        self._store(self.counting, self.N, ranks, state)
        return values

    def _evaluate(self, keys: list[Key], batch: list[Tensor]) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Gradients, losses and new buffers, one row for each key."""
        ranks = torch.tensor([rank for rank, _, _ in keys])
        weights = self._tensors(self.layout, self.X, ranks)
        state = {**self._tensors(self.floating, self.B, ranks), **self._tensors(self.counting, self.N, ranks)}
        device = next(iter(weights.values())).device
        batch = [b.to(device) for b in batch]
        if not self._one_by_one:
            try:
                together = self._together(weights, state, batch)
                if together is not None:
                    return together
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                if "randomness error mode" not in reason:
                    warn(f"gradients are computed one at a time, since vmap refused: {reason}")
            self._one_by_one = True
        return self._loop(keys, weights, state, batch)

    def _together(
        self, weights: dict[str, Tensor], state: dict[str, Tensor], batch: list[Tensor]
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]] | None:
        """All in one call; None if the model draws, which vmap notices where it draws from torch, whenever it does."""
        looks = not self._has_begun  # at the first call only: it takes as long as a small model
        before = draw.states() if looks else None
        function = vmap(grad_and_value(self._loss, has_aux=True), randomness="error")
        grads, (values, state) = function(weights, state, *batch)
        self._has_begun = True
        return None if looks and draw.states() != before else (grads, values.detach(), state)

    def _loss(self, weights: dict[str, Tensor], state: dict[str, Tensor], *batch: Tensor) -> tuple[Tensor, Any]:
        state = {name: tensor.clone() for name, tensor in state.items()}
        output = functional_call(self.skeleton, {**weights, **state}, batch[:-1])
        return self.task.loss(output, batch[-1]), {name: tensor.detach() for name, tensor in state.items()}

    def _loop(
        self, keys: list[Key], weights: dict[str, Tensor], state: dict[str, Tensor], batch: list[Tensor]
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        rows = []
        for k, key in enumerate(keys):
            draw.reseed(draw.for_batch(self._seed, *key), self.cuda)
            leaves = {n: w[k].clone().requires_grad_() for n, w in weights.items()}
            buffers = {n: s[k].clone() for n, s in state.items()}
            value = self.task.loss(
                functional_call(self.skeleton, {**leaves, **buffers}, tuple(b[k] for b in batch[:-1])), batch[-1][k]
            )
            grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            filled = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, leaves.values(), strict=True)]
            rows.append((dict(zip(leaves, filled, strict=True)), value.detach(), buffers))
        return (
            {n: torch.stack([grads[n] for grads, _, _ in rows]) for n in weights},
            torch.stack([value for _, value, _ in rows]),
            {n: torch.stack([buffers[n] for _, _, buffers in rows]) for n in state},
        )

    @staticmethod
    def _tensors(layout: Layout, table: list[Tensor], ranks: Tensor) -> dict[str, Tensor]:
        rows = [part[ranks.to(part.device)] for part in table]
        return {slot.name: slot.rows(rows[slot.part]) for slot in layout.slots}

    @staticmethod
    def _store(layout: Layout, table: list[Tensor], ranks: Tensor, tensors: dict[str, Tensor]) -> None:
        for k, part in enumerate(table):
            columns = [tensors[s.name].reshape(len(ranks), -1) for s in layout.slots if s.part == k]
            part[ranks.to(part.device)] = torch.cat(columns, dim=1).to(part.dtype)

    def mean_model(self) -> nn.Module:
        """The mean of all replicas, as they are now (integer buffers: worker 0's)."""
        return self._as_module(lambda part: part.mean(dim=0) if part.is_floating_point() else part[0])

    def model(self, rank: int) -> nn.Module:
        """Worker ``rank``'s model, by itself."""
        return self._as_module(lambda part: part[rank])

    def _as_module(self, row: Callable[[Tensor], Tensor]) -> nn.Module:
        module = copy.deepcopy(self.skeleton)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for layout, table in ((self.layout, self.X), (self.floating, self.B), (self.counting, self.N)):
                for slot in layout.slots:
                    named[slot.name].copy_(slot.view(row(table[slot.part])))
        return module
