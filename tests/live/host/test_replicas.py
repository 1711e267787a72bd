"""A worker that sleeps takes over another's replica: what waits for it is bounded, and every result is in it once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from offbeat.live.host.books import FEW
from offbeat.live.host.channel_server import VECTORS
from offbeat.rounds import waiting
from offbeat.rounds.rules import Rules
from offbeat.rounds.spares import MANY, MORE
from tests.support.at_host import Case, every_gradient_is_applied_once_by_all, play

SIZE = 3
RULES = {
    "first": Rules(waiting.first, "carry", spares=True),
    "two": Rules(waiting.at_least(2), "carry", spares=True),
    "dropped": Rules(waiting.first, "drop", spares=True),
    "full": Rules(waiting.first, "carry", full_every=30, spares=True),
    "bounded": Rules(waiting.first, "carry", bound=25, spares=True),
    "every step": Rules(waiting.first, "carry", catch_up="every_step", spares=True),
}
PACES = (60, 40, 1)  # the slowest sleeps through many of the others' turns
# What it was shown, what waits, as many replicas (one to be read, one in each worker's hands), and what is under way.
MOST = 2 * (MANY + MORE + SIZE) + (1 + SIZE) * VECTORS + SIZE * (3 + FEW)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("name", RULES)
def test_whoever_sleeps_ends_with_the_same_results_in_the_same_order_as_all(name: str, late: int) -> None:
    taken_over = 0
    for seed in range(4):
        draw = random.Random(seed)
        told = ("s" * draw.randint(25, 45), "s" * draw.randint(25, 45), "s" * draw.randint(1, 4))
        gpu = (False, True, "stages")[seed % 3]
        case = Case(replace(RULES[name], late=late), told, is_long=seed < 2, late_gpu=gpu, paces=PACES)
        one = play(case, seed)
        every_gradient_is_applied_once_by_all(one)
        taken_over += sum(worker.taken_over for worker in one.workers)
    assert taken_over > 0


@pytest.mark.parametrize("late", [0, 1])
def test_what_waits_for_one_that_sleeps_is_bounded(late: int) -> None:
    told = ("s" * 100, "s" * 100, "sss")

    def taken(seed: int, spares: bool) -> int:
        rules = replace(RULES["first"], late=late, spares=spares)
        return play(Case(rules, told, paces=PACES), seed).arena.taken

    assert max(taken(seed, spares=True) for seed in range(3)) <= MOST
    assert max(taken(seed, spares=False) for seed in range(3)) > MOST
