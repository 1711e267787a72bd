"""A worker that is away for many rounds keeps little of them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import offbeat as ob
from tests.support import forge
from tests.support.flows import resident_bytes
from tests.support.forge import Job, said, say

pytestmark = pytest.mark.live

NUMBERS, ROUNDS = 2_000_000, 25


def asleep(rank: int, strategy: ob.Strategy) -> tuple[int, int]:
    """Rank 1 computes while rank 0 takes all its steps: (bytes it has grown by then, rounds it has missed)."""
    model = nn.Module()
    model.p = p = nn.Parameter(torch.zeros(NUMBERS))
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy, patience_s=120)

    def step() -> None:
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    before, seen = resident_bytes(), len(optimizer.trace.rounds)
    if rank == 1:
        say("asleep")  # before that, rank 0's rounds would be none that it has missed
        while not said("over"):
            time.sleep(0.01)
        time.sleep(0.5)  # until the last result is there; if it were not, less would be kept
    else:
        while not said("asleep"):
            time.sleep(0.01)
        for _ in range(ROUNDS):
            step()
        say("over")
    grown = resident_bytes() - before
    step()
    missed = len(optimizer.trace.rounds) - seen - 1
    optimizer.finish()
    return grown, missed


@pytest.mark.parametrize("merge", ["paper", "correct"])
def test_of_averaged_weights_a_late_worker_keeps_the_newest_not_one_of_every_round(merge: str) -> None:
    strategy = ob.wagma(group=2, tau=None, merge=merge)  # type: ignore[arg-type]
    (outcomes,) = forge.run([Job(asleep, 2, (strategy,))])
    grown, missed = forge.values(outcomes)[1]
    assert missed >= ROUNDS - 2
    assert grown < 8 * 4 * NUMBERS, "a few copies of the model, not 25"
