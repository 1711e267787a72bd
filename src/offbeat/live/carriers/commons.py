"""Exchanges in step through memory that a host's ranks share: everybody lays its vectors down, and reads the others'.

Each rank has a file in memory, cut into *regions*. The n-th exchange of one member meets the n-th of every other, and
all members go through the same exchanges in the same order; so each of them finds by itself, without a word, in which
region an exchange lies: at the same place in everybody's file. A region is used again for a later exchange when this
member is through with the one before in it, which is the same moment of the program everywhere.

Three counters for each region, written by one member and read by the others: *laid* (my vectors of exchange n lie
there), *added* (my stretch of the sum does, in their place), *through* (I read nothing of exchange n any more). What
they prevent:

- a vector is read before it is whole: nobody reads what is not laid;
- a stretch is overwritten by its sum while another still needs the vector: each stretch is read by its adder alone;
- a region is written to while another member still reads in it: that member is not through.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.live.carriers.memory import Kinds, nap, round_up, shared_memory, vector_bytes
from offbeat.live.memory.adding import add_in_place, add_up, stretch
from offbeat.live.memory.hands import ONE, Hands, Pairs, Pieces
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter
from offbeat.tensors.vector import wide

REGIONS = 1 << 12
FILE_BYTES = 1 << 38  # of addresses; pages cost nothing until they are written
SMALL = 1 << 16  # numbers: so few that everybody adds all of them, instead of waiting for others' stretches
LAID, ADDED, THROUGH, SIZE = range(4)


class Region(NamedTuple):
    """Where an exchange lies, in every member's file."""

    number: int
    start: int
    nbytes: int


class Views(NamedTuple):
    """What everybody has laid down in one exchange."""

    commons: Commons
    region: Region
    kinds: tuple[tuple[torch.dtype, int], ...]

    def of(self, member: int) -> list[Tensor]:
        """A member's; not before it has laid it down."""
        return self.commons.views(member, self.region, self.kinds)

    def everyones(self) -> list[list[Tensor]]:
        return [self.of(m) for m in range(len(self.commons.ranks))]


class Laid:
    """An exchange under way. What it calls when the others are there must not know it: nothing keeps itself alive."""

    def __init__(self, views: Views, number: int) -> None:
        self.views, self.number = views, number
        self._commons = views.commons
        self._finish: Callable[[], None] | None = None
        self._phase, self._needs = LAID, self._commons.others
        self._add: Callable[[], None] | None = None

    @property
    def region(self) -> Region:
        return self.views.region

    def have(self, phase: int, members: Sequence[int]) -> Reached:
        """What waits until these have come so far."""
        return Reached(self._commons, phase, self.region, self.number, tuple(members))

    def needs(self, members: Sequence[int], finish: Callable[[], None]) -> Laid:
        """When these have laid theirs, ``finish`` reads them."""
        self._needs, self._finish = tuple(members), finish
        return self

    def sums(self, out: Sequence[Tensor], divisor: int = 1, each: bool = False) -> Laid:
        """All members add up their vectors, divided by ``divisor``, into ``out``: each its stretch, or ``each`` of them
        all of it.

        For a stretch, its member must have come to wait, too. Where an exchange is begun and waited for later, nobody
        is to be waited for who has laid its vector down: there each adds all.
        """
        commons, views, size, me = self._commons, self.views, len(self._commons.ranks), self._commons.me
        hands = commons.hands

        def add_all() -> None:
            laid = views.everyones()
            for k, o in enumerate(out):
                add_up(o, [[(v[k], 1.0)] for v in laid], divisor, hands=hands)

        if each or sum(n for _, n in views.kinds) <= SMALL:
            return self.needs(self._commons.others, add_all)

        def add() -> None:
            laid = views.everyones()
            for k, mine in enumerate(laid[me]):
                lo, hi = stretch(mine.numel(), me, size)
                add_in_place(mine, [v[k] for v in laid], divisor, lo, hi, hands)

        def collect() -> None:
            laid = views.everyones()
            ends = [[stretch(o.numel(), member, size) for member in range(size)] for o in out]
            commons.copy(
                [
                    (o[lo:hi], laid[member][k][lo:hi])
                    for k, o in enumerate(out)
                    for member, (lo, hi) in enumerate(ends[k])
                ]
            )

        self._add = add
        return self.needs(self._commons.others, collect)

    def within(self, seconds: float) -> bool:
        """Whether it is over; waits no longer than that."""
        start = time.monotonic()
        while self._finish is not None:
            if self._commons.reached(self._phase, self.region, self.number, self._needs):
                if self._phase == LAID and self._add is not None:
                    self._add()
                    self._commons.say(ADDED, self.region, self.number)
                    self._phase = ADDED
                    continue
                finish, self._finish = self._finish, None
                finish()
                self._commons.through(self)
                return True
            if time.monotonic() - start > seconds:
                return False
            nap(start)
        return True


class Reached(NamedTuple):
    """These members have come so far with an exchange."""

    commons: Commons
    phase: int
    region: Region
    number: int
    members: tuple[int, ...]

    def within(self, seconds: float) -> bool:
        start = time.monotonic()
        while not self.commons.reached(self.phase, self.region, self.number, self.members):
            if time.monotonic() - start > seconds:
                return False
            nap(start)
        return True


