"""Decoupled DiLoCo between processes: rounds of one fragment each, whose vectors are not like the weights."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import offbeat as ob
from tests.support.forge import hear, say
from tests.support.scenarios import CARRIERS, Call, Turns, in_turn, over

pytestmark = pytest.mark.live

STEPS, SIZE = 12, 3
STRATEGIES = {
    "diloco": ob.diloco(3),
    "of all, direct": ob.decoupled(3, 1, "everyone", "direct"),
    "fragments of all": ob.decoupled(1, 4, "everyone"),
    "two of three": ob.decoupled(1, 3, 2),
    "any": ob.decoupled(2, 2, 1),
}


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def trained(rank: int, name: str) -> tuple[Tensor, Tensor, list[int], list[dict[int, int]]]:
    """The weights before the end and at it, what was lost, and who was in which round."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, STRATEGIES[name], patience_s=120)
    for step in range(STEPS):
        if name in ("two of three", "any"):
            stall(rank, step, name)
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step)).double()
        model(x).square().mean().backward()
        optimizer.step()
    before = flat(model)
    optimizer.finish()
    return before, flat(model), optimizer.lost, [dict(r.staleness) for r in optimizer.trace.rounds]


def stall(rank: int, step: int, name: str) -> None:
    """Rank 2 stays in its third step until rank 0 has taken four more; nobody may be waited for."""
    if (rank, step) == (2, 2):
        say(f"{name}: stalled")
        hear(f"{name}: go on")
    elif (rank, step) == (0, 2):
        hear(f"{name}: stalled")
    elif (rank, step) == (0, 6):
        say(f"{name}: go on")
    else:
        time.sleep(0.002 * ((rank + step) % 3 == 0))


@pytest.fixture(scope="module", params=CARRIERS)
def ran(request: pytest.FixtureRequest) -> Turns[str]:
    return in_turn({n: Call(over, (request.param, trained, n)) for n in STRATEGIES}, SIZE, init=False)


def test_one_fragment_and_a_direct_mean_of_all_make_it_diloco(ran: Turns[str]) -> None:
    for mine, other in zip(ran["of all, direct"], ran["diloco"], strict=True):
        torch.testing.assert_close(mine[0], other[0], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(mine[1], other[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "diloco"])
def test_all_end_with_the_same_bits_and_tell_the_same_of_every_round(ran: Turns[str], name: str) -> None:
    everyone = ran[name]
    assert all(torch.equal(final, everyone[0][1]) for _, final, _, _ in everyone)
    assert all(rounds == everyone[0][3] for _, _, _, rounds in everyone)
    assert all(lost == [] for _, _, lost, _ in everyone)


@pytest.mark.parametrize("name", ["two of three", "any"])
def test_rounds_go_on_without_a_learner_that_has_stalled_and_it_comes_back(ran: Turns[str], name: str) -> None:
    rounds = ran[name][0][3]
    there = [2 in contributors for contributors in rounds]
    assert any(there)
    assert not all(there)
    assert all(age == 0 for contributors in rounds for age in contributors.values())
