"""AD-PSGD between processes: whoever meets whom, every step is in the mean once."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

import offbeat as ob
from tests.support.counted import AT_MOST, Seen, counted, now_and_then
from tests.support.scenarios import CARRIERS, Call, Turns, in_turn, over

pytestmark = pytest.mark.live

GRAPHS = ["exponential", "ring", "complete"]
SIZES = (2, 3, 6)
STEPS = (9, 0, 14, 7, 12, 3)


def meeting(rank: int, size: int, graph: str) -> Seen:
    """Uneven steps with random lateness."""
    late = partial(now_and_then, random.Random(f"{graph} {rank}"))
    return counted(rank, size, ob.ad_psgd(graph), STEPS[:size], late)


Ran = dict[int, Turns[str]]


@pytest.fixture(scope="module", params=CARRIERS)
def ran(request: pytest.FixtureRequest) -> Ran:
    return {
        n: in_turn({graph: Call(over, (request.param, meeting, n, graph)) for graph in GRAPHS}, n, init=False)
        for n in SIZES
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_step_is_in_the_mean_once_and_replicas_end_equal(ran: Ran, size: int, graph: str) -> None:
    outs: list[Seen] = ran[size][graph]
    assert all(torch.equal(out.final, outs[0].final) for out in outs)
    slots = (outs[0].final * size).reshape(size, AT_MOST)
    for rank, steps in enumerate(STEPS[:size]):
        assert torch.allclose(slots[rank, :steps], torch.ones(steps, dtype=torch.float64), rtol=0, atol=1e-9)
        assert not slots[rank, steps:].any()


@pytest.mark.parametrize("size", SIZES)
def test_every_meeting_is_noted_with_its_staleness_and_its_wait(ran: Ran, size: int) -> None:
    for graph in GRAPHS:
        for rank, out in enumerate(ran[size][graph]):
            assert len(out.rounds) == STEPS[rank]
            assert all(r.started_by == rank and r.staleness[rank] >= 0 and r.waited_s[rank] >= 0 for r in out.rounds)


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_left_behind(ran: Ran, size: int) -> None:
    assert all((out.threads, out.sockets) == ([], 0) for graph in GRAPHS for out in ran[size][graph])
