"""When a rank fails between partial rounds, the others end within seconds and say who it was."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.support import forge
from tests.support.counted import CASES, failing_early
from tests.support.forge import Job, Outcome

pytestmark = pytest.mark.live

FAILS = [
    ("first", "raised", 1),
    ("first", "raised", 0),
    ("first", "killed", 0),
    ("wagma", "raised", 0),
    ("wagma, correct", "killed", 2),
    ("ad_psgd", "raised", 1),
    ("ad_psgd", "killed", 0),
]


@pytest.fixture(scope="module")
def ended() -> dict[Any, list[Outcome]]:
    plan = {(name, how, who): Job(failing_early, 4, (CASES[name], how, who)) for name, how, who in FAILS}
    return dict(zip(plan, forge.run(list(plan.values()), at_once=2), strict=True))


@pytest.mark.parametrize(("name", "how", "who"), FAILS)
def test_the_others_end_within_seconds_and_say_who_failed(ended: Any, name: str, how: str, who: int) -> None:
    outcomes = ended[name, how, who]
    reason = f"rank {who} failed: ValueError: the disk is full" if how == "raised" else f"rank {who} gives no sign of"
    assert outcomes[who].exit_code == (1 if how == "raised" else -signal.SIGKILL)
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert (outcome.exit_code, outcome.hung) == (1, False), outcome.stderr
            assert f"PeerFailed: {reason}" in outcome.stderr or f"; {reason}" in outcome.stderr, outcome.stderr
    assert max(outcome.ended_s for outcome in outcomes) - outcomes[who].ended_s < 60


def test_the_others_end_when_the_rank_with_the_hub_and_the_store_is_killed() -> None:
    (outcomes,) = forge.run([Job(failing_early, 4, (CASES["first"], "killed", 0), rank_0_hosts=True)])
    for outcome in outcomes[1:]:
        assert (outcome.exit_code, outcome.hung) == (1, False), outcome.stderr
        assert "PeerFailed" in outcome.error