class Commons:
    """What ``ranks`` share, as this process sees it. Made by all of them together."""

    def __init__(
        self, name: str, ranks: tuple[int, ...], device: torch.device, board: Board, waiter: Waiter, hands: Hands
    ) -> None:
        self.hands = hands
        self.ranks, self.me, self._waiter = ranks, ranks.index(board.rank), waiter
        self.others = tuple(m for m in range(len(ranks)) if m != self.me)
        self._regions: list[Region] = []
        self._last: dict[int, tuple[int, tuple[int, ...]]] = {}  # region → its last exchange, and who reads there
        self._free: list[int] = []
        self._exchanges = 0
        self._end = words = round_up(4 * REGIONS * 8, mmap.PAGESIZE)
        self._memory = shared_memory(name, ranks, device, words, FILE_BYTES, REGIONS, board, waiter)
        self.carrier = self._memory.carrier
        self._words: list[NDArray[np.int64]] = [
            w.reshape(4, REGIONS) for w in self._memory.words(np.int64, 4 * REGIONS, 0)
        ]
        self._views: dict[tuple[int, int, tuple[tuple[torch.dtype, int], ...]], list[Tensor]] = {}

    def lay(
        self,
        tensors: Sequence[Tensor],
        readers: Sequence[int] | None = None,
        later: bool = False,
        kinds: Kinds | None = None,
        but: Sequence[tuple[int, int]] | None = None,
        pieces: Pieces | None = None,
    ) -> Laid:
        """Lay copies of these where the others can read them, wide enough to be summed: the next exchange.

        ``readers``: who will read them (None: all). ``later``: nobody waits for it now. ``kinds``: what all members
        have room for, where some lay only the first of it, or nothing. ``but``: from where to where in each of these
        nothing is laid, since nobody else reads it. ``pieces``: what is laid instead of the only one of these.
        """
        kinds = [(wide(t.dtype), t.numel()) for t in tensors] if kinds is None else kinds
        region = self._region(kinds, later)
        number, self._exchanges = self._exchanges, self._exchanges + 1
        laid = Laid(Views(self, region, tuple(kinds)), number)
        if region.number in self._last:
            left = Reached(self, THROUGH, region, *self._last[region.number])
            self._waiter.wait([left], "the others to read an older exchange")
        self._last[region.number] = number, self.others if readers is None else tuple(readers)
        if tensors:
            room = laid.views.of(self.me)
            pairs = list(zip(room, tensors, strict=len(tensors) == len(kinds))) if pieces is None else pieces(room[0])
            if but is not None:
                cut = [(view, t, lo, hi) for (view, t), (lo, hi) in zip(pairs, but, strict=True)]
                pairs = [pair for v, t, lo, hi in cut for pair in ((v[:lo], t[:lo]), (v[hi:], t[hi:]))]
            self.copy(pairs)
        self._words[self.me][SIZE, region.number] = region.start + region.nbytes
        self.say(LAID, region, number)
        return laid

    def copy(self, pairs: Pairs) -> None:
        """Let the first of each pair be what the second is."""
        hands = ONE if self.carrier == "ipc" else self.hands
        hands.copy(pairs)

    def _region(self, kinds: Kinds, later: bool) -> Region:
        """The one that has been free for longest, if it is large enough.

        Not the only one, where nobody is to be waited for: others may still have to read what lay there last. What lay
        in the one before they have read, since they had begun the next exchange when we finished that.
        """
        nbytes = vector_bytes(kinds)
        fitting = [k for k in self._free if self._regions[k].nbytes >= nbytes]
        if len(fitting) > later:
            self._free.remove(fitting[0])
            return self._regions[fitting[0]]
        if len(self._regions) == REGIONS or self._end + nbytes > FILE_BYTES:
            raise OffbeatError(f"{len(self._regions)} exchanges are under way at once; finish some before the next")
        region = Region(len(self._regions), self._end, round_up(max(nbytes, 1), mmap.PAGESIZE))
        self._regions.append(region)
        self._end += region.nbytes
        return region

    def views(self, member: int, region: Region, kinds: Kinds) -> list[Tensor]:
        key = member, region.number, tuple(kinds)
        if key not in self._views:
            self._views[key] = self._memory.vector(member, region.number, region.start, kinds, region.nbytes)
        return self._views[key]

    # Counters.

    def settle(self) -> None:
        """What was written is there, also for another thread or another process."""
        self._memory.settle()

    def say(self, what: int, region: Region, number: int) -> None:
        self._memory.settle()
        self._words[self.me][what, region.number] = number + 1

    def reached(self, what: int, region: Region, number: int, members: Sequence[int]) -> bool:
        words, k = self._words, region.number
        if not all(words[m][what, k] > number for m in members):
            return False
        if what == LAID and any(words[m][SIZE, k] != words[self.me][SIZE, k] for m in members):
            raise OffbeatError("the ranks of this host are in different exchanges; every rank must make the same ones")
        return True

    def through(self, laid: Laid) -> None:
        self.say(THROUGH, laid.region, laid.number)
        self._free.append(laid.region.number)

    def close(self, together: bool = True) -> None:
        """Let go of all memory; ``together``: so do the others now."""
        self._words, self._views = [], {}
        self._memory.close(together)
