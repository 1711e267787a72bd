"""Whoever takes which batch, dies or comes again, in whatever order: every batch counts once, or is left and named."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from offbeat.rounds import leases
from offbeat.rounds.leases import Dealer, Dealt, Taker


@dataclass
class Asked:
    """One worker's questions about one epoch, counted."""

    dealer: Dealer
    rank: int
    epoch: int
    batches: int
    questions: int = 0

    def open(self) -> Dealt:
        self.questions += 1
        return self.dealer.open(self.rank, self.epoch, self.batches)

    def begin(self, place: int, batch_us: int) -> Dealt:
        self.questions += 1
        return self.dealer.begin(self.rank, self.epoch, place, batch_us)

    def take(self, batch_us: int, backlog: int) -> Dealt:
        self.questions += 1
        return self.dealer.take(self.rank, self.epoch, batch_us, backlog)


@dataclass
class Worker:
    """One that loads ``ahead`` batches before it begins one, and hands in after every ``period`` steps.

    It does one thing a turn. ``leaves_after``: so many batches, with one more in its hands.
    """

    dealer: Dealer
    rank: int
    batches: int
    batch_us: int = 1000
    ahead: int = 0
    period: int = 1
    leaves_after: int | None = None
    epoch: int = 0
    counted: list[int] = field(default_factory=list)
    done: int = 0
    is_over: bool = False
    waits: bool = False

    def __post_init__(self) -> None:
        self.asked = Asked(self.dealer, self.rank, self.epoch, self.batches)
        self.turns = self._work()

    def turn(self) -> None:
        """Nothing happens in the turn of one that waits."""
        if not self.is_over and not self.waits and next(self.turns, None) is None:
            self.is_over = True

    def told(self, dealt: Dealt) -> None:
        """What it has waited for."""
        self.waits = False
        self.taker.give(dealt)

    def _work(self) -> Iterator[str]:
        self.taker = Taker(self.rank, self.dealer.workers, self.asked)
        loaded, stepped, more = list[int](), list[int](), True
        yield "open"
        while True:
            while more and len(loaded) <= self.ahead:
                batch = self.taker.fetch(self.batch_us, len(loaded))
                more = batch is not None
                if batch is not None:
                    loaded.append(batch)
            if not loaded and stepped:
                yield from self._hand_in(stepped)
            elif not loaded:
                if self.taker.is_over:
                    return
                self.dealer.wait(self.rank, self.epoch, self.batch_us)
                self.waits = True
                yield "wait"
                more = not self.taker.is_over
            elif self.taker.begin(batch := loaded.pop(0), self.batch_us):
                yield "begin"
                if self.done == self.leaves_after:
                    yield from self._hand_in(stepped)
                    self.dealer.close(self.rank, self.epoch)
                    return
                self.dealer.step(self.rank, self.epoch, [batch], [], 1)
                self.done += 1
                stepped.append(batch)
                yield "step"
                if len(stepped) == self.period:
                    yield from self._hand_in(stepped)

    def _hand_in(self, stepped: list[int]) -> Iterator[str]:
        self.dealer.hands_over(self.rank)
        yield "hands over"
        self.dealer.handed_in(self.rank)
        self.counted += stepped
        stepped.clear()
        yield "handed in"

    def die(self) -> None:
        self.dealer.die(self.rank)
        self.is_over, self.waits = True, False


def tell(dealer: Dealer, workers: list[Worker]) -> None:
    for rank, dealt in dealer.awaited():
        next(one for one in workers if one.rank == rank and not one.is_over).told(dealt)


def run(workers: list[Worker], order: Iterator[int]) -> None:
    """Let them take turns: ``order`` says whose is next, among those who have one."""
    dealer = workers[0].dealer
    while able := [one for one in workers if not one.is_over and not one.waits]:
        able[next(order) % len(able)].turn()
        tell(dealer, workers)
    assert not any(one.waits for one in workers)


def left(dealer: Dealer, epoch: int = 0) -> list[int]:
    (account,) = (one for one in dealer.accounts() if one.number == epoch)
    return [place for first, end in account.left for place in range(first, end)]


def orders(make: object, most: int) -> int:
    """Run every order in which two take turns, depth first, until ``most`` were seen; answers how many there were."""
    prefix = list[int]()
    for seen in itertools.count(1):
        taken = list[int]()
        make(_following(prefix, taken))  # type: ignore[operator]
        while taken and taken[-1] == 1:
            taken.pop()
        if not taken or seen == most:
            return seen
        prefix = [*taken[:-1], 1]
    raise AssertionError


def _following(prefix: list[int], taken: list[int]) -> Iterator[int]:
    """The choices of ``prefix``, and then always the first; ``taken`` hears of each."""
    for step in itertools.count():
        taken.append(prefix[step] if step < len(prefix) else 0)
        yield taken[-1]


