"""What a hub keeps as places in memory: every deposit is in one sum, and no slot is given away while it is needed."""

from __future__ import annotations

import marshal
import random
from typing import Any

import pytest

from offbeat.live.partial.desk import Desk
from offbeat.live.partial.stacks import DEPOSITS, Slots
from offbeat.live.transport.hub import Frame, Word
from offbeat.rounds import waiting
from offbeat.rounds.rules import Rules
from offbeat.topology import everyone, groups
from offbeat.topology.hierarchy import Nodes

SIZE, SLOTS = 3, DEPOSITS + 12


Memory = dict[tuple[int, int], float]


class Worker:
    """Does what a worker does with what it is told, one number a vector; memory is a dictionary that all share.

    It adds up its sums as soon as it is told of them, and reads its results, and lays down more, when its turn comes.
    """

    def __init__(self, rank: int, memory: Memory, steps: int, first: float | None) -> None:
        self.rank, self.memory, self.left = rank, memory, steps
        self.busy: set[int] = set()
        self.given = self.applied = 0.0
        self.step, self.state = 0, "computes"
        self.inbox: list[Any] = []
        self.open = Frame(Word.OPEN, rank, -1 if first is None else self.put(first), 0, 0)
        self.x = first

    def put(self, number: float) -> int:
        slot = min(set(range(DEPOSITS)) - self.busy)
        self.busy.add(slot)
        self.memory[self.rank, slot] = number
        return slot

    def told(self, answer: Any) -> None:
        for home, _, complete, _, _, divisor, terms in (sums := answer[2]):
            if not complete:
                values = [self.read(term, sums) for term in terms]
                self.memory[tuple(home)] = sum(values) / divisor
        self.inbox.append(answer)

    def hears(self) -> tuple[str, list[float]]:
        how, _, sums, results, free_then, freed, _, _ = self.inbox.pop(0)
        numbers = [self.read(refs, sums) for refs, _ in results]
        self.busy -= {*freed, *(slot for _, slot in free_then)}
        for number in numbers:
            self.applied, self.x = self.applied + number, number
        return how, numbers

    def read(self, refs: Any, sums: Any) -> float:
        return sum(f * self.memory[tuple(sums[slot][0]) if member < 0 else (member, slot)] for member, slot, f in refs)


def run(rules: Rules, seed: int, weights: bool) -> list[Worker]:
    """Three workers in a drawn order until all have finished; the desk hears one word after the other."""
    draw, nodes = random.Random(seed), Nodes(SIZE)
    whom = groups(SIZE, 2) if weights else everyone(SIZE)
    slots = Slots(SIZE, SLOTS, small=False, shares=bool(seed % 2))
    desk, memory = Desk(rules, whom, nodes, 0, 0, slots), Memory()
    workers = [Worker(rank, memory, draw.randint(3, 12), 0.0 if weights else None) for rank in range(SIZE)]

    def say(word: Word, worker: Worker, a: int = 0, b: int = 0) -> None:
        for to, letter in desk.hear(Frame(word, worker.rank, a, b, data=b"\1" * 64)):
            if to is not None and to < SIZE and letter.word is Word.ANSWER:
                workers[to].told(marshal.loads(letter.data))

    for worker in workers:
        assert not list(desk.hear(worker.open))
    while any(worker.state != "is done" for worker in workers):
        worker = draw.choice([w for w in workers if w.state != "is done" and (w.state == "computes" or w.inbox)])
        if worker.state == "computes" and worker.left:
            number = float(draw.randint(1, 1000))
            worker.given += number
            worker.state = "waits"
            say(Word.OFFER, worker, worker.put(number), worker.step)
            worker.step, worker.left = worker.step + 1, worker.left - 1
        elif worker.state == "computes":
            worker.state = "finishes"
            say(Word.FINISHED, worker)
        else:
            how, _ = worker.hears()
            if worker.state == "waits":
                worker.state = "computes"
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


@pytest.mark.parametrize("late", [0, 1])
def test_what_is_added_to_shared_weights_is_never_lost(late: int) -> None:
    for seed in range(150):
        workers = run(Rules(waiting.first, "shared", late=late, full_every=None), seed, weights=True)
        held = sum(w.x for w in workers if w.x is not None)
        assert held == pytest.approx(sum(w.given for w in workers)), seed
