"""Sums of several members' vectors, each with what it counts."""

from __future__ import annotations

import torch

from offbeat.live.memory.adding import STRETCH

N = STRETCH + 17
SHAPES = {
    "one": [[1.0]],
    "one, counted": [[0.3]],
    "a difference": [[1.0, -1.0]],
    "two members": [[1.0], [1.0]],
    "four members": [[1.0]] * 4,
    "each with a step on top": [[1.0, 1.0]] * 3,
    "halves": [[0.5, 0.5, 1.0], [1.0], [0.25, 1.0]],
}


def terms_of(shape: list[list[float]], numel: int = N) -> list[list[tuple[torch.Tensor, float]]]:
    draw = torch.Generator().manual_seed(3)
    return [[(torch.randn(numel, generator=draw), f) for f in member] for member in shape]