@pytest.mark.parametrize(("batches", "ahead", "leaves"), [(2, 0, None), (3, 1, None), (3, 0, 1), (2, 1, 0)])
def test_two_workers_use_every_batch_once_in_every_order(batches: int, ahead: int, leaves: int | None) -> None:
    def one(order: Iterator[int]) -> None:
        dealer = Dealer(2)
        workers = [
            Worker(dealer, 0, batches, 1000, ahead),
            Worker(dealer, 1, batches, 4000, ahead, leaves_after=leaves),
        ]
        run(workers, order)
        assert sorted(workers[0].counted + workers[1].counted) == list(range(batches))

    assert orders(one, most=1000) > 50


@pytest.mark.parametrize("dies_at", range(12))
@pytest.mark.parametrize("period", [1, 2])
def test_what_a_dead_worker_had_not_handed_in_is_used_by_the_other_in_every_order(dies_at: int, period: int) -> None:
    """Wherever it dies: before it has asked, with batches in its hands, between handing over and having handed in."""

    def one(order: Iterator[int]) -> None:
        dealer = Dealer(2)
        dying, other = workers = [Worker(dealer, rank, 4, period=period) for rank in range(2)]
        turns = 0

        def watched() -> Iterator[int]:
            nonlocal turns
            for choice in order:
                able = [one for one in workers if not one.is_over and not one.waits]
                if able[choice % len(able)] is dying:
                    turns += 1
                if turns > dies_at and not dying.is_over:
                    dying.die()
                    tell(dealer, workers)
                    choice = 0
                yield choice

        run(workers, watched())
        assert sorted(dying.counted + other.counted) == list(range(4))
        assert left(dealer) == []

    orders(one, most=100)


@pytest.mark.parametrize("seed", range(200))
def test_any_workers_use_every_batch_once_through_deaths_and_returns_in_random_orders(seed: int) -> None:
    rng = random.Random(seed)
    size, batches = rng.randint(1, 6), rng.randint(1, 60)
    dealer, lives = Dealer(size), list[Worker]()

    def alive(rank: int, leaves: int | None) -> Worker:
        batch_us, ahead, period = rng.choice([500, 1000, 4000]), rng.randint(0, 5), rng.choice([1, 1, 2, 5])
        return Worker(dealer, rank, batches, batch_us, ahead, period, leaves)

    lives += [alive(rank, rng.choice([None, None, rng.randint(0, 8)])) for rank in range(size)]
    deaths = rng.randint(0, 6)
    stays = rng.randrange(size)
    lives[stays].leaves_after = None
    while able := [one for one in lives if not one.is_over and not one.waits]:
        one = rng.choice(able)
        one.turn()
        if deaths and rng.random() < 0.05 and one.rank != stays and not one.is_over:
            deaths -= 1
            one.die()
            if rng.random() < 0.7:
                lives.append(alive(one.rank, None))
        tell(dealer, lives)
        counted = [batch for one in lives for batch in one.counted]
        assert len(counted) == len(set(counted))
        assert not set(counted) & set(left(dealer) if any(one.asked.questions for one in lives) else [])
    assert sorted(batch for one in lives for batch in one.counted) == list(range(batches))


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("leaves", [0, 1, 9, 104, 120])
def test_what_a_worker_leaves_is_taken_by_those_who_are_there(ahead: int, leaves: int) -> None:
    """Also what it had taken from them, and the last one of its home."""
    dealer = Dealer(2)
    leaving = Worker(dealer, 1, 200, 1000, ahead, leaves_after=leaves)
    staying = Worker(dealer, 0, 200, 1000, ahead)
    run([leaving, staying], itertools.repeat(0))  # one after the other
    assert sorted(leaving.counted + staying.counted) == list(range(200))
    assert left(dealer) == []


def test_the_batches_of_a_worker_that_never_comes_are_used_by_those_who_do() -> None:
    dealer = Dealer(3)
    run([Worker(dealer, 1, 20)], itertools.repeat(0))
    assert left(dealer) == []


def test_a_batch_that_was_begun_is_left_until_a_step_is_taken_with_it() -> None:
    dealer = Dealer(2)
    taker = Taker(0, 2, Asked(dealer, 0, 0, 4))
    place = taker.fetch(1000, 0)
    assert place == 0
    assert taker.begin(place, 1000)
    assert left(dealer) == [0, 1, 2, 3]
    dealer.step(0, 0, [0], [], 1)
    assert left(dealer) == [1, 2, 3]


