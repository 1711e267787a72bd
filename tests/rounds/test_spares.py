"""A worker that sleeps takes over another's replica: what waits for it is bounded, and every result is in it once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offbeat.live.partial.stacks import VECTORS
from offbeat.rounds import waiting
from offbeat.rounds.rules import Rules
from offbeat.rounds.spares import MANY, MORE
from tests.support.at_a_desk import SIZE, play

RULES = {
    "first": Rules(waiting.first, "carry", spares=True),
    "late": Rules(waiting.first, "carry", late=1, spares=True),
    "two": Rules(waiting.at_least(2), "carry", spares=True),
    "dropped": Rules(waiting.first, "drop", spares=True),
    "full": Rules(waiting.first, "carry", full_every=30, spares=True),
    "bounded": Rules(waiting.first, "carry", bound=25, spares=True),
    "every step": Rules(waiting.first, "carry", catch_up="every_step", spares=True),
}
SEEDS, STEPS, PACES = 40, (5, 120), (1, 40, 400)  # the slowest sleeps through hundreds of the others' turns


@pytest.mark.parametrize("looks_ahead", [False, True], ids=["", "looks ahead"])
@pytest.mark.parametrize("name", RULES)
def test_whoever_sleeps_ends_with_the_same_results_in_the_same_order_as_all(name: str, looks_ahead: bool) -> None:
    rules, taken_over = replace(RULES[name], late=1 if looks_ahead else RULES[name].late), 0
    for seed in range(SEEDS):
        workers, most_slots, *_ = play(rules, seed, False, looks_ahead, steps=STEPS, paces=PACES)
        assert all(w.history == workers[0].history for w in workers), seed
        if rules.absent == "carry":
            assert workers[0].applied * SIZE == pytest.approx(sum(w.given for w in workers)), seed
        taken_over += sum(w.taken_over for w in workers)
        # What it was shown, what waits, and as many replicas: one to be read, one in each worker's hands.
        assert most_slots <= 2 * (MANY + MORE + SIZE) + (1 + SIZE) * VECTORS, seed
    assert taken_over > 0
