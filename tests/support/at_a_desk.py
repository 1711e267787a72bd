"""A desk and its workers without processes: they do what they are told, one number a vector, in a drawn order."""

from __future__ import annotations

import marshal
import math
import random
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

from offbeat.live.partial.desk import Desk
from offbeat.live.partial.stacks import DEPOSITS, READS, SEEN, Home, Slots, number_of
from offbeat.live.transport.hub import Frame, Letter, Word
from offbeat.rounds.rules import Rules
from offbeat.topology import everyone, groups
from offbeat.topology.hierarchy import Nodes

SIZE, SLOTS = 3, DEPOSITS + 60

Memory = dict[tuple[int, int], Any]  # a number, or a replica: the results it holds
Flags = dict[tuple[int, int], int]  # of a sum's place, the number of the last that was there


class Worker:
    """Does what a worker does with what it is told, one number a vector; memory is a dictionary that all share.

    It adds up its sums as soon as it is told of them, and reads its results, and lays down more, when its turn comes.
    ``history`` is its replica: the results it has applied, in their order. ``pooled``: it has one slot of its own.
    """

    def __init__(
        self,
        rank: int,
        memory: Memory,
        flags: Flags,
        steps: int,
        first: float | None,
        looks_ahead: bool,
        pooled: bool = False,
    ) -> None:
        self.rank, self.memory, self.flags, self.left, self.pooled = rank, memory, flags, steps, pooled
        # Where many lie in a tray a worker adds them up; here it has room for them instead.
        self.free: set[Home] = {(rank, k) for k in ([0] if pooled else [*range(DEPOSITS), *range(SLOTS, 4 * SLOTS)])}
        self.given = self.handed_in = 0.0
        self.step, self.state = 0, "computes"
        self.letters, self.inbox = list[Any](), list[Any]()  # what was said to it; what it has heard
        self.should_be: dict[int, list[float]] = {}  # the results of an answer, when it was told
        self.lent: dict[int, list[int]] = {}  # sums of an answer that the hub keeps, if not all
        self.unread: list[tuple[Any, float]] = []  # answers that it has taken, and what is added to their results
        self.looks_ahead, self.needs, self.hinted, self.taken = looks_ahead, False, False, list[Any]()
        self.got = list[tuple[int, float]]()  # the rounds whose results it has taken, and these
        self.parts = list[tuple[int, int]]()  # of the rounds it has heard of: how many took part, and brought something
        self.open = Frame(Word.OPEN, rank, -1 if first is None else self.put(first, self.claim()), 0, 2)
        self.x = first
        self.history, self.taken_over = list[float](), 0
        self.asked: Any = None
        self.until_seen = list[tuple[Home, Home, int]]()  # its slots, and the sums that took them
        self.kept: Home | None = None  # a slot in which something of its own lies, until it lays down more there
        self.wants: tuple[Callable[[Home], None], set[Home]] | None = None  # a slot but none of these, and what for
        self.room: Home | None = None  # the slot that the hub has named
        self.is_told = self.asks_again = False  # of one; it has none that will do, and asks for one once more

    @property
    def applied(self) -> float:
        return sum(self.history)

    def claim(self, but_not: Collection[Home] = ()) -> Home:
        home = min(self.free.difference(but_not))
        self.free.discard(home)
        return home

    def put(self, number: float, home: Home) -> int:
        self.memory[home] = number
        return number_of(home)

    def look(self) -> None:
        """Slots are free when the sum that took them is there."""
        for one in list(self.until_seen):
            mine, home, number = one
            if self.flags.get(home, -1) >= number:
                self.until_seen.remove(one)
                self.free.add(mine)

    def listen(self) -> None:
        while self.letters:
            self.told(self.letters.pop(0))

    def told(self, answer: Any) -> None:
        assert self.free.isdisjoint(map(tuple, answer[6])), "what the hub has taken back nobody writes to"
        for home, number, complete, _, summers, divisor, terms in (sums := answer[2]):
            if not complete and self.flags.get(tuple(home), -1) < number:  # else it is there, made by another
                if summers == (self.rank,) and home[0] != self.rank:  # as on a GPU, where one adds for all
                    assert tuple(home) in self.memory, "a slot is memory only when its owner has written there"
                values = [self.read(term, sums) for term in terms]
                self.memory[tuple(home)], self.flags[tuple(home)] = sum(values) / divisor, number
        if answer[0] == "hint":
            self.hinted = True
            return
        if answer[0] == "spare" and self.looks_ahead:
            self.asked = answer
            return
        if answer[0] == "room":
            (room, mine), *_ = answer[1]
            self.until_seen += [(mine_too, home, number) for mine_too, home, number, _ in mine]
            self.free |= set(answer[5])
            self.look()
            self.room = None if room is None else tuple(room)
            assert self.wants is not None
            self.is_told = room is not None or bool(self.free.difference(self.wants[1]))
            self.asks_again = not self.is_told
            return
        self.should_be[id(answer)] = [self.read(refs, sums) for refs, said in answer[3] if len(said) > 2]
        self.inbox.append(answer)
        self.needs = self.needs and answer[0] != "needed"
        if self.looks_ahead:  # its slots are known to be free as soon as it is told
            self.free |= {*answer[5], *(home for _, home in answer[4])}

    def hears(self, plus: float = 0.0) -> tuple[str, list[float]]:
        how, _, _, _, free_then, freed, _, _, _ = answer = self.inbox.pop(0)
        if not self.looks_ahead:
            self.free |= {*freed, *(home for _, home in free_then)}
        self.taken.append(answer)
        return how, self.reads(answer, plus)

    def reads(self, answer: Any, plus: float = 0.0) -> list[float]:
        """Whoever looks ahead does so after it has handed in, when others may have gone on."""
        sums, results, numbers = answer[2], answer[3], list[float]()
        for refs, said in results:
            if len(said) == 2:  # a replica, which stands for all before it
                assert marshal.loads(said[1]) == "a replica"
                self.history = list(self.memory[tuple(sums[refs[0][1]][0])])
                self.taken_over += 1
                assert len(self.history) == said[0] + 1, "it holds as many results as it says"
            else:
                numbers.append(self.read(refs, sums) + plus)
                self.got.append((said[0], numbers[-1]))
                self.history.append(numbers[-1])
        should_be = [number + plus for number in self.should_be[id(answer)]]
        assert numbers == should_be, "nobody writes to what is being read"
        if numbers:
            self.x = numbers[-1]
        self.parts += [(said[3], len(said[4])) for _, said in results if len(said) > 2]
        return numbers

    def read(self, refs: Any, sums: Any) -> float:
        return sum(f * self.memory[tuple(sums[slot][0]) if member < 0 else (member, slot)] for member, slot, f in refs)


