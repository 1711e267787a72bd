"""Workers and the tables of their host process, in any order of events: nothing is lost, counted twice or overwritten.

The clients and the servers are the real ones; processes, memory and sums are a model (`tests.support.at_host`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from offbeat.rounds import waiting
from offbeat.rounds.rules import CatchUp, Rules
from offbeat.topology import groups
from tests.support.at_host import (
    Case,
    InTurn,
    Play,
    all_orders,
    every_gradient_is_applied_once_by_all,
    nothing_is_lost_from_the_sum,
    play,
    programs,
    rounds_are_of_what_lay_in_the_trays,
    rounds_are_told_once,
)

SEEDS = range(10)
GRADIENTS = {
    "first": Rules(waiting.first, "carry"),
    "late": Rules(waiting.first, "carry", late=1),
    "two": Rules(waiting.at_least(2), "carry"),
    "two late": Rules(waiting.at_least(2), "carry", late=1),
    "majority": Rules(waiting.majority, "carry"),
    "full": Rules(waiting.first, "carry", full_every=3),
    "full late": Rules(waiting.first, "carry", full_every=3, late=1),
    "bounded": Rules(waiting.first, "carry", bound=2),
    "bounded late": Rules(waiting.first, "carry", bound=2, late=1),
    "every step": Rules(waiting.first, "carry", catch_up="every_step"),
    "every step late": Rules(waiting.first, "carry", catch_up="every_step", late=1),
    "grace": Rules(waiting.first, "carry", grace=0.01),
    "grace late": Rules(waiting.first, "carry", grace="auto", late=1),
    "dropped": Rules(waiting.first, "drop"),
    "dropped late": Rules(waiting.first, "drop", late=1),
}
LATE_GPU = pytest.mark.parametrize("late_gpu", [False, True], ids=["", "late GPU"])
LONG = pytest.mark.parametrize("is_long", [False, True], ids=["", "long"])


@LATE_GPU
@pytest.mark.parametrize("name", GRADIENTS)
def test_every_gradient_is_in_one_sum_and_all_workers_apply_the_same(name: str, late_gpu: bool) -> None:
    rules = GRADIENTS[name]
    for seed in SEEDS:
        also = "at" if rules.absent == "drop" else "aot"
        case = Case(rules, programs(seed, 3, also=also), is_long=bool(seed % 2), late_gpu=late_gpu)
        one = play(case, seed)
        every_gradient_is_applied_once_by_all(one)
        rounds_are_told_once(one)
        if rules.absent == "carry":
            rounds_are_of_what_lay_in_the_trays(one)


@LATE_GPU
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("full_every", [None, 3])
def test_what_is_added_to_shared_weights_is_never_lost(
    full_every: int | None, late: int, catch_up: CatchUp, size: int, late_gpu: bool
) -> None:
    rules = Rules(waiting.first, "shared", late=late, full_every=full_every, catch_up=catch_up)
    for seed in range(6 if size == 3 else 2):
        whom = groups(size, 2)
        case = Case(rules, programs(seed, size, also="at"), whom, is_long=bool(seed % 2), late_gpu=late_gpu)
        nothing_is_lost_from_the_sum(play(case, seed))


@LATE_GPU
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("draws", [0, 2])
def test_what_is_added_to_weights_that_meet_as_they_come_is_never_lost(
    draws: int, late: int, size: int, late_gpu: bool
) -> None:
    rules = Rules(waiting.first, "shared", late=late, good_for=math.inf, pool=2, draws=draws)
    for seed in range(6 if size == 3 else 2):
        case = Case(rules, programs(seed, size, also="at"), is_long=bool(seed % 2), late_gpu=late_gpu)
        one = play(case, seed)
        nothing_is_lost_from_the_sum(one)
        if not draws:
            assert all(took_part == brought for w in one.workers for took_part, brought in w.parts), "nobody absent"


@LATE_GPU
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("full_every", [None, 3])
def test_an_average_is_of_what_each_member_has_submitted_last(
    full_every: int | None, size: int, late_gpu: bool
) -> None:
    rules = Rules(waiting.first, "last", full_every=full_every)
    for seed in range(10 if size == 3 else 3):
        case = Case(rules, programs(seed, size, also="a"), groups(size, 2), is_long=bool(seed % 2), late_gpu=late_gpu)
        one = play(case, seed)
        rounds_are_of_what_lay_in_the_trays(one)
        rounds_are_told_once(one)


@LATE_GPU
@LONG
@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_added_to_weights_that_meet_in_pairs_is_never_lost(size: int, is_long: bool, late_gpu: bool) -> None:
    for seed in SEEDS:
        case = Case(None, programs(seed, size, (0, 8), also="a"), is_long=is_long, late_gpu=late_gpu)
        nothing_is_lost_from_the_sum(play(case, seed))
