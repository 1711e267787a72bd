"""Which worker takes which batch of an epoch, and which batches count: a rule without a clock, a loader or a network.

The batches of an epoch are dealt out like cards: worker r has every P-th of them, its *home*, and takes them from the
front. A worker whose home is empty takes from the back of the home that would be done last. So workers of equal speed
take what fixed shares would give them, in the same order, and unequal ones are done at about the same time.

A loader fetches ahead. A worker may fetch from its own home without asking anybody: such a batch is its own only when
it is *begun*, and until then others may take it. What it takes from others is its own at once. Either way it is a
*lease*. A batch with which a step was taken is *stepped* with, and it *counts* when that step has been handed in to the
others, or to what outlives the worker.

A `Dealer` holds all of this for all workers, in one place, so that whatever is asked is answered in one order:

- A worker that dies or leaves gives back its leases, and what it has stepped with and not handed in. That is taken
  first by whoever asks next. Its home is nobody's from then on.
- An epoch is over for a worker when nothing is free, and nobody has a lease but itself and others who ask as it does.
- Leases are short, as what is begun is not taken from a worker that lives; what was taken is not taken again by a
  third, as a worker takes what it does in half of the time that all need for the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

BLOCK = 16  # batches that a worker begins with one request, far from the end
NEAR = 8  # near it, this part of what is left in its home
GONE_US = 10**12  # what a batch takes a worker that has left the epoch: whoever is there takes the last one, too
OPEN, STEPPED, COUNTS, SKIPPED = range(4)  # what has become of a batch

Ranges = list[tuple[int, int]]  # places, each from the first to behind the last


@dataclass(frozen=True)
class Dealt:
    """What a worker is told of an epoch.

    ``front``, ``back``: of its home, by places there; before ``front`` it has begun them, from ``back`` on others have
    them. ``taken``: places in the epoch that are its own now. ``is_over``: there is no work for it here, and there will
    be none. ``used``: with how many batches steps were taken, ``has_last``: also with the last one. ``steps``: of all
    workers, in all epochs.
    """

    front: int = 0
    back: int = 0
    taken: tuple[int, ...] = ()
    is_over: bool = False
    used: int = 0
    has_last: bool = False
    steps: int = 0


@dataclass
class Home:
    """One worker's batches that nobody has taken: ``back − front`` are free. ``batch_us``: how long one takes it."""

    front: int
    back: int
    batch_us: int = 0  # before it is known

    @property
    def left(self) -> int:
        return self.back - self.front


