"""What a hub keeps as places in memory: every deposit is in one sum, and no slot is given away while it is needed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from offbeat.rounds import waiting
from offbeat.rounds.rules import Absent, CatchUp, Rules
from tests.support.at_a_desk import SIZE, play, run

POOLED = pytest.mark.parametrize("pooled", [False, True], ids=["", "pooled"])  # each has slots of its own, or asks
RULES = {
    "first": Rules(waiting.first, "carry"),
    "late": Rules(waiting.first, "carry", late=1),
    "two": Rules(waiting.at_least(2), "carry"),
    "full": Rules(waiting.first, "carry", full_every=3),
    "bounded": Rules(waiting.first, "carry", bound=2),
    "every step": Rules(waiting.first, "carry", catch_up="every_step"),
}


@POOLED
@pytest.mark.parametrize("name", RULES)
def test_every_gradient_is_in_one_sum_and_all_workers_apply_the_same(name: str, pooled: bool) -> None:
    for seed in range(150):
        workers = run(RULES[name], seed, weights=False, pooled=pooled)
        given = sum(w.given for w in workers)
        assert all(w.applied * SIZE == pytest.approx(given) for w in workers), seed


@POOLED
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("late", [0, 1])
def test_what_is_added_to_shared_weights_is_never_lost(late: int, size: int, pooled: bool) -> None:
    rules = Rules(waiting.first, "shared", late=late, full_every=None)
    for seed in range(150):
        workers = run(rules, seed, weights=True, size=size, pooled=pooled)
        held = sum(w.x for w in workers if w.x is not None)
        assert held == pytest.approx(sum(w.given for w in workers)), seed


@POOLED
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("full_every", [None, 3])
def test_an_average_is_of_what_each_member_has_handed_in_last(full_every: int | None, size: int, pooled: bool) -> None:
    for seed in range(150):
        played = play(Rules(waiting.first, "last", full_every=full_every), seed, True, size=size, pooled=pooled)
        for worker in played.workers:
            assert worker.got, "some results were taken"
            for version, number in worker.got:
                assert number == pytest.approx(played.means[version, worker.rank]), seed


@POOLED
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize(("late", "looks_ahead"), [(0, False), (1, False), (1, True)])
def test_what_is_added_to_weights_that_meet_as_they_come_is_never_lost(
    late: int, looks_ahead: bool, size: int, pooled: bool
) -> None:
    rules = Rules(waiting.first, "shared", late=late, good_for=math.inf, pool=2)
    for seed in range(100):
        workers = run(rules, seed, weights=True, looks_ahead=looks_ahead, size=size, pooled=pooled)
        assert all(took_part == brought for w in workers for took_part, brought in w.parts), "nobody who is absent"
        held = sum(w.x for w in workers if w.x is not None)
        assert held == pytest.approx(sum(w.given for w in workers)), seed


@POOLED
@pytest.mark.parametrize("name", RULES)
def test_a_worker_that_looks_ahead_applies_every_gradient_once_however_much_it_takes_at_a_time(
    name: str, pooled: bool
) -> None:
    for seed in range(150):
        workers = run(replace(RULES[name], late=1), seed, weights=False, looks_ahead=True, pooled=pooled)
        given = sum(w.given for w in workers)
        assert all(w.applied * SIZE == pytest.approx(given) for w in workers), seed


@POOLED
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize("full_every", [None, 3])
def test_a_worker_that_looks_ahead_adds_its_steps_to_weights_that_have_all_the_others(
    full_every: int | None, catch_up: CatchUp, size: int, pooled: bool
) -> None:
    rules = Rules(waiting.first, "shared", late=1, full_every=full_every, catch_up=catch_up)
    for seed in range(100):
        workers = run(rules, seed, weights=True, looks_ahead=True, size=size, pooled=pooled)
        held = sum(w.x for w in workers if w.x is not None)
        assert held == pytest.approx(sum(w.given for w in workers)), seed


@pytest.mark.parametrize("absent", ["carry", "last", "shared"])
def test_slots_that_are_asked_for_and_given_back_are_fewer_than_slots_of_ones_own(absent: Absent) -> None:
    rules, seeds = Rules(waiting.first, absent), range(15)

    def written_to(pooled: bool) -> int:
        each = (play(rules, s, absent != "carry", size=4, steps=(40, 40), paces=(1,), pooled=pooled) for s in seeds)
        return sum(played.written_to for played in each)

    assert written_to(pooled=True) < 0.9 * written_to(pooled=False)
