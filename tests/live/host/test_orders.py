"""Workers and the tables of their host process, in any order of events: nothing is lost, counted twice or overwritten.

The clients and the servers are the real ones; processes, memory and sums are a model (`tests.support.at_host`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from offbeat.live.host.books import FEW, Books
from offbeat.live.host.ledger import Expression
from offbeat.rounds import waiting
from offbeat.rounds.rules import CatchUp, Rules
from offbeat.topology import groups
from tests.support.at_host import (
    LOST,
    Case,
    Drawn,
    Option,
    Play,
    all_orders,
    every_gradient_is_applied_once_by_all,
    nothing_is_lost_from_the_sum,
    play,
    programs,
    rounds_are_of_what_lay_in_the_trays,
    rounds_are_told_once,
    what_the_dead_had_submitted_counts_once,
)
from tests.support.long import every_or_in_turns, unless_long

SEEDS = range(6)
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
AS_THEY_COME = {
    "as they come": Rules(waiting.first, "shared", good_for=math.inf, pool=2),
    "as they come, late": Rules(waiting.first, "shared", late=1, good_for=math.inf, pool=2),
    "drawn": Rules(waiting.first, "shared", good_for=math.inf, pool=2, draws=2),
    "drawn, late": Rules(waiting.first, "shared", late=1, good_for=math.inf, pool=2, draws=2),
}
KINDS: dict[str, Rules | None] = {
    "gradients": GRADIENTS["first"],
    "late gradients": GRADIENTS["late"],
    "last weights": Rules(waiting.first, "last"),
    "shared weights": Rules(waiting.first, "shared"),
    "late shared weights": Rules(waiting.first, "shared", late=1),
    **AS_THEY_COME,
    "by half": Rules(waiting.at_least(2), "shared", late=1, good_for=math.inf),
    "pairs": None,
}
GPUS: tuple[bool | str, ...] = (False, True, "stages")
LATE_GPU = pytest.mark.parametrize("late_gpu", GPUS, ids=["", "late GPU", "through stages"])


def whom(rules: Rules | None, size: int) -> Any:
    return groups(size, 2) if rules is not None and rules.of_weights else None


def check(one: Play) -> None:
    """What must be so of this kind."""
    rules = one.case.rules
    if rules is None or rules.absent == "shared":
        nothing_is_lost_from_the_sum(one)
    else:
        rounds_are_told_once(one)
    if rules is not None and rules.absent in ("carry", "drop"):
        every_gradient_is_applied_once_by_all(one)
    if rules is not None and rules.absent in ("carry", "last"):
        rounds_are_of_what_lay_in_the_trays(one)


@LATE_GPU
@pytest.mark.parametrize("name", GRADIENTS)
def test_every_gradient_is_in_one_sum_and_all_workers_apply_the_same(name: str, late_gpu: bool | str) -> None:
    rules = GRADIENTS[name]
    also = "at" if rules.absent == "drop" else "aot"
    for seed in SEEDS:
        check(play(Case(rules, programs(seed, 3, also=also), is_long=bool(seed % 2), late_gpu=late_gpu), seed))


@pytest.mark.parametrize("homes", [(0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", [*GRADIENTS, *KINDS])
def test_workers_of_several_hosts_lose_nothing_either_however_long_news_takes(
    name: str, homes: tuple[int, ...]
) -> None:
    rules = GRADIENTS[name] if name in GRADIENTS else KINDS[name]
    for seed in SEEDS[:3]:  # each with another trip
        told = programs(seed, 3, also="a" if rules is None else "at")
        check(play(Case(rules, told, whom(rules, 3), is_long=bool(seed % 2), homes=homes), seed))


KINDS_OF_SEVERAL = [(name, sharded) for name in (*GRADIENTS, *KINDS) for sharded in (False, True)]
HOMES = ((0, 1, 0, 1, 1, 1), (0, 1, 1, 0, 0, 2), (0, 1, 2, 1, 2, 0))  # of three workers' ranks


@pytest.mark.parametrize(
    ("name", "sharded", "homes"),
    [(*kind, homes) for kind, homes in every_or_in_turns(KINDS_OF_SEVERAL, HOMES) if kind != ("pairs", False)],
)
def test_workers_whose_ranks_are_on_several_hosts_lose_nothing_and_their_ranks_hear_the_same(
    name: str, sharded: bool, homes: tuple[int, ...]
) -> None:
    """At the end each rank asks what coding has lost, whether or not the others of its worker have left."""
    rules = GRADIENTS[name] if name in GRADIENTS else KINDS[name]
    case = Case(rules, (), whom(rules, 3), homes=homes, of=2, sharded=sharded, loses=True)
    for seed, gpu in enumerate(GPUS):
        told = programs(seed, 3, also="a" if rules is None else "at")
        one = play(replace(case, programs=told, is_long=seed == 0, late_gpu=gpu), seed)
        check(one)
        for worker in one.workers if rules is not None else ():
            lost: Any = worker.channel.lost
            assert lost.get() == LOST + worker.rank - (0 if sharded else worker.rank % 2)


class TimeStandsStill(Drawn):
    """While anything else can happen."""

    def choose(self, options: list[Option]) -> int:
        others = [k for k, one in enumerate(options) if one.do.__name__ != "wake"]
        return self.draw.choice(others or range(len(options)))


@pytest.mark.parametrize("trip_s", [0.0, 0.001])
def test_what_the_first_host_hears_while_news_of_a_round_travels_is_in_the_round(trip_s: float) -> None:
    for seed in SEEDS:
        one = Play(Case(Rules(waiting.first, "carry"), ("s", "s", "s"), homes=(0, 0, 1)), TimeStandsStill(seed), seed)
        one.trip_s = trip_s
        one.run()
        check(one)
        assert all(worker.log[0] == ("offer", 0) for worker in one.workers[:2]) == (trip_s > 0.0)


@LATE_GPU
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("full_every", [None, 3])
def test_what_is_added_to_shared_weights_is_never_lost(
    full_every: int | None, late: int, catch_up: CatchUp, size: int, late_gpu: bool | str
) -> None:
    rules = Rules(waiting.first, "shared", late=late, full_every=full_every, catch_up=catch_up)
    for seed in range(4 if size == 3 else 2):
        told = programs(seed, size, also="at")
        check(play(Case(rules, told, whom(rules, size), is_long=bool(seed % 2), late_gpu=late_gpu), seed))


@LATE_GPU
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("name", AS_THEY_COME)
def test_what_is_added_to_weights_that_meet_as_they_come_is_never_lost(
    name: str, size: int, late_gpu: bool | str
) -> None:
    rules = AS_THEY_COME[name]
    for seed in range(4 if size == 3 else 2):
        told = programs(seed, size, also="at")
        one = play(Case(rules, told, is_long=bool(seed % 2), late_gpu=late_gpu), seed)
        check(one)
        if not rules.draws:
            assert all(took_part == brought for w in one.workers for took_part, brought in w.parts), "nobody is absent"


@LATE_GPU
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("full_every", [None, 3])
def test_an_average_is_of_what_each_member_has_submitted_last(
    full_every: int | None, size: int, late_gpu: bool | str
) -> None:
    rules = Rules(waiting.first, "last", full_every=full_every)
    for seed in range(6 if size == 3 else 2):
        told = programs(seed, size, also="a")
        check(play(Case(rules, told, whom(rules, size), is_long=bool(seed % 2), late_gpu=late_gpu), seed))


@LATE_GPU
@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_added_to_weights_that_meet_in_pairs_is_never_lost(size: int, late_gpu: bool | str) -> None:
    for seed in range(10):
        told = programs(seed, size, (0, 8), also="a")
        check(play(Case(None, told, is_long=bool(seed % 2), late_gpu=late_gpu), seed))


@pytest.mark.parametrize("program", [("ss", "s"), ("s", "sa")], ids=" ".join)
@pytest.mark.parametrize("kind", ["gradients", "late gradients", "last weights", "late shared weights", "pairs"])
def test_in_every_order_that_is_one_departure_from_taking_turns_nothing_is_lost(
    kind: str, program: tuple[str, ...]
) -> None:
    case = Case(KINDS[kind], program, whom(KINDS[kind], 2), is_long=True)
    assert all_orders(case, check, departures=1) > 20


@pytest.mark.parametrize("kind", ["gradients", "late gradients"])
def test_in_every_order_that_is_two_departures_from_taking_turns_nothing_is_lost(kind: str) -> None:
    assert all_orders(Case(KINDS[kind], ("s", "s")), check, departures=2) > 100


def test_a_schedule_that_never_begins_again_is_told_as_the_rounds_go_on() -> None:
    size = 4
    turning = groups(size, 2)
    for rules in (Rules(waiting.first, "last"), Rules(waiting.first, "shared")):
        one = play(Case(rules, ("s" * 30,) * size, lambda t: turning(t * t)), 0)
        check(one)
        assert max(version for w in one.workers for version, _ in w.got) > 64, "more than was told at the beginning"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "gradients" not in kind])
def test_slots_are_few_however_long_a_run_is(kind: str) -> None:
    """Of gradients, each result waits for whoever sleeps; see what is said of replicas."""
    size = 4
    for seed in range(3):
        case = Case(KINDS[kind], ("s" * 40,) * size, whom(KINDS[kind], size), is_long=seed == 1, late_gpu=seed == 2)
        assert play(case, seed).arena.taken <= 8 * size


def test_gradients_that_wait_long_for_a_round_are_added_up_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    shortened, shorten = list[int](), Books.shorten

    def noted(self: Books, vector: Expression) -> None:
        before = len(vector.refs)
        shorten(self, vector)
        shortened.append(before - len(vector.refs))

    monkeypatch.setattr(Books, "shorten", noted)
    rules = Rules(waiting.first, "carry", catch_up="every_step")
    for seed in range(3):
        check(play(Case(rules, ("s" * 12,) * 3, paces=(60, 60, 1)), seed))
    assert max(shortened) >= FEW


def test_weights_to_which_steps_are_added_and_that_meet_nobody_stand_on_few_slots() -> None:
    one = play(Case(None, ("s" * 30,) * 3, meets=0.0), 0)
    check(one)
    assert one.arena.taken <= 3 * (FEW + 4)


@LATE_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_dies_at_any_moment_leaves_nothing_behind_and_nothing_is_overwritten(
    kind: str, late_gpu: bool | str
) -> None:
    died = 0
    for seed in range(5):
        told = programs(seed, 3, (4, 10))
        one = play(Case(KINDS[kind], told, whom(KINDS[kind], 3), late_gpu=late_gpu, dies=seed % 3), seed)
        died += any(worker.is_dead for worker in one.workers)
    assert died


@LATE_GPU
@pytest.mark.parametrize("name", [*GRADIENTS, *KINDS])
def test_without_one_that_dies_at_any_moment_the_others_go_on_and_what_it_had_submitted_counts_once(
    name: str, late_gpu: bool | str
) -> None:
    rules = GRADIENTS[name] if name in GRADIENTS else KINDS[name]
    died = 0
    for seed in range(8):
        told = programs(seed, 3, (3, 9), also="a" if seed % 2 else "")
        case = Case(rules, told, whom(rules, 3), late_gpu=late_gpu, dies=seed % 3, goes_on=True, is_long=seed % 4 > 1)
        one = play(case, seed)
        died += any(worker.is_dead for worker in one.workers)
        assert all(worker.turn.is_done for worker in one.workers if not worker.is_dead)
        if rules is not None and rules.absent in ("carry", "last"):
            what_the_dead_had_submitted_counts_once(one)
    assert died


@pytest.mark.parametrize("homes", [(0, 0, 1), (0, 1, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", [*GRADIENTS, *KINDS])
def test_of_workers_on_several_hosts_the_same_holds_though_all_of_a_host_are_dead(
    name: str, homes: tuple[int, ...]
) -> None:
    rules = GRADIENTS[name] if name in GRADIENTS else KINDS[name]
    died = 0
    for seed in range(8):
        told = programs(seed, 3, (3, 9), also="a" if seed % 2 else "")
        one = play(Case(rules, told, whom(rules, 3), homes=homes, dies=seed % 3, goes_on=True), seed)
        died += any(worker.is_dead for worker in one.workers)
        assert all(worker.turn.is_done for worker in one.workers if not worker.is_dead)
        if rules is not None and rules.absent in ("carry", "last"):
            what_the_dead_had_submitted_counts_once(one)
    assert died


@pytest.mark.parametrize(
    ("name", "homes"),
    every_or_in_turns([*GRADIENTS, *KINDS], [(0, 0, 1), (0, 1, 0), (0, 1, 2), (0, 1, 2, 1), (0, 1, 2, 3)]),
)
def test_without_a_host_the_others_go_on_and_what_it_had_given_counts_as_a_whole_or_not_at_all(
    name: str, homes: tuple[int, ...]
) -> None:
    rules, size, settled = GRADIENTS[name] if name in GRADIENTS else KINDS[name], len(homes), 0
    for seed in range(4):
        told = programs(seed, size, (3, 9), also="a" if seed % 2 else "")
        one = play(Case(rules, told, whom(rules, size), homes=homes, lost_host=1, is_long=seed > 1), seed)
        settled += one.has_settled
        assert all(worker.turn.is_done for worker in one.workers)
        if rules is not None and rules.absent in ("carry", "last"):
            what_the_dead_had_submitted_counts_once(one)
    assert settled


@pytest.mark.parametrize("kind", ["gradients", "last weights"])
def test_so_it_is_at_whatever_moment_a_host_is_lost_in_every_order_that_is_a_departure_from_taking_turns(
    kind: str,
) -> None:
    orders = settled = 0

    def check(one: Play) -> None:
        nonlocal settled
        settled += one.has_settled
        what_the_dead_had_submitted_counts_once(one)

    for moment in range(0, 60, unless_long(15, 1)):
        case = Case(KINDS[kind], ("s", "s", "s"), whom(KINDS[kind], 3), homes=(0, 1, 2), lost_host=2, lost_at=moment)
        orders += all_orders(case, check, departures=1)
    assert settled == orders > 100


@LATE_GPU
@pytest.mark.parametrize("name", [*GRADIENTS, *KINDS])
def test_one_that_died_comes_back_as_the_twin_of_another_once_or_twice_and_all_of_that_still_holds(
    name: str, late_gpu: bool | str
) -> None:
    rules = GRADIENTS[name] if name in GRADIENTS else KINDS[name]
    came_back = 0
    for seed in range(8):
        told = programs(seed, 3, (5, 12), also="a" if seed % 2 else "")
        case = Case(
            rules,
            told,
            whom(rules, 3),
            late_gpu=late_gpu,
            dies=seed % 3,
            goes_on=True,
            again=1 + seed % 2,
            is_long=seed % 4 > 1,
        )
        one = play(case, seed)
        came_back += len(one.past)
        assert all(worker.turn.is_done for worker in one.workers if not worker.is_dead)
        if rules is not None and rules.absent in ("carry", "last"):
            what_the_dead_had_submitted_counts_once(one)
    assert came_back
