"""What a worker that is away for many rounds keeps of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

import offbeat as ob
from tests.live.partial.partial_jobs import resident_bytes

NUMBERS, ROUNDS = 2_000_000, 25


def asleep(rank: int, strategy: ob.Strategy) -> tuple[int, int]:
    """Rank 1 computes while rank 0 takes all its steps: (bytes it has grown by then, rounds it has missed)."""
    over = Path(os.environ["JOB_FOLDER"], "over")
    model = nn.Module()
    model.p = nn.Parameter(torch.zeros(NUMBERS))
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy, patience_s=120)

    def step() -> None:
        optimizer.zero_grad()
        model.p.sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    before, seen = resident_bytes(), len(optimizer.trace.rounds)
    if rank == 1:
        while not over.exists():
            time.sleep(0.01)
        time.sleep(0.5)  # until the last result is there; if it were not, less would be kept
    else:
        for _ in range(ROUNDS):
            step()
        over.touch()
    grown, missed = resident_bytes() - before, len(optimizer.trace.rounds) - seen
    step()
    optimizer.finish()
    return grown, missed
