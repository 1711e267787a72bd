"""Groups of those who have come: everybody hears of everybody, nobody is kept for the sake of one who is not about."""

from __future__ import annotations

import math
import random

import pytest

from offbeat.rounds import waiting
from offbeat.rounds.pool import Pool
from offbeat.rounds.referee import Notice, Referee, Say
from offbeat.rounds.rules import Rules


def waves(size: int, group: int, order: list[list[int]], at_once: bool = False, seed: int = 0) -> list[set[int]]:
    """Workers that come in these orders, one wave after the other; who has heard of whom afterwards."""
    pool, everyone, version = Pool(size, group, seed), set(range(size)), 0
    known = [{rank} for rank in range(size)]
    for wave in order:
        for come in [wave] if at_once else [[rank] for rank in wave]:
            for rank in come:
                pool.come(rank)
            while (members := pool.gather(version, everyone)) is not None:
                together = set().union(*(known[r] for r in members))
                for r in members:
                    known[r] = set(together)
                version += 1
    return known


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 128])
def test_where_all_come_in_the_same_order_every_time_everybody_hears_of_everybody(size: int, group: int) -> None:
    known = waves(size, min(group, size), [list(range(size))] * (size // 2 + 8))
    assert known == [set(range(size))] * size


@pytest.mark.parametrize("size", [2, 3, 8, 33, 128])
def test_where_all_come_at_once_as_soon_as_with_pairs_that_are_drawn(size: int) -> None:
    for seed in range(10):
        known = waves(size, 2, [list(range(size))] * (2 * size.bit_length() + 2), at_once=True, seed=seed)
        assert known == [set(range(size))] * size


@pytest.mark.parametrize("size", [8, 33])
def test_where_they_come_in_any_order_too(size: int) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        order = [draw.sample(range(size), size) for _ in range(16)]
        assert waves(size, 2, order) == [set(range(size))] * size


def meet(pool: Pool, version: int, *ranks: int, training: int = 4) -> tuple[int, ...] | None:
    for rank in ranks:
        pool.come(rank)
    return pool.gather(version, set(range(training)))


def test_it_meets_whom_it_has_met_longest_ago() -> None:
    pool = Pool(4, 2, 0)
    assert meet(pool, 0, 0, 1) == (0, 1)
    assert meet(pool, 1, 0, 2) == (0, 2)
    assert meet(pool, 2, 0, 2, 1) == (1, 2), "who have never met"
    pool.leave(0)
    assert meet(pool, 3, 0, 1, 2) == (0, 1), "before 0 and 2, who met later"


def test_two_who_have_just_met_wait_for_another_that_is_about() -> None:
    pool = Pool(4, 2, 0)
    assert meet(pool, 0, 0, 1) == (0, 1)
    assert meet(pool, 1, 2, 3) == (2, 3)
    assert meet(pool, 2, 0, 1) is None
    assert meet(pool, 2, 2) == (0, 2)
    assert meet(pool, 3, 3) == (1, 3)


def test_two_quick_ones_do_not_wait_for_one_that_has_not_met_anybody_since() -> None:
    pool = Pool(3, 2, 0)
    assert meet(pool, 0, 0, 1, training=3) == (0, 1)
    assert meet(pool, 1, 2, 0, training=3) == (0, 2)
    for version in range(2, 9):
        assert meet(pool, version, 0, 1, training=3) == (0, 1), "2 computes on"


def test_who_has_left_is_in_no_group_and_the_last_is_one_by_itself() -> None:
    pool = Pool(3, 2, 0)
    pool.come(0)
    pool.leave(0)
    assert meet(pool, 0, 1, training=3) is None
    assert pool.gather(0, {1}) == (1,)
    assert pool.gather(1, {1}) is None


def test_a_quorum_must_be_there_anew_and_lets_all_meet_who_are_there() -> None:
    rules = Rules(waiting.at_least(4), "shared", late=1, good_for=math.inf, pool=2)
    referee = Referee(rules, 8, 0)
    for rank in range(3):
        assert referee.hear(rank, Notice(Say.ARRIVED, 0)) == []
    assert referee.hear(3, Notice(Say.ARRIVED, 0)) == [0, 1]
    met = [referee.members(version) or () for version in (0, 1)]
    assert sorted(rank for members in met for rank in members) == [0, 1, 2, 3]
    for rank in (4, 5, 6):
        assert referee.hear(rank, Notice(Say.ARRIVED, 0)) == [], "those who have met are not there any more"
    assert referee.hear(7, Notice(Say.ARRIVED, 0)) == [2, 3]
    assert [referee.started_with(rank) for rank in range(8)] == [1] * 8


def drawing(size: int, draws: int = 2) -> Pool:
    return Pool(size, 2, 0, draws)


def test_who_finds_nobody_there_draws_one_who_computes_and_when_that_is_over_another() -> None:
    pool, everyone = drawing(8), set(range(8))
    pool.come(3)
    first = pool.gather(0, everyone, quorum=False)
    assert first is not None
    assert len(first) == 2
    assert 3 in first
    assert pool.gather(1, everyone) is None, "nobody is in two rounds at once"
    for rank in first:
        pool.over(rank)
    second = pool.gather(1, everyone)
    assert second is not None
    assert set(first) & set(second) == {3}
    for rank in second:
        pool.over(rank)
    assert pool.gather(2, everyone) is None, "two, and no third"


def test_two_who_are_there_meet_each_other() -> None:
    pool = drawing(8)
    assert meet(pool, 0, 5, 6, training=8) == (5, 6)


def test_nobody_draws_while_more_than_an_eighth_are_in_a_round() -> None:
    pool, everyone = drawing(16, 1), set(range(16))
    pool.come(0)
    first = pool.gather(0, everyone)
    assert first is not None
    pool.come(2 if 2 not in first else 4)
    second = pool.gather(1, everyone)
    assert second is not None, "two of sixteen are"
    pool.come(6 if 6 not in second else 7)
    assert pool.gather(2, everyone) is None, "four of sixteen are"
    for rank in first:
        pool.over(rank)
    assert pool.gather(2, everyone) is not None, "two of sixteen are again"


def test_it_draws_whom_it_has_not_met_lately_and_of_these_who_was_in_no_round_for_longest() -> None:
    pool, everyone, met = drawing(6, 1), set(range(6)), []
    for version in range(5):
        pool.come(0)
        members = pool.gather(version, everyone)
        assert members is not None
        met += [rank for rank in members if rank]
        for rank in members:
            pool.over(rank)
    assert sorted(met) == [1, 2, 3, 4, 5]


def test_a_worker_that_is_stopped_in_a_round_holds_up_its_partner_and_nobody_else() -> None:
    for seed in range(20):
        draw, pool, everyone, version = random.Random(seed), Pool(16, 2, seed, 2), set(range(16)), 0
        pool.come(0)
        stuck = pool.gather(version, everyone)  # whoever it is with, it stays in this round
        assert stuck is not None
        for _ in range(200):
            pool.come(draw.choice(sorted(everyone)))
            while (members := pool.gather(version := version + 1, everyone)) is not None:
                assert not set(members) & set(stuck)
                for rank in members:
                    pool.over(rank)
        assert version > 400, "the others go on drawing"


def test_after_all_have_stood_nobody_draws_before_a_step_is_over() -> None:
    rules = Rules(waiting.first, "shared", late=1, good_for=math.inf, pool=2, draws=2)
    referee = Referee(rules, 8, 0)
    assert referee.hear(0, Notice(Say.ARRIVED, 0)) == [0]
    members = referee.members(0)
    assert members is not None
    (other,) = set(members) - {0}
    assert referee.hear(other, Notice(Say.ARRIVED, 1)) == [], "it is in a round, and would draw after it"
    for rank in range(8):
        assert referee.hear(rank, Notice(Say.STANDS)) == []
    for rank in range(8):
        assert referee.hear(rank, Notice(Say.BACK)) == []
    for rank in members:
        assert referee.hear(rank, Notice(Say.OVER)) == [], "each has been told how many rounds it has a part in"
    assert referee.hear(0, Notice(Say.ARRIVED, 1)) == [1]
    assert referee.members(1) == members, "who are both there now"
