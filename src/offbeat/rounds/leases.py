"""Which worker takes which batch of an epoch: a rule without a clock, a loader or a network.

The batches of an epoch are dealt out like cards: worker r has every P-th of them, its *home*, and takes them from the
front. A worker whose home is empty takes from the back of the home that would be done last. So workers of equal speed
take what fixed shares would give them, in the same order, and unequal ones are done at about the same time.

A loader fetches ahead. A worker may fetch from its own home without asking anybody: such a batch is its own only when
it is *begun*, and until then others may take it. What it takes from others is its own at once.

Every home is one word, ``used front back batch_us``, that changes by compare-and-set alone. The race, with one batch
left in a home:

- owner and thief read ``3 4 5``;
- the owner begins the last one: it sets ``3 5 5`` where it expects ``3 4 5``;
- the thief takes the last one: it would set ``3 4 4`` where it expects ``3 4 5``, and is told ``3 5 5`` instead.

Whoever comes second is told, and nobody has it twice. Behind every word stands who wrote it and which of its writes it
was, as two thieves that take the same batch would write the same: the second one, told that this lies there now, would
think that it was its own. Requests are generators that yield an `Op` and are sent its
answer: the live world asks the job's store, and tests ask in every order.

- A thief says that it holds a batch before it takes it: read in between, the batch is found twice and counted once.
- A worker that leaves says that a batch takes it for ever: else its last one would be worth nobody's taking.
- Leases are short, as what is begun cannot be taken back; a taken batch is not taken again by a third, as a thief takes
  what it does in half of the time that all need for the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

BLOCK = 16  # batches that a worker begins with one request, far from the end
NEAR = 8  # near it, this part of what is left in its home
GONE_US = 10**12  # what a batch takes a worker that has left the epoch: whoever is there takes the last one, too
NONE, RETURNED, STAMP = "-", "returned", "|"

T = TypeVar("T")


@dataclass(frozen=True)
class Read:
    """What lies under these keys now; where nothing does, ``first`` is put there, and answered."""

    keys: tuple[str, ...]
    first: tuple[str, ...]


@dataclass(frozen=True)
class Swap:
    """Put ``new`` under ``key`` if ``old`` lies there. The answer is what lies there afterwards."""

    key: str
    old: str
    new: str


@dataclass(frozen=True)
class Put:
    """Put ``text`` under a ``key`` that nobody else writes."""

    key: str
    text: str


Op = Read | Swap | Put
Request = Generator[Op, list[str], T]


@dataclass(frozen=True)
class Home:
    """One worker's own batches, by their places in its home.

    Before ``used``: they are resolved, mostly by a step. Before ``front``: begun. From ``back`` on: taken by others.
    ``batch_us``: how long one takes this worker, in microseconds; 0 before it is known.
    """

    used: int
    front: int
    back: int
    batch_us: int = 0

    @classmethod
    def parse(cls, text: str) -> Home:
        return cls(*map(int, text.partition(STAMP)[0].split()))

    def __str__(self) -> str:
        return f"{self.used} {self.front} {self.back} {self.batch_us}"

    @property
    def left(self) -> int:
        """How many nobody has begun or taken."""
        return self.back - self.front


class Epoch:
    """One epoch, as one worker sees it. ``batches``: their numbers, the same on all workers."""

    def __init__(self, rank: int, workers: int, batches: Sequence[int]) -> None:
        self.rank, self.workers = rank, workers
        self._homes = [batches[r::workers] for r in range(workers)]
        self._place = {batch: place for place, batch in enumerate(self._homes[rank])}
        self._keys = tuple(map(str, range(workers)))
        self._firsts = tuple(str(Home(0, 0, len(home))) for home in self._homes)
        self._own, self._own_text = Home.parse(self._firsts[rank]), self._firsts[rank]  # as it was last seen
        self._is_open, self._writes = False, 0
        self._fetched = self._begun = self._resolved = 0  # places of the own home, in this order from behind
        self._taken: deque[int] = deque()  # from others, and not fetched yet
        self._held: list[int] = []  # from others, and not used
        self._said_held = ""

    # What this worker asks.

    def fetch(self, batch_us: int, backlog: int) -> Request[int | None]:
        """The next batch to load, where ``backlog`` more are loaded and not begun; None: there is no work for it."""
        if not self._is_open:
            yield from self._open()
        if not self._taken and self._fetched < self._own.back:
            self._fetched += 1
            return self._homes[self.rank][self._fetched - 1]
        if not self._taken:
            yield from self._take(batch_us, backlog)
        return self._taken.popleft() if self._taken else None

    def begin(self, batch: int, batch_us: int) -> Request[bool]:
        """Whether this batch, which was loaded, is this worker's: it is not if another has taken it meanwhile."""
        place = self._place.get(batch)
        if place is None or batch in self._held:
            return True
        while place >= self._own.front:
            if place >= self._own.back:
                return False
            block = max(1, min(BLOCK, self._own.left // NEAR))
            front = min(place + block, self._own.back)
            yield from self._write(replace(self._own, used=self._resolved, front=front, batch_us=batch_us))
        self._begun = place + 1
        return True

    def resolve(self, batch: int) -> None:
        """A step was taken with it, or none will be. The others hear of it with a later request."""
        if batch in self._held:
            self._held.remove(batch)
        elif batch in self._place:
            self._resolved += 1

    def tell(self) -> Request[None]:
        """Write down what this worker holds."""
        if not self._is_open:
            return
        while self._own.used != self._resolved:
            yield from self._write(replace(self._own, used=self._resolved))
        yield from self._say_held()

    def give_back(self, begun: Iterable[int], loaded: Iterable[int]) -> Request[None]:
        """This worker uses none of these, and asks for no more: whoever has no work left takes what there is."""
        if not self._is_open:
            yield from self._open()
        back = [*begun, *(batch for batch in loaded if batch in self._held), *self._taken]
        back += self._homes[self.rank][self._begun : self._own.front]
        self._taken.clear()
        while back:
            (old,) = yield Read((RETURNED,), (NONE,))
            if (yield from self._swap(RETURNED, old, _numbers([*_parsed(old), *back])))[0]:
                break
        for batch in back:
            self.resolve(batch)
        while self._own.batch_us != GONE_US:
            yield from self._write(replace(self._own, used=self._resolved, batch_us=GONE_US))
        yield from self.tell()

    def left(self) -> Request[tuple[int, ...]]:
        """The batches with which no step was taken, as far as the workers have written it down."""
        held = [f"held/{rank}" for rank in range(self.workers)]
        texts = yield Read((*self._keys, *held, RETURNED), (*self._firsts, *[NONE] * (self.workers + 1)))
        found = {batch for text in texts[self.workers :] for batch in _parsed(text)}
        for home, text in zip(self._homes, texts, strict=False):
            word = Home.parse(text)
            found.update(home[word.used : word.back])
        return tuple(sorted(found))

    # How it asks.

    def _open(self) -> Request[None]:
        (self._own_text,) = yield Read((self._keys[self.rank],), (self._firsts[self.rank],))
        self._own, self._is_open = Home.parse(self._own_text), True

    def _write(self, new: Home) -> Request[None]:
        """Change this worker's own word, or else see how others have changed it."""
        _, self._own_text = yield from self._swap(self._keys[self.rank], self._own_text, str(new))
        self._own = Home.parse(self._own_text)

    def _swap(self, key: str, old: str, new: str) -> Request[tuple[bool, str]]:
        """Whether it was changed, and what lies there now."""
        self._writes += 1
        stamped = f"{new}{STAMP}{self.rank}.{self._writes}"
        (now,) = yield Swap(key, old, stamped)
        return now == stamped, now

    def _take(self, batch_us: int, backlog: int) -> Request[None]:
        """Take what was given back, or from the home that would be done last, if this worker would be done sooner."""
        while True:
            *homes, returned = yield Read((*self._keys, RETURNED), (*self._firsts, NONE))
            if numbers := _parsed(returned):
                key, old, new, taken = RETURNED, returned, _numbers(numbers[1:]), numbers[:1]
            else:
                words = [Home.parse(text) for text in homes]
                victim, count = _victim(words, self.rank, batch_us, backlog)
                word = words[victim]
                key, old, new = self._keys[victim], homes[victim], str(replace(word, back=word.back - count))
                taken = list(self._homes[victim][word.back - count : word.back])
            # Held before it is taken: who reads in between finds it twice, and not nowhere.
            self._held += taken
            yield from self._say_held()
            if not taken:
                return
            if (yield from self._swap(key, old, new))[0]:
                self._taken.extend(taken)
                return
            del self._held[-len(taken) :]

    def _say_held(self) -> Request[None]:
        if (text := _numbers(self._held)) != (self._said_held or NONE):
            self._said_held = text
            yield Put(f"held/{self.rank}", text)


def _victim(homes: Sequence[Home], rank: int, batch_us: int, backlog: int) -> tuple[int, int]:
    """From whom to take how many; 0: nobody would be done sooner for it.

    A home that would take at least twice as long as this worker's own backlog and one more: among equals that is one
    with two left, so that equals take nothing from each other for being half a batch ahead.
    """
    mine_us = max(batch_us, 1)
    each_us = [home.batch_us or mine_us for home in homes]
    lasts_us = [0 if r == rank else home.left * each_us[r] for r, home in enumerate(homes)]
    victim = max(range(len(homes)), key=lambda r: lasts_us[r])
    if 2 * (backlog + 1) * mine_us > lasts_us[victim]:
        return victim, 0
    # All of them together would need so long for what is left. What this worker does in half of that it takes now: then
    # nobody waits for it in the end, though speeds change and others take some at the same time.
    together_us = sum(home.left for home in homes) / sum(1 / each for each in each_us)
    count = int(together_us / 2 / mine_us) - backlog
    return victim, min(max(1, count), homes[victim].left)


def _numbers(batches: Sequence[int]) -> str:
    return " ".join(map(str, batches)) or NONE


def _parsed(text: str) -> list[int]:
    text = text.partition(STAMP)[0]
    return [] if text == NONE else [int(number) for number in text.split()]
