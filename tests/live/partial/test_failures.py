"""When a rank fails between partial rounds, the others end within seconds and say who it was."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

import offbeat as ob
from tests.support import forge
from tests.support.counted import CASES, failing_early
from tests.support.forge import Job, Outcome, hear, say
from tests.support.nets import loss, net, sgd
from tests.support.scenarios import CARRIERS, Call, in_turn, over

pytestmark = pytest.mark.live

SIZE = 4
# Every method over every carrier. The ends and the ranks take turns: both ends and every rank over each.
FAILS = [
    (name, ("raised", "killed")[(m + w) % 2], (m + w // 2) % SIZE, way)
    for m, name in enumerate(("first", "wagma", "wagma, correct", "self-clocked", "ad_psgd"))
    for w, way in enumerate(CARRIERS)
]


@pytest.fixture(scope="module")
def ended() -> dict[Any, list[Outcome]]:
    jobs = [Job(over, SIZE, (way, failing_early, CASES[name], how, who)) for name, how, who, way in FAILS]
    return dict(zip(FAILS, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize(("name", "how", "who", "way"), FAILS)
def test_the_others_end_within_seconds_and_say_who_failed(ended: Any, name: str, how: str, who: int, way: str) -> None:
    outcomes = ended[name, how, who, way]
    reason = f"rank {who} failed: ValueError: the disk is full" if how == "raised" else f"rank {who} gives no sign of"
    assert outcomes[who].exit_code == (1 if how == "raised" else -signal.SIGKILL)
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert (outcome.exit_code, outcome.hung) == (1, False), outcome.stderr
            assert f"PeerFailed: {reason}" in outcome.stderr or f"; {reason}" in outcome.stderr, outcome.stderr
    assert max(outcome.ended_s for outcome in outcomes) - outcomes[who].ended_s < 60


def test_the_others_end_when_the_rank_with_the_hub_and_the_store_is_killed() -> None:
    (outcomes,) = forge.run([Job(failing_early, SIZE, (CASES["first"], "killed", 0), rank_0_hosts=True)])
    for outcome in outcomes[1:]:
        assert (outcome.exit_code, outcome.hung) == (1, False), outcome.stderr
        assert "PeerFailed" in outcome.error


COMPUTES_ON = ob.self_clocked(group=None, wait="everyone", codec=None)


def failing_beside_one_that_computes_on(rank: int, way: str) -> str:
    """Rank 0 has handed in, and takes steps until that is through. It never will be."""
    model = net()
    try:
        with ob.attach(sgd(model), model, COMPUTES_ON, patience_s=120) as optimizer:
            end_s, step = time.monotonic() + 30, 0
            while time.monotonic() < end_s:
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                optimizer.step()
                step += 1
                if rank == 1:
                    hear(f"{way}: it computes on")
                    raise ValueError("the disk is full")
                if step == 5:
                    say(f"{way}: it computes on")
            pytest.fail(f"{step} steps, and nothing was heard")
    except (ValueError, ob.PeerFailed) as error:
        return str(error)


def test_one_that_computes_on_hears_that_another_has_failed() -> None:
    ran = in_turn({way: Call(over, (way, failing_beside_one_that_computes_on, way)) for way in CARRIERS}, 2)
    for way in CARRIERS:
        assert "rank 1 failed: ValueError: the disk is full" in ran[way][0], way
