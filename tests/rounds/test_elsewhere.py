"""Rounds beside meetings that are not ours: no order of events locks, and what must be full stays full.

All orders in which a few workers can go through a short program of steps ("s") and collectives of the script's own
("m") are run against the referee and the rule that says who is held.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from offbeat.rounds import waiting
from offbeat.rounds.held import Elsewhere, held
from offbeat.rounds.place import Place
from offbeat.rounds.referee import Referee
from offbeat.rounds.rules import Rules


def inside(count: int, ranks: tuple[int, ...] = (0, 1, 2)) -> Elsewhere:
    return Elsewhere(True, {"group": (count, ranks)})


def outside(count: int) -> Elsewhere:
    return Elsewhere(False, {"group": (count, (0, 1, 2))})


def test_who_is_inside_a_collective_that_another_has_not_entered_is_held() -> None:
    assert held({0: inside(2), 1: outside(1), 2: inside(2)}) == {0, 2}


def test_who_is_inside_one_that_all_have_entered_is_on_its_way_and_waited_for() -> None:
    assert held({0: inside(2), 1: outside(2), 2: inside(2)}) == set()


def test_who_takes_no_part_in_a_collective_holds_nobody_in_it() -> None:
    assert held({0: inside(1, (0, 1)), 1: inside(1, (0, 1)), 2: Elsewhere()}) == set()
    assert held({0: inside(1, (0, 1)), 1: Elsewhere(), 2: Elsewhere()}) == {0}


def test_who_waits_for_a_round_of_another_channel_is_held_until_somebody_has_its_result() -> None:
    waits, idle = Elsewhere(rounds={"other": (3, 4)}), Elsewhere(rounds={"other": (3, 0)})
    assert held({0: waits, 1: idle}) == {0}
    assert held({0: waits, 1: Elsewhere(rounds={"other": (4, 0)})}) == set()


@dataclass
class Play:
    """Workers somewhere in their programs. A round is over for all as soon as it has started."""

    programs: list[str]
    referee: Referee
    places: list[Place]
    at: list[int]
    entered: list[int]
    waits: list[int]  # results a worker waits for in its step; 0: it does not
    contents: list[set[int]] = field(default_factory=list)  # who had arrived for each round

    @classmethod
    def of(cls, programs: list[str], rules: Rules) -> Play:
        size = len(programs)
        none = [0] * size
        return cls(programs, Referee(rules, size, 0), [Place(rules) for _ in programs], none[:], none[:], none[:])

    def clone(self) -> Play:
        lists: dict[str, Any] = {name: value[:] for name, value in vars(self).items() if isinstance(value, list)}
        lists["places"] = [copy.copy(place) for place in self.places]
        referee = copy.copy(self.referee)
        for name, value in vars(referee).items():
            if isinstance(value, set | list):
                setattr(referee, name, value.copy())
        return Play(**{**lists, "referee": referee})

    def key(self) -> str:
        return repr((self.referee, self.places, self.at, self.entered, self.waits))

    def said(self) -> dict[int, Elsewhere]:
        everyone = tuple(range(len(self.programs)))
        return {r: Elsewhere(self.is_inside(r), {"group": (self.entered[r], everyone)}) for r in everyone}

    def action(self, rank: int) -> str:
        return self.programs[rank][self.at[rank]] if self.at[rank] < len(self.programs[rank]) else ""

    def is_inside(self, rank: int) -> bool:
        done = self.programs[rank][: self.at[rank]].count("m")
        return self.action(rank) == "m" and self.entered[rank] > done

    def can_move(self, rank: int) -> bool:
        if self.waits[rank]:
            return self.places[rank].results >= self.waits[rank]
        if self.is_inside(rank):
            return min(self.entered) >= self.entered[rank]
        return bool(self.action(rank))

    def move(self, rank: int) -> None:
        place = self.places[rank]
        if self.waits[rank]:
            place.take(self.at[rank])
            self.waits[rank] = 0
            self.at[rank] += 1
            self.over(rank)
        elif self.is_inside(rank):
            self.at[rank] += 1
            self.over(rank)
        elif self.action(rank) == "m":
            self.entered[rank] += 1
        else:
            base, position = place.base, place.arrive(self.at[rank])
            self.waits[rank] = place.waits_for(position)
            if position is None:
                self.deliver(self.referee.passed(rank, base))
                place.take(self.at[rank])
                self.at[rank] += 1
                self.over(rank)
            else:
                self.deliver(self.referee.arrived(rank, position, base))

    def over(self, rank: int) -> None:
        if not self.action(rank):
            self.deliver(self.referee.finished(rank))

    def judge(self) -> None:
        self.deliver(self.referee.held(held(self.said())))

    def deliver(self, started: list[int]) -> None:
        for version in started:
            self.contents.append({r for r, p in enumerate(self.places) if p.outstanding >= version})
            for place in self.places:
                place.results = version + 1


def all_orders(programs: list[str], rules: Rules, always_asked: bool) -> tuple[int, list[list[set[int]]]]:
    """(states seen, the rounds of every ending). Where nobody is asked all the time, all are when nobody can move."""
    stack, seen, endings = [Play.of(programs, rules)], set[str](), []
    while stack:
        play = stack.pop()
        movers = [r for r in range(len(programs)) if play.can_move(r)]
        if not movers:
            play.judge()
            movers = [r for r in range(len(programs)) if play.can_move(r)]
        if not movers:
            assert not any(play.action(r) for r in range(len(programs))), f"locked: {play}"
            endings.append(play.contents)
        for rank in movers:
            after = play.clone()
            after.move(rank)
            if always_asked:
                after.judge()
            if (key := after.key()) not in seen:
                seen.add(key)
                stack.append(after)
    return len(seen), endings


RULES = {
    "first": Rules(waiting.first, "carry", full_every=3),
    "majority": Rules(waiting.majority, "carry", full_every=None),
    "everyone": Rules(waiting.everyone, "carry"),
    "full": Rules(waiting.first, "carry", full_every=1),
    "every second full": Rules(waiting.first, "last", full_every=2),
    "quorum": Rules(waiting.at_least(2), "last", full_every=3),
    "bounded": Rules(waiting.first, "carry", bound=2),
    "bounded weights": Rules(waiting.at_least(2), "last", bound=2),
    "every step": Rules(waiting.majority, "carry", full_every=2, catch_up="every_step"),
}
PROGRAMS = {"equal": ["ssms"] * 3, "one is behind": ["sm", "sssm", "sm"], "uneven": ["mss", "sm", "m"]}


@pytest.mark.parametrize("always_asked", [False, True], ids=["asked when stuck", "always asked"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("rule", RULES)
def test_no_order_of_events_locks(rule: str, program: str, always_asked: bool) -> None:
    states, endings = all_orders(PROGRAMS[program], RULES[rule], always_asked)
    assert states > 15
    assert endings


@pytest.mark.parametrize("always_asked", [False, True], ids=["asked when stuck", "always asked"])
@pytest.mark.parametrize("rule", ["full", "everyone"])
def test_rounds_that_all_take_part_in_stay_full_in_every_order(rule: str, always_asked: bool) -> None:
    for contents in all_orders(PROGRAMS["equal"], RULES[rule], always_asked)[1]:
        assert contents == [{0, 1, 2}] * 3


def test_without_the_rule_the_same_programs_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Play, "judge", lambda self: None)
    with pytest.raises(AssertionError, match="locked"):
        all_orders(PROGRAMS["one is behind"], RULES["everyone"], always_asked=False)


def test_torch_is_as_it_was_when_the_last_optimizer_has_ended() -> None:
    owners = (torch._C._distributed_c10d.ProcessGroup, torch._C._distributed_c10d.Work, DistributedDataParallel)
    before = [dict(vars(owner)) for owner in owners]
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.Linear(1, 1)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.eager()):
        assert [dict(vars(owner)) for owner in owners] != before, "collectives are noticed"
        dist.all_reduce(torch.zeros(1))
    assert [dict(vars(owner)) for owner in owners] == before
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
