"""Methods of which the others go on without a worker, and a model that counts gradients."""

from __future__ import annotations

import torch
from torch import nn

import offbeat as ob
from tests.support.methods import EVERY_KIND

SIZE = 4
METHODS = {
    **{name: strategy for name, strategy in EVERY_KIND.items() if "per_node=3" not in name},
    "nonblocking in time": ob.nonblocking(3),
    "nonblocking by a ring": ob.nonblocking(over="ring"),
    "self_clocked in pairs": ob.self_clocked(group=2, wait="first"),
    "self_clocked, moments": ob.self_clocked(group=2, moments=2),
    "qsgd along a graph": ob.dpsgd(codec=ob.codec.qsgd(4)),
    "msync of all": ob.msync("100%"),
}

COUNTED = {
    "allreduce": ob.allreduce(),
    "eager": ob.eager(),
    "eager, every step": ob.eager(catch_up="every_step"),
    "eager, late": ob.eager(late=1),
    "eager, all wait": ob.eager(wait="everyone"),
    "msync": ob.msync("50%"),
}


class Ticks(nn.Module):
    """With SGD at rate −1, number r of the weights is the sum of what rank r's gradients have counted."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
