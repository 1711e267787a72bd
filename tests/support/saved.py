"""Tensors of all kinds, and a model's file for a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.live.host.checkpoint import ModelFile


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(3, 5, generator=generator),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "counter": torch.tensor(12),
        "wide": torch.randn(2, generator=generator, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "small": torch.randn(3, generator=generator).half(),
    }


def packed(named: dict[str, Tensor]) -> memoryview:
    layout = ModelFile(named)
    data = memoryview(bytearray(layout.nbytes))
    layout.lay(named, data)
    return data
