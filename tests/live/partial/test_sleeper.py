"""A worker that is away for many rounds."""

from __future__ import annotations

import pytest

import offbeat as ob
from tests.live.partial.sleeper_jobs import NUMBERS, ROUNDS
from tests.support import forge
from tests.support.forge import Job

pytestmark = pytest.mark.live


@pytest.mark.parametrize("merge", ["paper", "correct"])
def test_of_averaged_weights_a_late_worker_keeps_the_newest_not_one_of_every_round(merge: str) -> None:
    strategy = ob.wagma(group=2, tau=None, merge=merge)  # type: ignore[arg-type]
    (outcomes,) = forge.run([Job("tests.live.partial.sleeper_jobs", "asleep", 2, (strategy,), timeout_s=300)])
    grown, missed = forge.values(outcomes)[1]
    assert missed >= ROUNDS - 2
    assert grown < 8 * 4 * NUMBERS, "a few copies of the model, not 25"