def own_in(answer: Any) -> set[Home]:
    """Deposits that its results stand on."""
    return {(member, slot) for refs, _ in answer[3] for member, slot, _ in refs if member >= 0}


def results_of(answer: Any) -> set[int]:
    """The sums that are results themselves: of the others nothing is said a second time."""
    return {k for refs, _ in answer[3] for member, k, _ in refs if member < 0}


class Watched(Desk):
    """A desk at which the mean of every round is written down, made of what each worker has handed in last."""

    newest: dict[int, float]
    means: dict[tuple[int, int], float]  # of a round and one of its members

    def _block(self, version: int, ranks: tuple[int, ...], started_by: int, flush: bool) -> None:
        super()._block(version, ranks, started_by, flush)
        for rank in ranks:
            self.means[version, rank] = sum(self.newest[r] for r in ranks) / len(ranks)


class Played(NamedTuple):
    """How it went: the workers at their end, and the most slots that sums and replicas took at any time.

    ``written_to``: how many slots of all kinds were ever used. ``means``: what each round should have come to for each
    member, where weights are answered for by the last ones.
    """

    workers: list[Worker]
    most_slots: int
    written_to: int
    means: dict[tuple[int, int], float]


def run(
    rules: Rules, seed: int, weights: bool, looks_ahead: bool = False, size: int = SIZE, pooled: bool = False
) -> list[Worker]:
    return play(rules, seed, weights, looks_ahead, size, pooled=pooled).workers


