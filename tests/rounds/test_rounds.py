"""Referee, places and trays by themselves: every order in which arrivals, snapshots and results can happen.

There is no clock here. The snapshot of each worker's seat is taken, and its result handed over, in a moment of its own,
so what holds here holds for any network.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offbeat.rounds import waiting
from offbeat.rounds.place import Place
from offbeat.rounds.referee import Referee
from offbeat.rounds.rules import Rules
from offbeat.rounds.tray import Deposit, Snapshot, Tray
from offbeat.tensors.vector import Vec


def vec(*numbers: float) -> Vec:
    return Vec([torch.tensor(numbers, dtype=torch.float64)])


# Trays.


class TrayMachine(RuleBasedStateMachine):
    """What was deposited is owed, taken or lost, and never two of these; the value is the sum of what is owed."""

    absent: Literal["carry", "drop"] = "carry"

    def __init__(self) -> None:
        super().__init__()
        self.tray, self.made, self.taken = Tray(self.absent), 0, list[Snapshot]()

    @rule()
    def deposit(self) -> None:
        x = vec(2.0**self.made)
        self.tray.deposit(x, Deposit(self.made, 0))
        x.zero_()  # what is done to a vector after its deposit does not travel
        self.made += 1

    @rule(made_for_it=st.booleans())
    def snapshot(self, made_for_it: bool) -> None:
        shot = self.tray.snapshot(0, made_for_it)
        assert shot.deposits == self.tray.deposits
        assert (shot.value is None) == (not shot.pieces)
        self.taken.append(shot)

    @invariant()
    def balances(self) -> None:
        everywhere = [*self.tray.pieces, *self.tray.lost, *(p for shot in self.taken for p in shot.pieces)]
        assert Counter(p.step for p in everywhere) == Counter(range(self.made))
        trays: list[Tray | Snapshot] = [self.tray, *self.taken]
        for held in trays:
            owed = sum(2.0**p.step for p in held.pieces)
            assert (held.value.item() if held.value is not None else 0.0) == owed
        assert self.absent == "drop" or not self.tray.lost
        assert self.absent == "carry" or len(self.tray.pieces) <= 1


class DroppingTrayMachine(TrayMachine):
    absent = "drop"

    @rule()
    def discard(self) -> None:
        self.tray.discard(Deposit(self.made, 0))
        self.made += 1


TrayMachine.TestCase.settings = DroppingTrayMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20
)
TestCarryingTray = TrayMachine.TestCase
TestDroppingTray = DroppingTrayMachine.TestCase


def test_weights_stay_in_their_tray_and_newer_ones_take_their_place() -> None:
    tray = Tray("last")
    tray.deposit(vec(1.0), Deposit(0, 0))
    before = tray.snapshot(0, True)
    tray.deposit(vec(5.0), Deposit(1, 1))
    after = tray.snapshot(2, False)
    seen = [shot.value.item() for shot in (before, after, tray.snapshot(3, False)) if shot.value]
    assert seen == [1.0, 5.0, 5.0]
    assert (before.deposits, after.deposits, after.staleness(2)) == (1, 2, 1)
    assert Tray("last").snapshot(0, True).value is None


def test_a_piece_is_fresh_when_it_was_begun_with_every_result_there_was() -> None:
    shot = Snapshot(vec(0.0), (Deposit(4, 5), Deposit(5, 7)), 2)
    assert [shot.fresh(v, "current") for v in (5, 6, 7)] == [True, False, True]
    assert [shot.fresh(v, "every_step") for v in (4, 5, 7)] == [True, True, False]
    assert shot.staleness(7) == 2
    assert not Snapshot(vec(0.0), (Deposit(-1, 0),), 1).fresh(0, "current")
    assert Snapshot(None, (), 0).staleness(3) is None


# Waiting.


def test_the_initiator_is_drawn_alike_by_all_and_everybody_is_drawn() -> None:
    drawn = [waiting.majority.initiator(v, 6, seed=3) for v in range(600)]
    assert drawn == [waiting.majority.initiator(v, 6, seed=3) for v in range(600)]
    assert drawn != [waiting.majority.initiator(v, 6, seed=4) for v in range(600)]
    assert all(70 < n < 130 for n in Counter(drawn).values())
    assert len(Counter(drawn)) == 6


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_fraction_is_rounded_up_to_whole_workers(part: Any, size: int) -> None:
    part = min(part, size)
    assert waiting.at_least(part / size).count(size) == part
    if part > 1:
        assert waiting.at_least((part - 0.5) / size).count(size) == part


@pytest.mark.parametrize("wrong", [0, -1, 0.0, 1.5, True, float("nan"), "half"])
def test_a_rule_that_means_nothing_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="use"):
        waiting.rule(wrong)


def test_a_rule_of_ones_own_is_taken_as_it_is() -> None:
    assert waiting.rule(waiting.majority) is waiting.majority
    mine = type("Mine", (), {"name": "mine", "satisfied": lambda *_: True})()
    assert waiting.rule(mine) is mine


# All three together.


class Table:
    """Workers at one channel, moved by hand: ("step", r), ("snap", r), ("result", r)."""

    def __init__(self, rules: Rules, steps: list[int], seed: int = 0) -> None:
        self.rules, self.steps, self.size = rules, steps, len(steps)
        self.referee = Referee(rules, self.size, seed)
        self.places = [Place(rules) for _ in steps]
        self.trays = [Tray(rules.absent) for _ in steps]
        self.step, self.state = [0] * self.size, ["computing"] * self.size  # or "before", "after" a deposit, or "rests"
        self.needed = [0] * self.size  # results that one who waits, before or after, waits for
        self.snapped = [0] * self.size
        self.deposited: list[tuple[int, int]] = []
        self.consumed: list[tuple[int, int, int, int]] = []  # rank, step, base, round
        self.started: list[tuple[int, frozenset[int]]] = []  # round, who had come to it with fresh work
        for rank in range(self.size):
            if rules.absent == "last":
                self.trays[rank].deposit(vec(0.0), Deposit(-1, 0))
            if steps[rank] == 0:
                self._go_on(rank, begin=True)

    def moves(self) -> list[tuple[str, int]]:
        every, started, summed = range(self.size), self.referee.started, min(self.snapped)
        there = [place.results for place in self.places]
        return [
            *(("step", r) for r in every if self.state[r] == "computing"),
            *(("snap", r) for r in every if there[r] == self.snapped[r] < started),
            *(("result", r) for r in every if there[r] < summed),
        ]

    def do(self, move: tuple[str, int]) -> None:
        what, rank = move
        place, tray = self.places[rank], self.trays[rank]
        if what == "step":
            if place.must_wait_first():
                self.state[rank], self.needed[rank] = "before", place.outstanding + 1
            else:
                self._arrive(rank)
        elif what == "snap":
            version, pieces = self.snapped[rank], tray.pieces
            shot = tray.snapshot(version, bool(pieces) and place.made_for(version, pieces[-1].base))
            self.consumed += [(rank, p.step, p.base, version) for p in shot.pieces]
            self.snapped[rank] += 1
        else:
            place.results += 1
            if self.state[rank] == "rests":
                self._rest(rank)
            elif place.results >= self.needed[rank] and self.state[rank] == "before":
                self._arrive(rank)
            elif place.results >= self.needed[rank] and self.state[rank] == "after":
                self._go_on(rank)

    def _arrive(self, rank: int) -> None:
        place, step = self.places[rank], self.step[rank]
        piece, position = Deposit(step, place.base), place.arrive(step)
        self.deposited.append((rank, step))
        if position is None and self.rules.absent == "drop":
            self.trays[rank].discard(piece)
        else:
            self.trays[rank].deposit(vec(0.0), piece)
        if position is None:
            self._begun(self.referee.passed(rank, piece.base))
        else:
            self._begun(self.referee.arrived(rank, position, piece.base))
        needed = place.waits_for(position)
        if place.results >= needed:
            self._go_on(rank)
        else:
            self.state[rank], self.needed[rank] = "after", needed

    def _go_on(self, rank: int, begin: bool = False) -> None:
        place = self.places[rank]
        if not begin:
            taken = place.take(self.step[rank])
            assert list(taken) == sorted(set(taken))
            self.step[rank] += 1
            self._begun(self.referee.began(rank, place.base))
        self.state[rank] = "computing"
        if self.step[rank] == self.steps[rank]:
            self.state[rank] = "rests"
            self._begun(self.referee.finished(rank))
            self._rest(rank)

    def _rest(self, rank: int) -> None:
        place = self.places[rank]
        place.taken = place.base = place.results
        if self.rules.absent == "last":
            self.trays[rank].deposit(vec(0.0), Deposit(-1, place.taken))
            self._begun(self.referee.renewed(rank, place.taken))

    def _begun(self, versions: list[int]) -> None:
        for version in versions:
            fresh = frozenset(
                r for r in range(self.size) for p in self.trays[r].pieces
                if p.step >= 0 and (p.step if self.rules.catch_up == "every_step" else p.base) == version
            )  # fmt: skip
            self.started.append((version, fresh))
            self.check_start(version, fresh, frozenset(r for r in range(self.size) if self.state[r] != "rests"))

    def check_start(self, version: int, fresh: frozenset[int], training: frozenset[int]) -> None:
        rules = self.rules
        assert version == len(self.started) - 1, "rounds start in order, each once"
        assert not rules.is_full(version) or all(self.places[r].outstanding == version for r in training)
        if rules.is_full(version) or rules.late:
            return
        if isinstance(rules.wait, waiting.AtLeast):
            assert len(fresh & training) >= min(rules.wait.count(self.size), len(training))
        elif isinstance(rules.wait, waiting.Majority):
            chosen = rules.wait.initiator(version, self.size, self.referee.seed)
            assert chosen in fresh or chosen not in training
        assert fresh & training

    def check(self) -> None:
        """After any move."""
        if self.rules.absent != "last":
            owed = [(r, p.step) for r, tray in enumerate(self.trays) for p in tray.pieces]
            lost = [(r, p.step) for r, tray in enumerate(self.trays) for p in tray.lost]
            used = [(r, step) for r, step, _, _ in self.consumed]
            assert sorted([*owed, *lost, *used]) == sorted(self.deposited), "each deposit is in one place only"
        for rank, step, base, version in self.consumed:
            assert version >= base
            if self.rules.bound is not None:
                assert version - base <= self.rules.bound
            if self.rules.absent == "drop":
                made_for = step if self.rules.catch_up == "every_step" else base
                assert 0 <= version - made_for <= self.rules.late, (rank, step)

    def check_end(self) -> None:
        """When nothing can move any more."""
        assert all(s == "rests" for s in self.state), f"nothing moves, but workers wait: {self.state}"
        assert self.referee.all_finished
        assert all(place.results == self.referee.started for place in self.places)

    def key(self) -> object:
        return (
            tuple(self.step), tuple(self.state), tuple(self.needed), tuple(self.snapped), repr(self.referee),
            tuple((p.results, p.taken, p.base, p.outstanding) for p in self.places),
            tuple(tuple(t.pieces) for t in self.trays),
        )  # fmt: skip


def walk(table: Table, draw: Any) -> None:
    while moves := table.moves():
        table.do(draw(moves))
        table.check()
    table.check_end()


WAITS: list[waiting.Wait] = [
    waiting.first,
    waiting.majority,
    waiting.at_least(2),
    waiting.at_least(0.5),
    waiting.everyone,
]
some_rules = st.builds(
    lambda wait, absent, limits, catch_up, late: Rules(wait, absent, limits[0], limits[1], catch_up, late),
    st.sampled_from(WAITS),
    st.sampled_from(["carry", "drop", "last"]),
    st.sampled_from([(None, None), (1, None), (2, None), (4, None), (None, 2), (None, 3), (None, 5)]),
    st.sampled_from(["current", "every_step"]),
    st.sampled_from([0, 1]),
)


@given(some_rules, st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 99), st.data())
@settings(max_examples=200)
def test_no_order_of_events_loses_doubles_outdates_or_hangs(
    rules: Rules, steps: list[int], seed: int, data: st.DataObject
) -> None:
    walk(Table(rules, steps, seed), lambda moves: data.draw(st.sampled_from(moves)))


@pytest.mark.parametrize("absent", ["carry", "drop", "last"])
@pytest.mark.parametrize("catch_up", ["current", "every_step"])
def test_thousands_of_seeded_orders_hold_the_same(absent: Any, catch_up: Any) -> None:
    for seed in range(700):
        draw = random.Random(seed)
        late, limit = draw.choice([0, 0, 1]), draw.choice([None, 1, 2, 3])
        full, bound = draw.choice([(limit, None), (None, (limit or 9) + late)])
        rules = Rules(draw.choice(WAITS), absent, full, bound, catch_up, late)
        eager_for = [draw.random() ** 3 for _ in range(6)]  # some workers hardly ever get a turn

        def pick(moves: Any, draw: random.Random = draw, eager_for: list[float] = eager_for) -> Any:
            return draw.choices(moves, [1e-3 + eager_for[r] for _, r in moves])[0]

        walk(Table(rules, [draw.randint(0, 7) for _ in range(draw.randint(1, 6))], seed), pick)


@pytest.mark.parametrize("steps", [[3, 3], [2, 1, 1]], ids=str)
@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize(
    ("absent", "full", "bound", "late"),
    [("carry", None, None, 0), ("carry", 2, None, 0), ("carry", None, 1, 0), ("carry", None, 2, 1),
     ("drop", 2, None, 1), ("last", 2, None, 0), ("last", None, 1, 0)],
)  # fmt: skip
def test_every_order_of_all_events_of_a_small_table(
    steps: list[int], catch_up: Any, absent: Any, full: int | None, bound: int | None, late: int
) -> None:
    for wait in (waiting.first, waiting.at_least(2)):
        seen, open_tables = set(), [Table(Rules(wait, absent, full, bound, catch_up, late), steps)]
        while open_tables:
            table = open_tables.pop()
            moves = table.moves()
            if not moves:
                table.check_end()
            for move in moves:
                following = copy.deepcopy(table)
                following.do(move)
                following.check()
                key = following.key()
                if key not in seen:
                    seen.add(key)
                    open_tables.append(following)
        assert len(seen) >= 20


def test_a_round_that_nobody_counts_for_does_not_start() -> None:
    referee = Referee(Rules(waiting.first, "carry"), 2, 0)
    assert referee.passed(0, 0) == []
    assert referee.arrived(1, 0, 0) == [0]
    assert referee.arrived(0, 0, 0) == [], "it has started"
    assert referee.finished(0) == referee.finished(1) == []
    assert referee.all_finished


def test_a_bound_lets_a_round_start_as_soon_as_the_late_one_has_deposited() -> None:
    referee = Referee(Rules(waiting.first, "carry", bound=1), 2, 0)
    assert referee.arrived(0, 0, 0) == [0]  # rank 1 would be stale by one in round 1
    referee.began(0, 1)
    assert referee.arrived(0, 1, 1) == []  # and by two in round 2
    assert referee.passed(1, 0) == [1]


@pytest.mark.parametrize("absent", ["carry", "shared"])
def test_a_bound_counts_what_a_worker_may_have_handed_in_unheard(absent: Any) -> None:
    """Where results are late it goes on at once, with nothing newer, and that comes in a round later still."""
    referee = Referee(Rules(waiting.first, absent, bound=2, late=1), 2, 0)
    assert referee.arrived(0, 0, 0, 0) == [0]
    assert referee.arrived(0, 1, 0, 1) == [], "rank 1 may be in its second step, which would be in round 3"
    assert referee.arrived(1, 1, 0, 0) == [1], "heard late, and begun with no result: it is in round 2, stale by two"
    assert referee.arrived(0, 2, 1, 2) + referee.arrived(1, 2, 0, 2) == [2], "by the second of them"


def test_a_late_worker_in_global_rounds_goes_on_and_in_a_full_round_waits() -> None:
    place = Place(Rules(waiting.first, "carry", full_every=4))
    place.results = 2
    assert place.arrive(0) is None
    assert place.waits_for(None) == 0
    assert list(place.take(0)) == [0, 1]
    place.results = 3
    assert place.arrive(1) == 3, "round 3 is full: everybody counts"
    assert place.waits_for(3) == 4


def test_a_late_worker_that_merges_weights_step_for_step_takes_its_own_round_and_no_newer_one() -> None:
    place = Place(Rules(waiting.first, "last", catch_up="every_step"))
    place.results = 5
    assert place.arrive(0) is None
    assert (list(place.take(0)), place.base) == ([0], 1)
    assert list(Place(Rules(waiting.first, "last"), results=5).take(0)) == [0, 1, 2, 3, 4]
