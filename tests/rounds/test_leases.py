"""Whoever takes which batch, in whatever order the words are written: every batch is used once, or left and named."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from offbeat.rounds import leases
from offbeat.rounds.leases import Epoch, Home, Op, Put, Read, Swap

Ops = Generator[Op, list[str], None]


@dataclass
class Store:
    """What the job's store does, one request at a time."""

    words: dict[str, str] = field(default_factory=dict)

    def answer(self, op: Op) -> list[str]:
        match op:
            case Put(key, text):
                self.words[key] = text
                return []
            case Swap(key, old, new):
                if self.words.get(key, "") == old:
                    self.words[key] = new
                return [self.words[key]]
            case Read(keys, first):
                return [self.words.setdefault(key, text) for key, text in zip(keys, first, strict=True)]


@dataclass
class Worker:
    """One that loads ``ahead`` batches before it begins one, and may leave after so many."""

    epoch: Epoch
    batch_us: int = 1000
    ahead: int = 0
    leaves_after: int | None = None
    used: list[int] = field(default_factory=list)

    def work(self) -> Ops:
        loaded: list[int] = []
        while True:
            while len(loaded) <= self.ahead:
                batch = yield from self.epoch.fetch(self.batch_us, len(loaded))
                if batch is None:
                    break
                loaded.append(batch)
            if not loaded:
                yield from self.epoch.tell()
                return
            batch = loaded.pop(0)
            if not (yield from self.epoch.begin(batch, self.batch_us)):
                continue
            if len(self.used) == self.leaves_after:
                yield from self.epoch.give_back([batch], loaded)
                return
            self.used.append(batch)
            yield Read((), ())  # the step takes its time
            self.epoch.resolve(batch)


def run(workers: list[Worker], order: Iterator[int], look: Callable[[Store], object] = lambda store: None) -> Store:
    """Let them take turns: ``order`` says whose request is answered next, among those who have one.

    ``look`` sees the store after every one.
    """
    store = Store()
    asking: dict[int, tuple[Ops, Op]] = {}
    for number, worker in enumerate(workers):
        ops = worker.work()
        asking[number] = ops, next(ops)
    while asking:
        number = sorted(asking)[next(order) % len(asking)]
        ops, op = asking[number]
        try:
            asking[number] = ops, ops.send(store.answer(op))
        except StopIteration:
            del asking[number]
        look(store)
    return store


def left(store: Store, size: int, batches: range) -> list[int]:
    request = Epoch(0, size, batches).left()
    with pytest.raises(StopIteration) as end:
        request.send(store.answer(next(request)))
    return list(end.value.value)


def orders(make: Callable[[Iterator[int]], object], most: int) -> int:
    """Run every order in which two take turns, depth first, until ``most`` were seen; answers how many there were."""
    prefix = list[int]()
    for seen in itertools.count(1):
        taken = list[int]()
        make(_following(prefix, taken))
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
        workers = [
            Worker(Epoch(0, 2, range(batches)), 1000, ahead),
            Worker(Epoch(1, 2, range(batches)), 4000, ahead, leaves),
        ]
        store = run(workers, order)
        used = workers[0].used + workers[1].used
        assert len(used) == len(set(used))
        # Only what was given back after the other had gone is left, and it is named.
        assert sorted(used + left(store, 2, range(batches))) == list(range(batches))
        if leaves is None:
            assert len(used) == batches

    assert orders(one, most=4000) > 100


@pytest.mark.parametrize("seed", range(40))
def test_any_number_of_workers_uses_every_batch_once_in_random_orders(seed: int) -> None:
    rng = random.Random(seed)
    size, batches = rng.randint(1, 6), rng.randint(1, 60)
    workers = [
        Worker(
            Epoch(rank, size, range(batches)),
            rng.choice([500, 1000, 4000]),
            rng.randint(0, 5),
            rng.choice([None, None, rng.randint(0, 8)]),
        )
        for rank in range(size)
    ]

    def nothing_is_nowhere(store: Store) -> None:
        """Whoever reads the place of all, at any moment, finds every batch that was not used."""
        used = {batch for worker in workers for batch in worker.used}
        assert used.union(left(store, size, range(batches))) == set(range(batches))

    store = run(workers, iter(lambda: rng.randrange(720720), -1), nothing_is_nowhere)
    used = [batch for worker in workers for batch in worker.used]
    assert sorted(used + left(store, size, range(batches))) == list(range(batches))


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("leaves", [0, 1, 9, 104, 120])
def test_what_a_worker_leaves_is_taken_by_those_who_are_there(ahead: int, leaves: int) -> None:
    """Also what it had taken from them, and the last one of its home."""
    size, batches = 2, 200
    leaving = Worker(Epoch(1, size, range(batches)), 1000, ahead, leaves)
    staying = Worker(Epoch(0, size, range(batches)), 1000, ahead)
    store = run([leaving, staying], itertools.repeat(0))  # one after the other
    assert sorted(leaving.used + staying.used) == list(range(batches))
    assert left(store, size, range(batches)) == []


