"""Results that come while their worker computes: nobody waits for its next step to hear what it has handed in."""

from __future__ import annotations

import pytest

import offbeat as ob
from tests.support.forge import hear, say
from tests.support.nets import PATIENCE_S, loss, net, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

STEPS = 5


@scenario(2)
def computes_until_it_was_heard(rank: int) -> int:
    """Rank 0 computes, in each step, until rank 1 has taken the round that both handed in for before."""
    model, steps = net(seed=0), 0
    strategy = ob.eager("everyone", late=1, sync="barrier", sync_every=None)
    with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
        for t in range(STEPS):
            optimizer.zero_grad()
            if rank == 0 and t:
                hear(f"rank 1 has taken round {t - 1}", timeout_s=30.0)
            loss(model, rank, t).backward()
            optimizer.step()
            steps += 1
            if rank == 1 and t:  # which needs the round before
                say(f"rank 1 has taken round {t - 1}")
    return steps


def test_what_a_step_has_handed_in_is_heard_while_the_next_one_is_computed(told: Told) -> None:
    assert told(computes_until_it_was_heard) == [STEPS, STEPS]