def play(
    rules: Rules,
    seed: int,
    weights: bool,
    looks_ahead: bool = False,
    size: int = SIZE,
    steps: tuple[int, int] = (3, 12),
    paces: tuple[int, ...] = (1, 1, 20),
    pooled: bool = False,
) -> Played:
    """Workers in a drawn order until all have finished; the desk hears one word after the other.

    Some come more often than others, who sleep through many rounds.
    """
    most = 0
    draw, nodes = random.Random(seed), Nodes(size)
    whom = groups(size, 2) if weights else everyone(size)
    # Who waits for a slot waits for words that come, or not at all; a stopped worker is somewhere between the two.
    grace_s = draw.choice([0.0, math.inf])
    slots = Slots(size, SLOTS, small=False, shares=bool(seed % 2), pooled=pooled, grace_s=grace_s)
    desk, memory, flags = Watched(rules, whom, nodes, 0, 0, slots), Memory(), Flags()
    desk.newest, desk.means = dict.fromkeys(range(size), 0.0), {}
    first = 0.0 if weights else None
    workers = [Worker(rank, memory, flags, draw.randint(*steps), first, looks_ahead, pooled) for rank in range(size)]
    often = [draw.choice(paces) for _ in range(size)]

    def deliver(letters: Iterable[Letter]) -> None:
        for to, letter in letters:
            if to is not None and to < size and letter.word is Word.ANSWER:
                workers[to].letters.append(marshal.loads(letter.data))
                if not (pooled and looks_ahead) or draw.random() < 0.7:  # else it is stopped before it has heard
                    workers[to].listen()

    def let_time_pass() -> None:
        """Until nobody waits for a slot any longer."""
        assert desk._rooms.waiting, "somebody can go on"
        desk._rooms._waiting = dict.fromkeys(desk._rooms.waiting, 0.0)
        deliver(desk.silence())

    def say(word: Word, worker: Worker, a: int = 0, b: int = 0, c: int = -1, said: bytes = b"\1" * 64) -> None:
        nonlocal most
        deliver(desk.hear(Frame(word, worker.rank, a, b, c, data=said)))
        most = max(most, size * (SLOTS - DEPOSITS) - sum(map(len, slots._new)) - len(slots._free))

    def claim(worker: Worker, but_not: Collection[Home], then: Callable[[Home], None]) -> None:
        """Go on with a slot, now or when the hub has named one."""
        worker.look()
        if not worker.free.difference(but_not):
            worker.wants = then, set(but_not)
            say(Word.ROOM, worker)
        else:
            then(worker.claim(but_not))

    def put(worker: Worker, number: float, then: Callable[[int], None], but_not: Collection[Home] = ()) -> None:
        if worker.kept is None:
            claim(worker, but_not, lambda home: then(worker.put(number, home)))
        else:
            home, worker.kept = worker.kept, None
            then(worker.put(number, home))

    def keep(worker: Worker) -> None:
        """Something of its own lies where it will hand in; nobody else reads that, nor does it read anything there."""

        def lay(home: Home) -> None:
            worker.kept, memory[home] = home, math.nan

        unread = [*worker.inbox, *(answer for answer, _ in worker.unread)]
        claim(worker, {home for answer in unread for home in own_in(answer)}, lay)

    def has_seen(worker: Worker) -> None:
        """What it was told of is there, and it will read that later."""
        said = bytes(SEEN | READS for answer in worker.taken for _ in results_of(answer))
        for answer in worker.inbox:
            lent = worker.lent.get(id(answer), range(len(answer[2])))
            said += bytes(SEEN | READS * (k in results_of(answer)) for k in lent)
            worker.lent[id(answer)] = sorted(results_of(answer))
        say(Word.READ, worker, said=said)

    def give_back(worker: Worker, stands_on: set[Home]) -> None:
        """As many of its slots as it likes, but for those of its own that what it is about to read stands on."""
        for home in sorted(worker.free - stands_on) if pooled else ():
            if draw.random() < 0.7:
                worker.free.discard(home)
                say(Word.GIVE, worker, number_of(home))

    def let_go(worker: Worker) -> None:
        """It computes, and says that it reads nothing; or does not come to say it."""
        if pooled and draw.random() < 0.5:
            said = bytes(SEEN for answer in worker.taken for _ in results_of(answer))
            worker.taken = []
            say(Word.READ, worker, said=said if looks_ahead else b"\1" * 64)
            give_back(worker, {home for answer in worker.inbox for home in own_in(answer)})

    def lay_replica(worker: Worker, asked: Any) -> None:
        home = tuple(asked[1][0][0])
        memory[home] = tuple(worker.history)
        say(Word.SPARE, worker, len(worker.history), 1, said=marshal.dumps("a replica"))

    def hand_in(worker: Worker, number: float) -> None:
        """Take what was needed, and of what came since as much as is there by then."""
        read, worker.taken = worker.taken, []
        plus = number if weights else 0.0
        if worker.asked is not None:
            asked, worker.asked = worker.asked, None
            lay_replica(worker, asked)
        needed = max((k for k, answer in enumerate(worker.inbox) if answer[0] == "needed"), default=-1)
        for _ in range(len(worker.inbox) if worker.hinted else draw.randint(needed + 1, len(worker.inbox))):
            worker.taken.append(worker.inbox.pop(0))
        if worker.hinted:
            worker.hinted = False
            say(Word.NEWEST, worker)
            worker.listen()
            worker.taken.append(worker.inbox.pop(0))
        if weights and not any(answer[3] for answer in worker.taken):
            assert worker.x is not None
            worker.x += number
        worker.needs = True
        count = sum(len(answer[3]) for answer in worker.taken)
        said = [SEEN for answer in read for _ in results_of(answer)]
        about = [answer[2][k][1] for answer in read for k in sorted(results_of(answer))]
        for answer in worker.taken:
            lent = worker.lent.pop(id(answer), range(len(answer[2])))
            said += [SEEN | READS * (k in results_of(answer)) for k in lent]
            about += [answer[2][k][1] for k in lent]
        loans = [loan.one for loan in desk._chairs[worker.rank].lent[: len(said)]]
        assert all(one is None or one.number == n for one, n in zip(loans, about, strict=True)), "both mean the same"
        # Of shared weights it takes the newest alone, which is read when it has handed in.
        newest = [answer for answer in worker.taken if answer[3]][-1:]
        step = worker.step

        def hand_over(place: int) -> None:
            worker.unread = [(answer, plus) for answer in (newest if weights else worker.taken)]
            say(Word.OFFER, worker, place, step, count, bytes(said))

        put(worker, number, hand_over, {home for answer in newest if weights for home in own_in(answer)})

    def offer(worker: Worker, step: int, number: float, place: int) -> None:
        desk.newest[worker.rank] = number
        say(Word.OFFER, worker, place, step)

    def finish(worker: Worker) -> None:
        worker.state = "finishes"
        if worker.looks_ahead:
            say(Word.NOTHING, worker)
            worker.listen()
            assert worker.inbox[-1][0] == "nothing"
            worker.looks_ahead, worker.inbox, worker.needs, worker.hinted = False, [], False, False
            if worker.asked is not None:
                lay_replica(worker, worker.asked)
        say(Word.FINISHED, worker)

    for worker in workers:
        assert not list(desk.hear(worker.open))
    while any(worker.state != "is done" for worker in workers):
        able = [w for w in workers if w.state != "is done" and (w.inbox or w.wants or w.state == "computes")]
        able = [w for w in able if w.wants or not (w.state == "computes" and w.left and w.needs)]
        able = [w for w in able if w.wants is None or w.asks_again or w.is_told]
        able += [w for w in workers if w.letters and w not in able]
        if not able:
            let_time_pass()
            continue
        (worker,) = draw.choices(able, [often[w.rank] for w in able])
        if worker.letters:
            worker.listen()
            continue
        if worker.asks_again:  # none of its own will do
            worker.asks_again = False
            say(Word.ROOM, worker, 1)
            continue
        if worker.wants is not None:
            (then, but_not), room = worker.wants, worker.room
            worker.wants, worker.room, worker.is_told = None, None, False
            then(worker.claim(but_not) if room is None else room)
            continue
        if worker.unread:
            for answer, plus in worker.unread:
                worker.reads(answer, plus)
            worker.unread = []
            let_go(worker)
        if worker.state == "computes" and worker.left:
            if pooled and weights and worker.kept is None and draw.random() < 0.5:
                keep(worker)
                continue
            if pooled and looks_ahead and draw.random() < 0.3:
                has_seen(worker)
                continue
            number = float(draw.randint(1, 1000))
            worker.given += number
            if looks_ahead:
                hand_in(worker, number)
            else:
                worker.state, worker.handed_in = "waits", number
                put(worker, number, partial(offer, worker, worker.step, number))
            worker.step, worker.left = worker.step + 1, worker.left - 1
        elif worker.state == "computes":
            finish(worker)
        elif worker.inbox[0][0] == "spare":
            lay_replica(worker, worker.inbox.pop(0))
        else:
            how, numbers = worker.hears()
            if worker.state == "waits":
                worker.state = "computes"
                if worker.x is not None and not numbers:  # what it gets later has that in it
                    worker.x += worker.handed_in
                let_go(worker)
            else:
                worker.state = "is done" if how == "over" else "rests"
                if how != "over":
                    say(Word.NEXT, worker)
    return Played(workers, most, len(memory), desk.means)