def test_a_batch_that_was_begun_is_left_until_it_is_used() -> None:
    worker = Epoch(0, 2, range(4))

    def begin() -> Ops:
        assert (yield from worker.fetch(1000, 0)) == 0
        assert (yield from worker.begin(0, 1000))

    store = Store()
    _answered(store, begin())
    assert left(store, 2, range(4)) == [0, 1, 2, 3]
    worker.resolve(0)
    _answered(store, worker.tell())
    assert left(store, 2, range(4)) == [1, 2, 3]


def _answered(store: Store, ops: Ops) -> None:
    answer: Any = None
    with contextlib.suppress(StopIteration):
        while True:
            answer = store.answer(ops.send(answer))


def in_turns(workers: list[Worker], turns: Iterator[int]) -> None:
    """``turns``: who uses a batch next, or looks for one and goes."""
    store, asking = Store(), {number: worker.work() for number, worker in enumerate(workers)}
    answers: dict[int, Any] = dict.fromkeys(asking)
    while asking:
        if (number := next(turns)) in asking:
            done = len(workers[number].used)
            try:
                while len(workers[number].used) == done:
                    answers[number] = store.answer(asking[number].send(answers[number]))
            except StopIteration:
                del asking[number]


def test_a_worker_that_is_a_batch_ahead_takes_nothing_from_its_equals() -> None:
    workers = [Worker(Epoch(rank, 2, range(20))) for rank in range(2)]
    in_turns(workers, itertools.chain([0], itertools.cycle([0, 1])))
    assert [worker.used for worker in workers] == [list(range(rank, 20, 2)) for rank in range(2)]


def test_equal_workers_take_what_fixed_shares_would_give_them() -> None:
    """In turns of a whole batch each, nobody takes from anybody, and the order is that of the shares."""
    workers = [Worker(Epoch(rank, 3, range(31))) for rank in range(3)]
    in_turns(workers, itertools.cycle(range(3)))
    assert [worker.used for worker in workers] == [list(range(rank, 31, 3)) for rank in range(3)]


@pytest.mark.parametrize("slow", [2, 4, 10])
@pytest.mark.parametrize("ahead", [0, 8])
def test_unequal_workers_are_done_at_about_the_same_time(slow: int, ahead: int) -> None:
    """In virtual time: the job ends when one worker of their summed speed would, within two batches of the slow one."""
    us, batches = [1000, 1000, 1000 * slow], 1000
    workers = [Worker(Epoch(rank, 3, range(batches)), us[rank], ahead) for rank in range(3)]
    busy = [0, 0, 0]

    def turns() -> Iterator[int]:
        while True:
            number = min(range(3), key=lambda one: busy[one])
            done = len(workers[number].used)
            yield number
            busy[number] += us[number] if len(workers[number].used) > done else 10**12  # it has gone

    in_turns(workers, turns())
    ideal = batches / sum(1 / one for one in us)
    assert sum(len(worker.used) for worker in workers) == batches
    assert max(time % 10**12 for time in busy) <= ideal + 2 * us[2] + ahead * us[0]


def test_a_worker_begins_many_batches_with_one_request_far_from_the_end() -> None:
    worker, requests = Worker(Epoch(0, 2, range(2000))), 0
    store, ops, answer = Store(), worker.work(), None
    while len(worker.used) < 700:
        op = ops.send(answer)  # type: ignore[arg-type]
        answer, requests = store.answer(op), requests + (op != Read((), ()))
    assert requests < 700 / leases.BLOCK + 10


def test_a_home_is_written_and_read_back() -> None:
    assert Home.parse(str(Home(1, 2, 3, 4))) == Home(1, 2, 3, 4)