class Epoch:
    """The batches of one epoch, by their places in it. ``gone``: the workers that are dead as it begins."""

    def __init__(self, workers: int, batches: int, gone: Collection[int] = ()) -> None:
        self.workers, self.batches = workers, batches
        self._homes = [Home(0, len(range(rank, batches, workers))) for rank in range(workers)]
        self._gone: set[int] = set()  # whose homes are nobody's
        self._came: set[int] = set()
        self._leased: dict[int, int] = {}  # by whom
        self._stepped: dict[int, int] = {}  # by whom
        self._state = bytearray(batches)
        self._returned: deque[int] = deque()
        self.used = 0
        for rank in gone:
            self.close(rank)

    # What a worker asks.

    def dealt(self, rank: int, taken: Iterable[int] = (), waiting: Collection[int] = (), steps: int = 0) -> Dealt:
        """``waiting``: who waits for a batch, or for the end of the epoch."""
        home = self._homes[rank]
        front, back = (0, 0) if rank in self._gone else (home.front, home.back)
        has_last = bool(self.batches) and self._state[-1] in (STEPPED, COUNTS)
        over = self._is_over_for(rank, waiting)
        return Dealt(front, back, tuple(taken), over, self.used, has_last, steps)

    def come(self, rank: int) -> None:
        """A worker comes to this epoch, perhaps again."""
        self._came.add(rank)

    def begin(self, rank: int, place: int, batch_us: int) -> None:
        """This place of its home is its own, and some behind it, unless others have them by now."""
        home = self._homes[rank]
        home.batch_us = batch_us
        if rank in self._gone or not home.front <= place < home.back:
            return
        block = max(1, min(BLOCK, home.left // NEAR))
        front = min(place + block, home.back)
        for one in range(home.front, front):
            self._leased[rank + one * self.workers] = rank
        home.front = front

    def take(self, rank: int, batch_us: int, backlog: int, waits: bool = False) -> list[int]:
        """What was given back, or from the home that would be done last, if this worker would be done sooner.

        ``backlog``: how many more it has loaded and not begun. ``waits``: it has nothing else to do, and takes what is
        free of a worker that has not come, too, to the last one.
        """
        if self._returned:
            count = max(1, min(BLOCK, len(self._returned) // (NEAR * self.workers)))
            taken = [self._returned.popleft() for _ in range(count)]
        else:
            victim, count = self._victim(rank, batch_us, backlog, waits)
            home = self._homes[victim]
            taken = [victim + place * self.workers for place in range(home.back - count, home.back)]
            home.back -= count
        self._leased.update(dict.fromkeys(taken, rank))
        return taken

    def _victim(self, rank: int, batch_us: int, backlog: int, waits: bool) -> tuple[int, int]:
        """From whom to take how many; 0: nobody would be done sooner for it.

        A home that would take at least twice as long as this worker's own backlog and one more: among equals that is
        one with two left, so that equals take nothing from each other for being half a batch ahead.
        """
        mine_us = max(batch_us, 1)
        away = self._gone if not waits else self._gone | set(range(self.workers)) - self._came
        each_us = [GONE_US if r in away else home.batch_us or mine_us for r, home in enumerate(self._homes)]
        is_own = rank not in self._gone
        lasts_us = [0 if is_own and r == rank else home.left * each_us[r] for r, home in enumerate(self._homes)]
        victim = max(range(self.workers), key=lasts_us.__getitem__)
        if 2 * (backlog + 1) * mine_us > lasts_us[victim]:
            return victim, 0
        # All of them together would need so long for what is left. What this worker does in half of that it takes now:
        # then nobody waits for it in the end, though speeds change and others take some at the same time.
        together_us = self._free / sum(1 / each for each in each_us)
        count = int(together_us / 2 / mine_us) - backlog
        return victim, min(max(1, count), self._homes[victim].left)

    # What becomes of the batches.

    def step(self, rank: int, places: Iterable[int]) -> None:
        """A step was taken with these leases."""
        for place in places:
            if self._leased.get(place) == rank:
                del self._leased[place]
                self._stepped[place] = rank
                self._become(place, STEPPED)

    def skip(self, rank: int, places: Iterable[int]) -> None:
        """No step was taken with these leases, and none will be."""
        for place in places:
            if self._leased.get(place) == rank:
                del self._leased[place]
                self._become(place, SKIPPED)

    def stepped_by(self, rank: int) -> list[int]:
        """With what it has taken steps that it has not handed in."""
        return [place for place, who in self._stepped.items() if who == rank]

    def count(self, places: Iterable[int]) -> None:
        """The steps that were taken with these have been handed in."""
        for place in places:
            if self._stepped.pop(place, None) is not None:
                self._become(place, COUNTS)

    def close(self, rank: int) -> None:
        """It asks for no more here: what it has begun or taken, and not used, others have; its home is nobody's."""
        self._gone.add(rank)
        self._give_back(self._leased, rank)

    def die(self, rank: int) -> None:
        """What it has not handed in goes back, too."""
        self.close(rank)
        self._give_back(self._stepped, rank)

    def _give_back(self, held: dict[int, int], rank: int) -> None:
        for place in sorted(place for place, who in held.items() if who == rank):
            del held[place]
            self._become(place, OPEN)
            self._returned.append(place)

    def _become(self, place: int, state: int) -> None:
        self.used += (state in (STEPPED, COUNTS)) - (self._state[place] in (STEPPED, COUNTS))
        self._state[place] = state

    # What is left.

    @property
    def _free(self) -> int:
        return sum(home.left for home in self._homes)

    def _is_over_for(self, rank: int, waiting: Collection[int]) -> bool:
        if self._returned or self._free:
            return False
        return all(who == rank or who in waiting for who in self._leased.values())

    def places(self, wanted: int) -> Ranges:
        """Those of which this has become."""
        found: Ranges = []
        if wanted not in self._state:
            return found
        for place in (place for place, state in enumerate(self._state) if state == wanted):
            if found and found[-1][1] == place:
                found[-1] = found[-1][0], place + 1
            else:
                found.append((place, place + 1))
        return found


@dataclass(frozen=True)
class Account:
    """What has become of an epoch: the batches that are left, and those that were passed over, by their places."""

    number: int
    left: Ranges
    skipped: Ranges


@dataclass
class Dealer:
    """All epochs of one share. What several ask at once it is asked one after the other."""

    workers: int
    steps: int = 0  # of all workers
    _epochs: dict[int, Epoch] = field(default_factory=dict)
    _away: set[int] = field(default_factory=set)  # who will come to no more epochs, as far as is known
    _handing: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)
    _waiting: dict[int, tuple[int, int]] = field(default_factory=dict)  # at which epoch, and how long a batch takes it

    def open(self, rank: int, number: int, batches: int) -> Dealt:
        """A worker comes to an epoch of so many batches."""
        self._away.discard(rank)
        if number not in self._epochs:
            self._epochs[number] = Epoch(self.workers, batches, self._away)
        self._epochs[number].come(rank)
        return self._dealt(rank, number)

    def begin(self, rank: int, number: int, place: int, batch_us: int) -> Dealt:
        self._epochs[number].begin(rank, place, batch_us)
        return self._dealt(rank, number)

    def take(self, rank: int, number: int, batch_us: int, backlog: int) -> Dealt:
        return self._dealt(rank, number, self._epochs[number].take(rank, batch_us, backlog))

    def look(self, rank: int, number: int) -> Dealt:
        return self._dealt(rank, number)

    def _dealt(self, rank: int, number: int, taken: Iterable[int] = ()) -> Dealt:
        waiting = [one for one, (at, _) in self._waiting.items() if at == number]
        return self._epochs[number].dealt(rank, taken, waiting, self.steps)

    # Those who have no work, while others may still give some back.

    def wait(self, rank: int, number: int, batch_us: int) -> None:
        """It wants the next batch that is free, or to know that there will be none."""
        self._waiting[rank] = number, batch_us

    def stop_waiting(self, rank: int) -> Dealt | None:
        """It waits no longer. What it is told then; None: it has been told."""
        waited = self._waiting.pop(rank, None)
        return None if waited is None else self._dealt(rank, waited[0])

    def awaited(self) -> list[tuple[int, Dealt]]:
        """Who waits no longer, and what each is told."""
        found: list[tuple[int, Dealt]] = []
        over = [rank for rank, (number, _) in self._waiting.items() if self._dealt(rank, number).is_over]
        for rank in over:
            found.append((rank, self._dealt(rank, self._waiting[rank][0])))
        for rank in over:
            del self._waiting[rank]
        for rank, (number, batch_us) in list(self._waiting.items()):
            if taken := self._epochs[number].take(rank, batch_us, 0, waits=True):
                del self._waiting[rank]
                found.append((rank, self._dealt(rank, number, taken)))
        return found

    # What becomes of batches.

    def step(self, rank: int, number: int, places: Sequence[int], skipped: Sequence[int], steps: int) -> None:
        """So many steps more, with these batches of an epoch; ``skipped``: with these none was taken."""
        self.steps += steps
        if number in self._epochs:
            self._epochs[number].step(rank, places)
            self._epochs[number].skip(rank, skipped)

    def hands_over(self, rank: int) -> None:
        """All steps that were heard of go with what this worker is about to hand in."""
        found = [(number, epoch.stepped_by(rank)) for number, epoch in self._epochs.items()]
        self._handing[rank] = [(number, places) for number, places in found if places]

    def handed_in(self, rank: int) -> None:
        """They do."""
        for number, places in self._handing.pop(rank, ()):
            self._epochs[number].count(places)

    def close(self, rank: int, number: int) -> None:
        """A worker asks for no more of an epoch; −1: of any."""
        if number < 0:
            self._away.add(rank)
        for epoch in [self._epochs[number]] if number in self._epochs else self._epochs.values() if number < 0 else ():
            epoch.close(rank)

    def die(self, rank: int) -> None:
        """A worker is no more, or leaves. If it comes again, it has a home from the next epoch on."""
        self._away.add(rank)
        self._handing.pop(rank, None)
        self._waiting.pop(rank, None)
        for epoch in self._epochs.values():
            epoch.die(rank)

    def accounts(self) -> list[Account]:
        """Of all epochs that somebody has begun."""
        return [Account(n, one.places(OPEN), one.places(SKIPPED)) for n, one in sorted(self._epochs.items())]


class Asks(Protocol):
    """What one worker asks about one epoch."""

    def open(self) -> Dealt: ...

    def begin(self, place: int, batch_us: int) -> Dealt: ...

    def take(self, batch_us: int, backlog: int) -> Dealt: ...


class Taker:
    """One worker's way through one epoch. Places are those of the epoch."""

    def __init__(self, rank: int, workers: int, asks: Asks) -> None:
        self._rank, self._workers, self._asks = rank, workers, asks
        self._taken: deque[int] = deque()  # from others, and not fetched yet
        self._own: set[int] = set()  # of what others had, this worker's
        self._home = asks.open()
        self._fetched = self._home.front  # places of the own home

    @property
    def is_over(self) -> bool:
        """There is no work for it, and there will be none, as it was told last."""
        return self._home.is_over and not self._taken

    def fetch(self, batch_us: int, backlog: int) -> int | None:
        """The next batch to load, where ``backlog`` more are loaded and not begun; None: there is no work for it."""
        if not self._taken and self._fetched < self._home.back:
            self._fetched += 1
            return self._rank + (self._fetched - 1) * self._workers
        if not self._taken:
            self.give(self._asks.take(batch_us, backlog))
        return self._taken.popleft() if self._taken else None

    def give(self, dealt: Dealt) -> None:
        """What this worker was told."""
        self._home = dealt
        self._taken.extend(dealt.taken)
        self._own.update(dealt.taken)

    def begin(self, place: int, batch_us: int) -> bool:
        """Whether this batch, which was loaded, is this worker's: it is not if another has taken it meanwhile.

        One that another has taken and given back may have been loaded twice.
        """
        if place in self._own:
            self._own.discard(place)
            return True
        in_home = (place - self._rank) // self._workers
        if in_home >= self._home.front:
            self.give(self._asks.begin(in_home, batch_us))
        return in_home < self._home.front
