"""The protocol of partial rounds itself: all orders of small cases, on the seats that both worlds use.

Nothing is simulated here and nothing takes time. At any moment several things may happen next: a worker ends a step, a
notice reaches the referee, the news of a round reaches a driver, a result reaches a seat. The search tries all of them,
in all orders; a state that was seen before is not searched again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from offbeat import topology
from offbeat.rounds import waiting
from offbeat.rounds.referee import Notice, Referee
from offbeat.rounds.rules import Rules
from offbeat.rounds.seat import Given, Got, Outcome, Seat
from offbeat.tensors.vector import Vec
from offbeat.topology.hierarchy import Nodes
from tests.support.long import long


class Slots(Vec):
    """A vector of one number for each step of each worker, as a plain list: tens of thousands are made and copied."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Iterable[float]) -> None:
        super().__init__(())
        self.numbers = list(numbers)

    def clone(self) -> Slots:
        return Slots(self.numbers)

    def __mul__(self, factor: Vec | float) -> Slots:
        assert isinstance(factor, float)
        return Slots(n * factor for n in self.numbers)

    def add_(self, other: Vec, alpha: float = 1.0) -> Slots:
        assert isinstance(other, Slots)
        self.numbers = [a + alpha * b for a, b in zip(self.numbers, other.numbers, strict=True)]
        return self

    def copy_(self, other: Vec) -> Slots:
        assert isinstance(other, Slots)
        self.numbers = list(other.numbers)
        return self

    def put_into(self, target: Vec, scale: float = 1.0) -> Vec:
        return target.copy_(self * scale)


def total(vectors: Iterable[Vec], slots: int) -> Slots:
    out = Slots([0.0] * slots)
    for x in vectors:
        out.add_(x)
    return out


T = TypeVar("T")


def twin(one: T) -> T:
    """``copy.copy`` of a plain object, at a third of its cost: there are a million of them."""
    made = object.__new__(type(one))
    vars(made).update(vars(one))
    return made


@dataclass
class Worker:
    """A worker as the protocol sees it: it computes, waits, or rests."""

    seat: Seat
    left: int
    step: int = 0
    phase: str = "computes"
    got: list[Got] = field(default_factory=list)
    says: list[Notice] = field(default_factory=list)  # not heard by the referee yet
    # Rounds that its seat has not heard of: number, flush, and who takes part.
    hears: list[tuple[int, bool, tuple[int, ...]]] = field(default_factory=list)
    out: tuple[int, bool, tuple[int, ...]] | None = None  # the round its snapshot is in


