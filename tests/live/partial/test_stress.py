"""Many rounds of every size between six processes, and one that the others do not wait for.

``make long`` runs the long version: 2,000 rounds and more, with messages of up to 10⁷ numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat as ob
from tests.support.flows import Flow, flow_of
from tests.support.forge import hear, said, say
from tests.support.long import LONG
from tests.support.scenarios import CARRIERS, Call, Turns, in_turn, over

pytestmark = pytest.mark.live

SIZE = 6
FLOWS = (
    ((1, 700), (1_000, 700), (100_000, 500), (1_000_000, 150), (10_000_000, 30))
    if LONG
    else ((1, 25), (1_000, 25), (100_000, 20), (1_000_000, 8))
)  # (numbers in a message, steps of each worker)


@pytest.fixture(scope="module", params=CARRIERS)
def flows(request: pytest.FixtureRequest) -> Turns[int]:
    calls = {k: Call(over, (request.param, flow_of, *each)) for k, each in enumerate(FLOWS)}
    return in_turn(calls, SIZE, timeout_s=600, init=False)


@pytest.mark.parametrize("number", range(len(FLOWS)), ids=[str(numbers) for numbers, _ in FLOWS])
def test_no_message_is_torn_and_all_see_the_same_results(flows: Turns[int], number: int) -> None:
    seen: list[Flow] = flows[number]
    assert all(flow.torn == 0 for flow in seen)
    assert all(flow.results == seen[0].results for flow in seen)
    assert list(seen[0].results) == list(range(len(seen[0].results)))
    assert len(seen[0].results) >= FLOWS[number][1]


@pytest.mark.parametrize("number", range(len(FLOWS)), ids=[str(numbers) for numbers, _ in FLOWS])
def test_the_results_add_up_to_what_was_deposited(flows: Turns[int], number: int) -> None:
    seen: list[Flow] = flows[number]
    given, got = sum(flow.deposited for flow in seen), SIZE * sum(seen[0].results.values())
    assert abs(got - given) < 1e-5 * given


@pytest.mark.parametrize("number", range(len(FLOWS)), ids=[str(numbers) for numbers, _ in FLOWS])
def test_memory_is_flat(flows: Turns[int], number: int) -> None:
    seen: list[Flow] = flows[number]
    for flow in seen:
        # Of the trays and results that are there at a moment there may be a few more or a few less.
        few = 40 * 4 * flow.numbers
        assert flow.end_bytes < 1.05 * flow.warm_bytes + few


NEVER = {
    "eager": ob.eager(sync_every=None),
    "eager, late": ob.eager(sync_every=None, late=1),
    "wagma": ob.wagma(tau=None),
    "ad_psgd": ob.ad_psgd(),
    "moments too": ob.wagma(tau=None, moments=1),
}
BESIDE = 20  # steps of the others while one takes its second


def beside_a_straggler(rank: int, name: str) -> list[int]:
    """Rank 1 stays in its second step until the others have taken ``BESIDE`` meanwhile; how many these were."""
    others, model = (0, 2), nn.Linear(10, 10)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, NEVER[name], patience_s=120)
    for step in range(2 if rank == 1 else BESIDE + 2):
        if rank == 1 and step == 1:
            say(f"{name}: held")
            for other in others:
                hear(f"{name}: rank {other} took {BESIDE}")
        elif step == 1:
            hear(f"{name}: held")
        optimizer.zero_grad()
        model(torch.ones(1, 10)).sum().backward()
        optimizer.step()
        if rank != 1:
            say(f"{name}: rank {rank} took {step}")
    taken = [sum(said(f"{name}: rank {r} took {step}") for step in range(1, BESIDE + 2)) for r in others]
    optimizer.finish()
    return taken


@pytest.fixture(scope="module")
def stragglers() -> Turns[str]:
    return in_turn({name: Call(beside_a_straggler, (name,)) for name in NEVER}, 3, init=False)


@pytest.mark.parametrize("name", NEVER)
def test_the_others_take_twenty_steps_while_a_straggler_takes_its_second(stragglers: Turns[str], name: str) -> None:
    meanwhile = stragglers[name][1]  # what it costs them to a few percent is in benchmarks/
    assert min(meanwhile) >= BESIDE
