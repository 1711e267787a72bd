"""Many rounds of every size between six processes, and one that the others do not wait for.

``OFFBEAT_STRESS=full`` runs the long version: 2,000 rounds and more, with messages of up to 10⁷ numbers.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.live.partial.partial_jobs import NEVER, Flow
from tests.support import forge
from tests.support.forge import Job

pytestmark = pytest.mark.live

SIZE = 6
FULL = os.environ.get("OFFBEAT_STRESS") == "full"
FLOWS = (
    ((1, 700), (1_000, 700), (100_000, 500), (1_000_000, 150), (10_000_000, 30))
    if FULL
    else ((1, 25), (1_000, 25), (100_000, 20), (1_000_000, 8))
)  # (numbers in a message, steps of each worker)
BESIDE = 20  # steps of the others while one takes its second
PLAN: dict[str, Job] = {
    "flows": Job("tests.live.partial.partial_jobs", "stress", SIZE, (FLOWS,), timeout_s=600),
    "straggler": Job("tests.live.partial.partial_jobs", "beside_a_straggler", 3, (3, [*NEVER], BESIDE), timeout_s=600),
}


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    return {name: forge.values(out) for name, out in zip(PLAN, forge.run(list(PLAN.values())), strict=True)}


@pytest.mark.parametrize("number", range(len(FLOWS)), ids=[str(numbers) for numbers, _ in FLOWS])
def test_no_message_is_torn_and_all_see_the_same_results(told: Any, number: int) -> None:
    flows: list[Flow] = [out[number] for out in told["flows"]]
    assert all(flow.torn == 0 for flow in flows)
    assert all(flow.results == flows[0].results for flow in flows)
    assert list(flows[0].results) == list(range(len(flows[0].results)))
    assert len(flows[0].results) >= FLOWS[number][1]


@pytest.mark.parametrize("number", range(len(FLOWS)), ids=[str(numbers) for numbers, _ in FLOWS])
def test_the_results_add_up_to_what_was_deposited(told: Any, number: int) -> None:
    flows: list[Flow] = [out[number] for out in told["flows"]]
    given, got = sum(flow.deposited for flow in flows), SIZE * sum(flows[0].results.values())
    assert abs(got - given) < 1e-5 * given


def test_memory_is_flat(told: Any) -> None:
    for out in told["flows"]:
        for flow in out:
            # Of the trays and results that are there at a moment there may be a few more or a few less.
            few = 40 * 4 * flow.numbers
            assert flow.end_bytes < 1.05 * flow.warm_bytes + few


@pytest.mark.parametrize("name", NEVER)
def test_the_others_take_twenty_steps_while_a_straggler_takes_its_second(told: Any, name: str) -> None:
    meanwhile = told["straggler"][1][name]  # what it costs them to a few percent is in benchmarks/
    assert min(meanwhile) >= BESIDE