class World:
    """All of it, and what may happen next."""

    def __init__(self, rules: Rules, steps: tuple[int, ...], group: int | None) -> None:
        size = len(steps)
        self.slots, self.nodes = sum(steps), Nodes(size)
        self.referee = Referee(rules, size, 0)
        whom = topology.everyone(size) if group is None else topology.groups(size, group)
        x = Slots([0.0] * self.slots) if rules.of_weights else None
        self.workers = [Worker(Seat(rules, whom, self.nodes, r, x), left) for r, left in enumerate(steps)]
        self.first_slot = [sum(steps[:r]) for r in range(size)]
        self.given: dict[tuple[int, tuple[int, ...]], dict[int, Given]] = {}
        self.flushing = False

    def one_hot(self, rank: int) -> Slots:
        mine = self.first_slot[rank] + self.workers[rank].step
        return Slots(float(slot == mine) for slot in range(self.slots))

    def fork(self) -> World:
        """A copy that goes its own way; what nobody writes to is shared."""
        world = twin(self)
        referee = world.referee = twin(self.referee)
        for name, value in vars(self.referee).items():
            if isinstance(value, (list, set)):
                setattr(referee, name, value.copy())
        referee._pool = copy.deepcopy(self.referee._pool)
        world.given = {key: dict(of) for key, of in self.given.items()}
        world.workers = []
        for w in self.workers:
            one = twin(w)
            one.got, one.says, one.hears = list(w.got), list(w.says), list(w.hears)
            seat = one.seat = twin(w.seat)
            tray = seat.tray = twin(w.seat.tray)
            tray.value, tray._since = tray.value and tray.value.clone(), tray._since and tray._since.clone()
            tray.pieces, tray.lost = list(tray.pieces), list(tray.lost)
            seat.place, seat._results = twin(seat.place), dict(seat._results)
            world.workers.append(one)
        return world

    def moves(self) -> list[tuple[str, int]]:
        found = []
        for r, w in enumerate(self.workers):
            seat = w.seat
            if w.phase == "computes":
                if not w.left:
                    found.append(("finish", r))
                elif seat.results >= seat.needs_first:
                    found.append(("offer", r))
            elif w.phase == "waits" and seat.results >= seat.needs:
                found.append(("take", r))
            elif w.phase == "rests" and (seat.results > seat.place.taken or seat.flushed):
                found.append(("next", r))
            if w.says:
                found.append(("referee", r))
            if w.hears and w.out is None:
                found.append(("snapshot", r))
            if w.out is not None and self.is_whole(r):
                found.append(("deliver", r))
        return found

    def is_whole(self, rank: int) -> bool:
        version, _, block = self.workers[rank].out or (0, False, ())
        return len(self.given.get((version, block), ())) == len(block)

    def do(self, what: str, rank: int) -> None:
        w = self.workers[rank]
        seat = w.seat
        if what == "offer":
            self.tell(w, seat.offer(self.one_hot(rank), w.step))
            w.phase = "waits"
        elif what == "take":
            w.got += seat.take(w.step)
            self.tell(w, seat.began())
            w.left, w.step, w.phase = w.left - 1, w.step + 1, "computes"
        elif what == "finish":
            self.tell(w, seat.finish())
            w.phase = "rests"
        elif what == "next":
            got = seat.next()
            if got is None:
                w.phase = "over"
            else:
                w.got.append(got)
        elif what == "referee":
            for version in self.referee.hear(rank, w.says.pop(0)):
                self.spread(version, False)
            if self.referee.all_finished and not self.flushing:
                self.flushing = True
                self.spread(self.referee.started, True)
        elif what == "snapshot":
            version, flush, block = w.hears.pop(0)
            if flush and not seat.flushes:
                seat.flushed = True
            else:
                self.given.setdefault((version, block), {})[rank] = seat.snapshot(version, flush)
                w.out = (version, flush, block)
        elif what == "deliver":
            assert w.out is not None
            (version, flush, block), w.out = w.out, None
            given = self.given[version, block]
            values = [v for r in block if (v := given[r].value) is not None]
            value = total(values, self.slots) * (1.0 / seat.divisor(block))
            shares = {r: share for r in block if (share := given[r].share) is not None}
            seat.deliver(Outcome.of(self.nodes, version, value, shares, len(block), flush), given[rank])
            seat.flushed = seat.flushed or flush
            self.tell(w, None if flush else seat.over())

    def tell(self, w: Worker, notice: Notice | None) -> None:
        if notice is not None:
            w.says.append(notice)

    def spread(self, version: int, flush: bool) -> None:
        members = self.referee.members(version)
        for r, w in enumerate(self.workers):
            if members is None or r in members:
                w.hears.append((version, flush, members or w.seat.members(version, flush)))

    def key(self) -> Any:
        def numbers(x: Vec | None) -> Any:
            return tuple(x.numbers) if isinstance(x, Slots) else None

        def seat(s: Seat) -> Any:
            results = tuple((v, numbers(o.value)) for v, (o, _) in s._results.items())
            tray = (numbers(s.tray.value), tuple(s.tray.pieces), s.tray._is_out, numbers(s.tray._since))
            return (
                vars(s.place)["results"],
                s.place.taken,
                s.place.base,
                s.place.outstanding,
                s.place.begun,
                results,
                tray,
                s.needs,
            )

        workers = tuple(
            (seat(w.seat), w.left, w.phase, tuple(w.says), tuple(w.hears), w.out, w.seat.flushed) for w in self.workers
        )
        given = tuple((k, tuple((r, numbers(g.value)) for r, g in of.items())) for k, of in self.given.items())
        referee = self.referee
        heard = (referee.started, tuple(referee._position), tuple(referee._computing), tuple(referee._deposit))
        taken = tuple(tuple((g.version, numbers(g.value)) for g in w.got) for w in self.workers)
        pool = vars(referee._pool) if referee._pool is not None else {}
        return workers, given, heard, tuple(sorted(referee._finished)), taken, str(pool), tuple(referee._had_part)


