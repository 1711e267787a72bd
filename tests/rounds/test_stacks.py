"""What a hub keeps as places in memory: every deposit is in one sum, and no slot is given away while it is needed."""

from __future__ import annotations

import marshal
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from offbeat.live.partial.desk import Desk
from offbeat.live.partial.stacks import DEPOSITS, READS, SEEN, Slots
from offbeat.live.transport.hub import Frame, Word
from offbeat.rounds import waiting
from offbeat.rounds.rules import CatchUp, Rules
from offbeat.topology import everyone, groups
from offbeat.topology.hierarchy import Nodes

SIZE, SLOTS = 3, DEPOSITS + 60


Memory = dict[tuple[int, int], float]
Flags = dict[tuple[int, int], int]  # of a sum's place, the number of the last that was there


class Worker:
    """Does what a worker does with what it is told, one number a vector; memory is a dictionary that all share.

    It adds up its sums as soon as it is told of them, and reads its results, and lays down more, when its turn comes.
    """

    def __init__(
        self, rank: int, memory: Memory, flags: Flags, steps: int, first: float | None, looks_ahead: bool
    ) -> None:
        self.rank, self.memory, self.flags, self.left = rank, memory, flags, steps
        self.busy: set[int] = set()
        self.given = self.applied = self.handed_in = 0.0
        self.step, self.state = 0, "computes"
        self.inbox: list[Any] = []
        self.looks_ahead, self.needs, self.hinted, self.taken = looks_ahead, False, False, list[Any]()
        self.open = Frame(Word.OPEN, rank, -1 if first is None else self.put(first), 0, 0)
        self.x = first

    def put(self, number: float) -> int:
        slot = min(set(range(DEPOSITS)) - self.busy)
        self.busy.add(slot)
        self.memory[self.rank, slot] = number
        return slot

    def told(self, answer: Any) -> None:
        for home, number, complete, _, _, divisor, terms in (sums := answer[2]):
            if not complete and self.flags.get(tuple(home), -1) < number:  # else it is there, made by another
                values = [self.read(term, sums) for term in terms]
                self.memory[tuple(home)], self.flags[tuple(home)] = sum(values) / divisor, number
        if answer[0] == "hint":
            self.hinted = True
            return
        self.inbox.append(answer)
        self.needs = self.needs and answer[0] != "needed"
        if self.looks_ahead:  # its slots are known to be free as soon as it is told
            self.busy -= {*answer[5], *(slot for _, slot in answer[4])}

    def hears(self, plus: float = 0.0) -> tuple[str, list[float]]:
        how, _, sums, results, free_then, freed, _, _ = answer = self.inbox.pop(0)
        numbers = [self.read(refs, sums) + plus for refs, _ in results]
        if not self.looks_ahead:
            self.busy -= {*freed, *(slot for _, slot in free_then)}
        for number in numbers:
            self.applied, self.x = self.applied + number, number
        self.taken.append(answer)
        return how, numbers

    def read(self, refs: Any, sums: Any) -> float:
        return sum(f * self.memory[tuple(sums[slot][0]) if member < 0 else (member, slot)] for member, slot, f in refs)


def results_of(answer: Any) -> set[int]:
    """The sums that are results themselves: of the others nothing is said a second time."""
    return {k for refs, _ in answer[3] for member, k, _ in refs if member < 0}


