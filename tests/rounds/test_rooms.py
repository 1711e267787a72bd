"""Workers that come at the same moment take turns at memory: they wait for words that will free some, and no longer."""

from __future__ import annotations

import marshal
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.live.partial import rooms
from offbeat.live.partial.desk import Desk
from offbeat.live.partial.own import OwnSlots
from offbeat.live.partial.stacks import SEEN, Guest, Loan, Slots, Sum, number_of
from offbeat.live.transport.hub import Frame, Word
from offbeat.rounds import waiting
from offbeat.rounds.rules import Rules
from offbeat.topology import groups
from offbeat.topology.hierarchy import Nodes

SIZE, GRACE_S = 4, 0.5


class Host:
    """A desk with four workers that have laid down their weights, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rules: Rules) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(rooms, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.slots = Slots(SIZE, 100, small=False, shares=True, pooled=True, grace_s=GRACE_S)
        self.desk = Desk(rules, groups(SIZE, 2), Nodes(SIZE), 0, 0, self.slots)
        self.heard: dict[int, list[Any]] = {rank: [] for rank in range(SIZE)}
        self.most = 0
        for rank in range(SIZE):
            self.say(Word.OPEN, rank, number_of((rank, 0)))

    def _deliver(self, letters: Any) -> None:
        for to, letter in letters:
            if to in self.heard and letter.word is Word.ANSWER:
                self.heard[to].append(marshal.loads(letter.data))
        self.most = max(self.most, self.slots.in_use)

    def say(self, word: Word, rank: int, a: int = 0, b: int = 0, said: bytes = b"") -> None:
        self._deliver(self.desk.hear(Frame(word, rank, a, b, data=said)))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._deliver(self.desk.silence())

    def has_read(self, rank: int) -> None:
        """It says so, and gives back its slot that is free by then."""
        self.say(Word.READ, rank, said=bytes([SEEN] * 8))
        for _, home in self.heard[rank][-1][4]:
            self.say(Word.GIVE, rank, number_of(home))

    def room(self, rank: int) -> tuple[int, int] | None:
        """The slot that this worker was given, if it was answered."""
        found = [answer[1][0][0] for answer in self.heard[rank] if answer[0] == "room"]
        return found[-1] if found else None


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch, Rules(waiting.first, "last"))


def test_four_who_come_at_the_same_moment_need_fewer_slots_than_what_is_new_and_what_is_old(host: Host) -> None:
    for rank in range(SIZE):
        host.say(Word.ROOM, rank)
    first = [rank for rank in range(SIZE) if host.room(rank)]
    assert first == [0, 1], "beside these and what answers for all there is room for a sum, and no more"
    done = set[int]()
    while len(done) < SIZE:
        rank = next(r for r in range(SIZE) if r not in done and host.room(r))
        host.say(Word.OFFER, rank, number_of(host.room(rank) or (0, 0)), 0)
        host.has_read(rank)
        done.add(rank)
    assert host.most == 2 * SIZE - 1


def test_where_nobody_is_at_work_nobody_waits(host: Host) -> None:
    for rank in range(SIZE):
        host.say(Word.ROOM, rank)
    for rank in (0, 1):
        host.say(Word.OFFER, rank, number_of(host.room(rank) or (0, 0)), 0)
    assert host.room(2) is None, "0 and 1 have not said that they have read what they were given"
    for rank in (0, 1):
        host.has_read(rank)
    assert host.room(2)
    assert host.room(3)


def test_who_was_waited_for_in_vain_is_not_waited_for_before_it_has_spoken(host: Host) -> None:
    for rank in range(3):
        host.say(Word.ROOM, rank)
    assert host.desk.pause_s == GRACE_S
    host.wait(0.9 * GRACE_S)
    assert host.room(2) is None
    host.wait(0.1 * GRACE_S)
    assert host.room(2), "0 and 1 were stopped"
    host.say(Word.OFFER, 2, number_of(host.room(2) or (0, 0)), 0)
    host.has_read(2)
    host.say(Word.ROOM, 3)
    assert host.room(3), "nobody waits for them a second time"
    host.say(Word.OFFER, 3, number_of(host.room(3) or (0, 0)), 0)
    host.has_read(3)
    host.say(Word.OFFER, 0, number_of(host.room(0) or (0, 0)), 0)
    host.heard[2].clear()
    host.say(Word.ROOM, 2)
    assert host.room(2) is None, "0 has gone on, and will soon have read its result"


def test_who_has_come_has_no_slot_that_nothing_stands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, Rules(waiting.at_least(SIZE), "shared"))
    for rank in range(SIZE):
        host.say(Word.OFFER, rank, number_of((rank, 20)), 0)
    used = host.slots.in_use
    for rank in range(SIZE):
        (answer,) = host.heard[rank]
        freed = [home for _, home in answer[4]]
        assert sorted(freed) == [(rank, 0), (rank, 20)], "it knows by itself when these are free"
    chair = host.desk._chairs[0]
    chair.came = True
    chair.freed.append((0, 30))
    host.desk._letters()
    assert host.slots.in_use == used - 1
    assert chair.gone == [(0, 30)]
    assert not chair.freed
    chair.came = False
    chair.freed.append((0, 31))
    host.desk._letters()
    assert chair.freed == [(0, 31)], "what it was given may stand on this one"


def test_who_waits_for_a_full_round_keeps_no_average_that_it_will_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, Rules(waiting.first, "last", full_every=2))
    host.say(Word.OFFER, 0, number_of((0, 20)), 0)
    late = host.desk._chairs[2].seat
    assert len(late.untold) == 1
    host.say(Word.OFFER, 2, number_of((2, 20)), 0)
    assert late.needs == 2
    assert not late.untold


@pytest.mark.parametrize("missing", ["the result", "what goes into it"])
def test_what_goes_into_a_result_is_lent_until_both_are_there(missing: str) -> None:
    freed: list[tuple[int, int]] = []
    into, result = Sum(0, [], 1), Sum(1, [], 1)
    into.assign((0, 5), 0, (1,), False, freed.append)
    guest = Guest(0, lent=[Loan(into, (result,)), Loan(result, ())])
    seen, unseen = (into, result) if missing == "the result" else (result, into)
    del into
    seen.complete = True
    guest.lent[0].end_if_made()
    assert guest.lent[0].one is not None
    unseen.complete = True
    del seen, unseen
    guest.lent[0].end_if_made()
    guest.lent[1].end_if_made()
    assert freed == [(0, 5)]
    assert guest.lent[1].one is result, "it is read later"
    guest.comes_again(bytes([SEEN, SEEN]))
    assert not guest.lent


def test_a_slot_that_was_never_written_to_is_not_given_back() -> None:
    own = OwnSlots(1, True, False, lambda recipe: True)
    assert own.without_need(lambda: ()) == [], "on a GPU it is no memory yet"
    assert own.one(lambda: ()) == (1, 0)
    own.are_free([(1, 0)])
    assert own.without_need(lambda: [(1, 0)]) == []
    assert own.without_need(lambda: ()) == [(1, 0)]


def test_a_worker_keeps_as_many_free_slots_as_it_is_to() -> None:
    own = OwnSlots(1, True, False, lambda recipe: True)
    assert own.one(lambda: ()) == (1, 0)
    own.are_free([(1, 0), (2, 3), (2, 4)])
    assert own.without_need(lambda: (), keeps=1) == [(2, 3), (2, 4)]
    assert own.one(lambda: ()) == (1, 0), "it need not ask for one"