def endings(rules: Rules, steps: tuple[int, ...], group: int | None = None) -> list[World]:
    """Every state in which nothing more can happen, over all orders."""
    first = World(rules, steps, group)
    seen, left, over = {first.key()}, [first], []
    while left:
        world = left.pop()
        moves = world.moves()
        if not moves:
            over.append(world)
        for move in moves:
            after = world.fork()
            after.do(*move)
            if (key := after.key()) not in seen:
                seen.add(key)
                left.append(after)
    return over


GRADIENTS = {
    "first": Rules(waiting.first, "carry"),
    "majority": Rules(waiting.majority, "carry"),
    "everyone": Rules(waiting.everyone, "carry"),
    "full every 2": Rules(waiting.first, "carry", full_every=2),
    "bounded": Rules(waiting.first, "carry", bound=1),
    "late": Rules(waiting.first, "carry", late=1),
    "late and bounded": Rules(waiting.first, "carry", bound=2, late=1),
    "every step": Rules(waiting.first, "carry", catch_up="every_step"),
}


CASES = [(name, steps) for name in GRADIENTS for steps in ((2, 0), (1, 1), (2, 1))]
CASES += [("first", (2, 2)), ("everyone", (3, 2)), ("full every 2", (2, 2))]


@pytest.mark.parametrize(("name", "steps"), [case for case in CASES if case != ("late and bounded", (2, 1))], ids=str)
def test_in_all_orders_every_gradient_is_applied_once_and_nobody_is_left_waiting(
    name: str, steps: tuple[int, ...]
) -> None:
    rules = GRADIENTS[name]
    found = endings(rules, steps)
    assert found
    for world in found:
        assert [w.phase for w in world.workers] == ["over"] * len(steps), "nobody waits for ever"
        for w in world.workers:
            assert [g.version for g in w.got] == list(range(len(w.got))), "all results, in their order"
            assert total((g.value for g in w.got), world.slots).numbers == [1.0 / len(steps)] * world.slots
            if rules.bound is not None:
                rounds = w.got[: world.referee.started]
                assert all(age <= rules.bound for got in rounds for age in got.contributors.values())


def test_three_workers_in_all_orders() -> None:
    for rules in (Rules(waiting.everyone, "carry"), Rules(waiting.at_least(2), "carry")):
        for world in endings(rules, (1, 1, 1)):
            assert [w.phase for w in world.workers] == ["over"] * 3
            for w in world.workers:
                assert total((g.value for g in w.got), 3).numbers == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(("late", "steps"), [(0, (2, 1)), (1, (1, 1))])
def test_in_all_orders_shared_weights_keep_their_sum(late: int, steps: tuple[int, ...]) -> None:
    for world in endings(Rules(waiting.first, "shared", late=late), steps):
        held = [w.seat.tray.shown() for w in world.workers]
        assert total(held, world.slots).numbers == pytest.approx([1.0] * world.slots)


@pytest.mark.parametrize(("late", "steps"), [(0, (2, 1)), (0, (1, 1, 1)), (1, (2, 1)), (1, (1, 1, 1))])
def test_in_all_orders_a_round_of_those_who_are_there_has_nobody_else_and_keeps_the_sum(
    late: int, steps: tuple[int, ...]
) -> None:
    rules = Rules(waiting.first, "shared", late=late, good_for=math.inf, pool=2)
    alone = 0
    for world in endings(rules, steps):
        assert [w.phase for w in world.workers] == ["over"] * len(steps), "nobody waits for ever"
        held = [w.seat.tray.shown() for w in world.workers]
        assert total(held, world.slots).numbers == pytest.approx([1.0] * world.slots)
        for got in (got for w in world.workers for got in w.got):
            assert got.count == len(got.contributors), "each of them has handed something in"
            alone += got.count == 1
    assert alone, "the last who trains has nobody to wait for"


