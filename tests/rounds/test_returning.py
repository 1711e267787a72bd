"""Who has died and comes back: whom the referee waits for, what a twin's seat has, and when the bell rings."""

from __future__ import annotations

import itertools

import pytest
import torch

from offbeat import topology
from offbeat.rounds import waiting
from offbeat.rounds.bell import Rope
from offbeat.rounds.referee import Notice, Referee, Say
from offbeat.rounds.rules import Rules
from offbeat.rounds.seat import Seat
from offbeat.tensors.vector import Vec
from offbeat.topology.hierarchy import Nodes

SIZE = 3


def vec(number: float) -> Vec:
    return Vec([torch.tensor([number])])


class Game:
    """A referee of some workers, whose notices are told as seats tell them."""

    def __init__(self, rules: Rules, size: int = SIZE) -> None:
        self.referee = Referee(rules, size, 0)

    def arrives(self, *ranks: int) -> list[int]:
        """Each has handed in for the round that is next, at weights that contain all before."""
        begun = list[int]()
        for rank in ranks:
            started = self.referee.started
            begun += self.referee.hear(rank, Notice(Say.ARRIVED, started, started))
        return begun

    def dies(self, rank: int) -> list[int]:
        return self.referee.hear(rank, Notice(Say.DIED))

    def returning(self, rank: int, twin_of: int) -> None:
        self.referee.returning(rank, twin_of)

    def is_back(self, rank: int) -> list[int]:
        return self.referee.hear(rank, Notice(Say.RETURNED, 0, self.referee.started))


ALL = Rules(waiting.everyone, "carry")
FULL = Rules(waiting.first, "carry", full_every=1)


@pytest.mark.parametrize("rules", [ALL, FULL], ids=["all wait", "a full round"])
def test_nobody_waits_for_a_worker_on_its_way_back_and_all_do_when_it_is_there(rules: Rules) -> None:
    game = Game(rules)
    assert game.arrives(0, 1, 2) == [0]
    assert game.arrives(0, 1) == []
    assert game.dies(2) == [1]
    game.returning(2, twin_of=0)
    assert game.arrives(0, 1) == [2]
    assert game.is_back(2) == []
    assert game.arrives(0, 1) == []
    assert game.arrives(2) == [3]


@pytest.mark.parametrize("dead", range(SIZE))
@pytest.mark.parametrize("twin_of", range(SIZE))
def test_a_worker_that_dies_again_on_its_way_back_is_waited_for_by_nobody(dead: int, twin_of: int) -> None:
    if dead == twin_of:
        return
    game, others = Game(ALL), [rank for rank in range(SIZE) if rank != dead]
    game.dies(dead)
    game.returning(dead, twin_of)
    game.dies(dead)
    assert game.arrives(*others) == [0]
    game.returning(dead, twin_of)
    game.is_back(dead)
    assert game.arrives(*others) == []
    assert game.dies(dead) == [1]


def test_a_quorum_is_one_of_those_who_live() -> None:
    game = Game(Rules(waiting.rule(0.5), "carry"), 5)
    for rank in (3, 4):
        game.dies(rank)
    assert game.arrives(0) == []
    assert game.arrives(1) == [0]  # two of three
    for rank in (3, 4):
        game.returning(rank, twin_of=0)
        game.is_back(rank)
    assert game.arrives(0, 1) == []
    assert game.arrives(3) == [1]  # three of five


def test_with_a_bound_what_the_dead_one_was_computing_holds_up_nobody_and_its_twin_does() -> None:
    game = Game(Rules(waiting.first, "carry", bound=1), 2)
    assert game.arrives(0) == [0]
    assert game.referee.hear(0, Notice(Say.BEGAN, 0, 1)) == []
    assert game.arrives(0) == []  # worker 1 computes at weights without a result
    assert game.dies(1) == [1]
    game.returning(1, twin_of=0)
    assert game.arrives(0) == [2]
    game.is_back(1)
    assert game.arrives(0) == [3]
    assert game.arrives(0) == []
    assert game.arrives(1) != []


POOL = Rules(waiting.first, "shared", good_for=float("inf"), pool=2, late=1)


def test_where_groups_are_made_of_those_who_are_there_a_twin_has_had_a_part_in_as_many_rounds() -> None:
    game = Game(POOL)
    for _ in range(3):
        for rank in (0, 1):
            game.referee.hear(rank, Notice(Say.ARRIVED, game.referee.started_with(rank), 0))
        for rank in (0, 1):
            game.referee.hear(rank, Notice(Say.OVER))
    game.dies(2)
    game.returning(2, twin_of=1)
    assert game.referee.started_with(2) == game.referee.started_with(1) > 0
    before = game.referee.started
    assert 2 not in game.referee.missing
    game.is_back(2)
    assert game.referee.started == before


# A seat.


def seat(rules: Rules, rank: int = 0) -> Seat:
    return Seat(rules, topology.everyone(SIZE), Nodes(SIZE), rank, None)


def test_a_twin_has_the_results_that_were_not_taken_and_the_weights_that_answer_but_no_gradient_that_is_owed() -> None:
    owes = seat(ALL)
    owes.offer(vec(3.0), 0)
    made = owes.twin(2)
    assert made.tray.owed() is None
    assert made.has_counted
    assert not owes.has_counted
    assert (made.results, made.place.base) == (owes.results, owes.place.base)

    answers = seat(Rules(waiting.everyone, "last"))
    answers.offer(vec(3.0), 0)
    made = answers.twin(2)
    assert made.tray.value is not None
    assert made.tray.value.parts[0].tolist() == [3.0]
    assert made.tray.value is not answers.tray.value  # what the one lays down next is not the other's


def test_what_a_dead_one_had_handed_in_is_in_one_round_before_another_takes_its_place() -> None:
    dead = seat(ALL)
    dead.offer(vec(3.0), 0)
    dead.bury()
    assert not dead.has_counted
    given = dead.snapshot(0, False)
    assert given.value is not None
    assert given.value.parts[0].tolist() == [3.0]
    assert dead.has_counted


# The bell.


@pytest.mark.parametrize("enough", [1, 2, 3])
def test_the_bell_rings_for_as_many_as_were_asked_for_or_for_all_who_are_left(enough: int) -> None:
    rope = Rope(3)
    rang = rope.pull(0, enough)
    assert rang == (enough == 1)
    early = rope.one_less()
    rang = rang or bool(early) or rope.pull(0, enough)
    assert rang  # two are left


def test_a_round_that_was_under_way_when_one_came_back_rings_without_it_and_the_next_one_with_it() -> None:
    rope = Rope(3)
    rope.one_less()
    assert not rope.pull(4, 3)
    rope.one_more(4)
    assert rope.pull(4, 3)  # the two that were there
    assert not rope.pull(5, 3)
    assert not rope.pull(5, 3)
    assert rope.pull(5, 3)


@pytest.mark.parametrize("order", [*itertools.permutations(["pull", "pull", "dies", "comes"])], ids=str)
def test_in_whatever_order_it_dies_and_comes_the_bell_rings_once_a_round(order: tuple[str, ...]) -> None:
    if order.index("comes") < order.index("dies"):
        return
    rope, rings = Rope(3), 0
    for what in order:
        if what == "pull":
            rings += rope.pull(0, 3)
        elif what == "dies":
            rings += len(rope.one_less())
        else:
            rope.one_more(0)
    rings += rope.pull(0, 3)  # the third, or its twin, which pulls though nobody waits for it
    assert rings == 1