def run(rules: Rules, seed: int, weights: bool, looks_ahead: bool = False, size: int = SIZE) -> list[Worker]:
    """Workers in a drawn order until all have finished; the desk hears one word after the other.

    Some come more often than others, who sleep through many rounds.
    """
    draw, nodes = random.Random(seed), Nodes(size)
    whom = groups(size, 2) if weights else everyone(size)
    slots = Slots(size, SLOTS, small=False, shares=bool(seed % 2))
    desk, memory, flags = Desk(rules, whom, nodes, 0, 0, slots), Memory(), Flags()
    first = 0.0 if weights else None
    workers = [Worker(rank, memory, flags, draw.randint(3, 12), first, looks_ahead) for rank in range(size)]
    often = [draw.choice([1, 1, 20]) for _ in range(size)]

    def say(word: Word, worker: Worker, a: int = 0, b: int = 0, c: int = -1, said: bytes = b"\1" * 64) -> None:
        for to, letter in desk.hear(Frame(word, worker.rank, a, b, c, data=said)):
            if to is not None and to < size and letter.word is Word.ANSWER:
                workers[to].told(marshal.loads(letter.data))

    def hand_in(worker: Worker, number: float) -> None:
        """Take what was needed, and of what came since as much as is there by then."""
        read, worker.taken = worker.taken, []
        needed = max((k for k, answer in enumerate(worker.inbox) if answer[0] == "needed"), default=-1)
        for _ in range(draw.randint(needed + 1, len(worker.inbox))):
            worker.hears(plus=number if weights else 0.0)
        if worker.hinted:
            worker.hinted = False
            say(Word.NEWEST, worker)
            worker.hears(plus=number)
        if weights and not any(answer[3] for answer in worker.taken):
            assert worker.x is not None
            worker.x += number
        worker.needs = True
        count = sum(len(answer[3]) for answer in worker.taken)
        said = [SEEN for answer in read for _ in results_of(answer)]
        about = [answer[2][k][1] for answer in read for k in sorted(results_of(answer))]
        for answer in worker.taken:
            said += [SEEN | READS * (k in results_of(answer)) for k in range(len(answer[2]))]
            about += [one[1] for one in answer[2]]
        assert [one.number for one in desk._chairs[worker.rank].lent][: len(said)] == about, "both mean the same sums"
        say(Word.OFFER, worker, worker.put(number), worker.step, count, bytes(said))

    def finish(worker: Worker) -> None:
        worker.state = "finishes"
        if worker.looks_ahead:
            say(Word.NOTHING, worker)
            assert worker.inbox[-1][0] == "nothing"
            worker.looks_ahead, worker.inbox, worker.needs, worker.hinted = False, [], False, False
        say(Word.FINISHED, worker)

    for worker in workers:
        assert not list(desk.hear(worker.open))
    while any(worker.state != "is done" for worker in workers):
        able = [w for w in workers if w.state != "is done" and (w.inbox or w.state == "computes")]
        able = [w for w in able if not (w.state == "computes" and w.left and w.needs)]
        (worker,) = draw.choices(able, [often[w.rank] for w in able])
        if worker.state == "computes" and worker.left:
            number = float(draw.randint(1, 1000))
            worker.given += number
            if looks_ahead:
                hand_in(worker, number)
            else:
                worker.state, worker.handed_in = "waits", number
                say(Word.OFFER, worker, worker.put(number), worker.step)
            worker.step, worker.left = worker.step + 1, worker.left - 1
        elif worker.state == "computes":
            finish(worker)
        else:
            how, numbers = worker.hears()
            if worker.state == "waits":
                worker.state = "computes"
                if worker.x is not None and not numbers:  # what it gets later has that in it
                    worker.x += worker.handed_in
            else:
                worker.state = "is done" if how == "over" else "rests"
                if how != "over":
                    say(Word.NEXT, worker)
    return workers


RULES = {
    "first": Rules(waiting.first, "carry"),
    "late": Rules(waiting.first, "carry", late=1),
    "two": Rules(waiting.at_least(2), "carry"),
    "full": Rules(waiting.first, "carry", full_every=3),
    "bounded": Rules(waiting.first, "carry", bound=2),
    "every step": Rules(waiting.first, "carry", catch_up="every_step"),
}


@pytest.mark.parametrize("name", RULES)
def test_every_gradient_is_in_one_sum_and_all_workers_apply_the_same(name: str) -> None:
    for seed in range(150):
        workers = run(RULES[name], seed, weights=False)
        given = sum(w.given for w in workers)
        assert all(w.applied * SIZE == pytest.approx(given) for w in workers), seed


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("late", [0, 1])
def test_what_is_added_to_shared_weights_is_never_lost(late: int, size: int) -> None:
    for seed in range(150):
        workers = run(Rules(waiting.first, "shared", late=late, full_every=None), seed, weights=True, size=size)
        held = sum(w.x for w in workers if w.x is not None)
        assert held == pytest.approx(sum(w.given for w in workers)), seed


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize(("late", "looks_ahead"), [(0, False), (1, False), (1, True)])
def test_what_is_added_to_weights_that_meet_as_they_come_is_never_lost(late: int, looks_ahead: bool, size: int) -> None:
    rules = Rules(waiting.first, "shared", late=late, good_for=math.inf, pool=2)
    for seed in range(100):
        workers = run(rules, seed, weights=True, looks_ahead=looks_ahead, size=size)
        held = sum(w.x for w in workers if w.x is not None)
        assert held == pytest.approx(sum(w.given for w in workers)), seed


@pytest.mark.parametrize("name", RULES)
def test_a_worker_that_looks_ahead_applies_every_gradient_once_however_much_it_takes_at_a_time(name: str) -> None:
    for seed in range(150):
        workers = run(replace(RULES[name], late=1), seed, weights=False, looks_ahead=True)
        given = sum(w.given for w in workers)
        assert all(w.applied * SIZE == pytest.approx(given) for w in workers), seed


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("catch_up", ["current", "every_step"])
@pytest.mark.parametrize("full_every", [None, 3])
def test_a_worker_that_looks_ahead_adds_its_steps_to_weights_that_have_all_the_others(
    full_every: int | None, catch_up: CatchUp, size: int
) -> None:
    rules = Rules(waiting.first, "shared", late=1, full_every=full_every, catch_up=catch_up)
    for seed in range(100):
        workers = run(rules, seed, weights=True, looks_ahead=True, size=size)
        held = sum(w.x for w in workers if w.x is not None)
        assert held == pytest.approx(sum(w.given for w in workers)), seed