@pytest.mark.parametrize(
    ("draws", "late", "steps"),
    [(1, 0, (1, 1)), (1, 0, (1, 0, 0)), (1, 1, (1, 1)), (2, 1, (1, 0)), pytest.param(2, 1, (2, 0), marks=long)],
)
def test_in_all_orders_who_finds_nobody_there_draws_one_who_computes_and_the_sum_is_kept(
    late: int, steps: tuple[int, ...], draws: int
) -> None:
    rules = Rules(waiting.first, "shared", late=late, good_for=math.inf, pool=2, draws=draws)
    drew = 0
    for world in endings(rules, steps):
        assert [w.phase for w in world.workers] == ["over"] * len(steps), "nobody waits for ever"
        held = [w.seat.tray.shown() for w in world.workers]
        assert total(held, world.slots).numbers == pytest.approx([1.0] * world.slots)
        pool = world.referee._pool
        assert pool is not None
        assert not pool._busy, "every round is known to be over"
        drew += sum(got.count == 2 for w in world.workers for got in w.got)
    assert drew or 0 not in steps, "one alone hands in, and does not average alone"


@pytest.mark.parametrize(("late", "steps"), [(0, (2, 2)), (1, (2, 1))])
def test_in_all_orders_who_has_rounds_of_its_own_counts_them_by_itself(late: int, steps: tuple[int, int]) -> None:
    for world in endings(Rules(waiting.first, "shared", late=late, good_for=math.inf, pool=1), steps):
        assert [w.phase for w in world.workers] == ["over"] * 2, "nobody waits for ever"
        assert [w.seat.results for w in world.workers] == list(steps)
        assert world.referee.started == sum(steps)


def test_in_all_orders_what_is_dropped_is_counted() -> None:
    for world in endings(Rules(waiting.first, "drop"), (2, 2)):
        lost = [(r, step) for r, w in enumerate(world.workers) for step in w.seat.lost]
        applied = total((g.value for g in world.workers[0].got), 4)
        gone = {(slot // 2, slot % 2) for slot, value in enumerate(applied.numbers) if value == 0.0}
        assert sorted(lost) == sorted(gone)


@pytest.mark.parametrize("good_for", [1, 2, math.inf])
@pytest.mark.parametrize("steps", [(2, 0), (2, 1)])
def test_in_all_orders_a_gradient_is_applied_once_if_it_is_young_enough_and_else_dropped_and_counted(
    good_for: float, steps: tuple[int, ...]
) -> None:
    found, ages = endings(Rules(waiting.first, "drop", good_for=good_for), steps), set()
    for world in found:
        assert [w.phase for w in world.workers] == ["over"] * len(steps), "nobody waits for ever"
        lost = {world.first_slot[r] + step for r, w in enumerate(world.workers) for step in w.seat.lost}
        for w in world.workers:
            assert [g.version for g in w.got] == list(range(len(w.got))), "all results, in their order"
            ages |= {age for g in w.got for age in g.contributors.values()}
            applied = total((g.value for g in w.got), world.slots).numbers
            assert applied == [0.0 if slot in lost else 1.0 / len(steps) for slot in range(world.slots)]
        if good_for == math.inf:
            assert not lost
    assert max(ages) < good_for
    assert max(ages) == (min(good_for - 1, 2) if steps[1] else 0)


def test_in_all_orders_only_fresh_gradients_are_what_dropping_all_late_ones_leaves() -> None:
    def outcomes(rules: Rules) -> set[Any]:
        """What is lost, and what each round comes to."""
        return {
            tuple((tuple(w.seat.lost), tuple(tuple(numbers(g.value)) for g in w.got)) for w in world.workers)
            for world in endings(rules, (2, 1))
        }

    def numbers(x: Vec) -> list[float]:
        assert isinstance(x, Slots)
        return x.numbers

    assert outcomes(Rules(waiting.first, "drop", good_for=1)) == outcomes(Rules(waiting.first, "drop"))


def test_in_all_orders_who_is_in_time_goes_on_with_the_result_of_its_round() -> None:
    for world in endings(GRADIENTS["everyone"], (2, 2)):
        for w in world.workers:
            assert [(g.version, g.fresh, dict(g.contributors)) for g in w.got] == [
                (0, True, {0: 0, 1: 0}),
                (1, True, {0: 0, 1: 0}),
            ]
