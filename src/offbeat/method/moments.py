"""What an optimiser remembers of the gradients, as a vector: Adam's moments, the momentum of SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from offbeat.tensors.vector import Vec

# What torch's optimisers call their averages of gradients, and of their squares.
NAMES = {1: ("exp_avg", "momentum_buffer"), 2: ("exp_avg_sq", "square_avg", "sum")}


class Moments:
    """The moments of one order (1: of gradients, 2: of their squares), copied from an optimiser.

    ``value`` has the same size on every worker, also on one that has taken no step yet and so has none (it is
    zero then, and not ``are_there``). Beside a phantom it is one, of the size of the weights. ``held``: what of a
    tensor lies here.
    """

    def __init__(
        self,
        order: int,
        x: Vec,
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[Any, Mapping[str, Any]],
        held: Callable[[Any], Tensor] = lambda tensor: tensor,
    ) -> None:
        parameters = [p for group in groups for p in group.get("params", ())]
        parameters.sort(key=lambda p: (str(p.dtype), str(p.device)))  # stable: each kind in the optimiser's own order
        found = [_found(states.get(p, {}), order) for p in parameters]
        self._own = [None if own is None else held(own) for own in found]
        self.are_there = any(own is not None for own in self._own)
        pairs = zip(map(held, parameters), self._own, strict=True)
        kinds = [list(kind) for _, kind in groupby(pairs, key=lambda pair: (pair[0].dtype, pair[0].device))]
        parts = [torch.cat([_flat(p, own) for p, own in kind]) for kind in kinds]
        self._sizes = [[p.numel() for p, _ in kind] for kind in kinds]
        self.value = Vec(parts) if parts else x.zeros_like()

    def adopt(self, value: Vec) -> None:
        """Let the optimiser go on with these; where it has none yet, it begins with its own."""
        pieces = [piece for part, sizes in zip(value.parts, self._sizes, strict=False) for piece in part.split(sizes)]
        for own, piece in zip(self._own, pieces, strict=False):
            if own is not None:
                own.copy_(piece.view_as(own))


@contextmanager
def as_of_the_mean(
    workers: int, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Mapping[str, Any]]
) -> Iterator[None]:
    """For one step, let Adam divide by the squares of the mean of so many workers' gradients, not of its own.

    Of its own gradients it knows the mean m and the mean square v, so their variance is v − m², and that of a mean of n
    of them is an n-th of it: m² + (v − m²)/n. Both corrected as Adam does. What the optimiser remembers stays its own:
    v is linear in what it was before, so what was taken from it is put back afterwards. The newest gradient's square
    still counts in full, (1 − β₂) of the whole: little as long as n is far below 1/(1 − β₂). (Twice the learning rate
    instead moves the directions without noise, too: no better on average, and seeds lie further apart.)
    """
    taken: list[tuple[list[Tensor], list[Tensor], float]] = []
    if workers > 1:
        for group in groups:
            of = [state for p in group.get("params", ()) if "exp_avg_sq" in (state := states.get(p, {}))]
            if not of or "betas" not in group:
                continue
            beta1, beta2 = group["betas"]
            step = of[0]["step"]
            step = step.double() if isinstance(step, Tensor) else step
            scale = (1 - beta2**step) / (1 - beta1**step) ** 2
            share = 1 - 1 / workers
            squares, means = [state["exp_avg_sq"] for state in of], [state["exp_avg"] for state in of]
            if isinstance(scale, Tensor) and scale.is_cuda:  # to ask for its value would wait for the GPU
                noise = torch._foreach_mul(means, means)
                torch._foreach_mul_(noise, -scale)
                torch._foreach_add_(noise, squares)
            else:
                noise = torch._foreach_addcmul(squares, means, means, value=-float(scale))
            torch._foreach_clamp_min_(noise, 0.0)
            torch._foreach_add_(squares, noise, alpha=-share)
            taken.append((squares, list(noise), float(beta2) * share))
    yield
    for own, less, decay in taken:
        torch._foreach_add_(own, less, alpha=decay)


def _found(state: Mapping[str, Any], order: int) -> Tensor | None:
    return next((state[name] for name in NAMES[order] if isinstance(state.get(name), Tensor)), None)


def _flat(p: Tensor, own: Tensor | None) -> Tensor:
    return torch.zeros_like(p).reshape(-1) if own is None else own.detach().reshape(-1).to(p.dtype)