def test_what_was_stepped_with_and_not_handed_in_dies_with_its_worker_and_what_was_handed_in_stays() -> None:
    dealer = Dealer(2)
    taker = Taker(0, 2, Asked(dealer, 0, 0, 8))
    for _ in range(3):
        place = taker.fetch(1000, 0)
        assert place is not None
        assert taker.begin(place, 1000)
        dealer.step(0, 0, [place], [], 1)
        if place == 2:
            dealer.hands_over(0)
            dealer.handed_in(0)
    dealer.hands_over(0)  # and dies before it has
    dealer.die(0)
    assert left(dealer) == [1, 3, 4, 5, 6, 7]


def test_a_batch_that_was_passed_over_is_told_of_and_not_given_to_others() -> None:
    dealer = Dealer(1)
    taker = Taker(0, 1, Asked(dealer, 0, 0, 3))
    for _ in range(3):
        assert taker.begin(taker.fetch(1000, 0) or 0, 1000)
    dealer.step(0, 0, [0], [1], 1)
    dealer.step(0, 0, [2], [], 1)
    dealer.die(0)
    (account,) = dealer.accounts()
    assert (account.left, account.skipped) == ([(0, 1), (2, 3)], [(1, 2)])


def test_a_worker_that_comes_again_has_no_home_in_that_epoch_and_one_in_the_next() -> None:
    dealer = Dealer(2)
    dealer.open(0, 0, 40)
    dealer.open(1, 0, 40)
    dealer.die(1)
    again = dealer.open(1, 0, 40)
    assert again.front == again.back
    assert dealer.take(1, 0, 1000, 0).taken
    assert dealer.open(1, 1, 40).back == 20


def test_those_who_wait_hold_up_nobody_with_what_they_have_in_hand() -> None:
    """As trainers that look a batch ahead have, all at once."""
    dealer = Dealer(2)
    for rank in range(2):
        taker = Taker(rank, 2, Asked(dealer, rank, 0, 2))
        assert taker.begin(taker.fetch(1000, 0) or 0, 1000)
    dealer.wait(0, 0, 1000)
    assert dealer.awaited() == []
    dealer.wait(1, 0, 1000)
    assert [(rank, dealt.is_over) for rank, dealt in dealer.awaited()] == [(0, True), (1, True)]


def in_turns(workers: list[Worker], turns: Iterator[int]) -> None:
    """``turns``: who uses a batch next, or looks for one and goes."""
    while any(not one.is_over for one in workers):
        worker = workers[next(turns)]
        done = worker.done
        while not worker.is_over and not worker.waits and worker.done == done:
            worker.turn()
            tell(worker.dealer, workers)


def of_a_dealer(size: int, batches: int, us: list[int] | None = None, ahead: int = 0) -> list[Worker]:
    dealer = Dealer(size)
    return [Worker(dealer, rank, batches, us[rank] if us else 1000, ahead) for rank in range(size)]


def test_a_worker_that_is_a_batch_ahead_takes_nothing_from_its_equals() -> None:
    workers = of_a_dealer(2, 20)
    in_turns(workers, itertools.chain([0], itertools.cycle([0, 1])))
    assert [worker.counted for worker in workers] == [list(range(rank, 20, 2)) for rank in range(2)]


def test_equal_workers_take_what_fixed_shares_would_give_them() -> None:
    """In turns of a whole batch each, nobody takes from anybody, and the order is that of the shares."""
    workers = of_a_dealer(3, 31)
    in_turns(workers, itertools.cycle(range(3)))
    assert [worker.counted for worker in workers] == [list(range(rank, 31, 3)) for rank in range(3)]


@pytest.mark.parametrize("slow", [2, 4, 10])
@pytest.mark.parametrize("ahead", [0, 8])
def test_unequal_workers_are_done_at_about_the_same_time(slow: int, ahead: int) -> None:
    """In virtual time: the job ends when one worker of their summed speed would, within two batches of the slow one."""
    us, batches = [1000, 1000, 1000 * slow], 1000
    workers = of_a_dealer(3, batches, us, ahead)
    busy = [0, 0, 0]

    def turns() -> Iterator[int]:
        while True:
            number = min(range(3), key=lambda one: busy[one])
            done = workers[number].done
            yield number
            busy[number] += us[number] if workers[number].done > done else 10**12  # it has gone

    in_turns(workers, turns())
    ideal = batches / sum(1 / one for one in us)
    assert sum(len(worker.counted) for worker in workers) == batches
    assert max(time % 10**12 for time in busy) <= ideal + 2 * us[2] + ahead * us[0]


def test_a_worker_begins_many_batches_with_one_question_far_from_the_end() -> None:
    worker, _ = of_a_dealer(2, 2000)
    while worker.done < 700:
        worker.turn()
    assert worker.asked.questions < 700 / leases.BLOCK + 10
