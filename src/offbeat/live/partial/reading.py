"""A worker's side of what a hub keeps as places in memory: it lays vectors down, asks, and adds up what it is told.

What processes share is memory, under these rules, which need no lock:

- A slot for deposits is written by its worker alone, before the hub is told of it, and not again before every adder of
  the sum that took it has raised its flag. A worker has slots of its own; where vectors are long, it has one, asks the
  hub for another when that one may still be read, and gives back what it does not need.
- A sum's slot is written by its adders, and read when they have raised their flags (`offbeat.live.partial.summing`).

Where a worker looks ahead (see `offbeat.live.partial.ahead`), a second thread of its process hears the answers and
makes its parts of the sums, while the worker lays down vectors and reads results. ``_books`` protects what both write
to: the list of what was told and is being read. Without it what is told between two lines of the other thread would be
forgotten. ``_line_is_ours`` protects the line: what is said of sums must reach the hub in the order in which it was
made up, since both count them.
"""

from __future__ import annotations

import itertools
import marshal
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import cast

from offbeat.live.carriers.memory import nap
from offbeat.live.carriers.shelves import Shelves
from offbeat.live.partial.own import OwnSlots
from offbeat.live.partial.stacks import DEPOSITS, READS, SEEN, Home, home_of, number_of
from offbeat.live.partial.summing import DEVICE_BYTES_S, GRACE_S, SLOW_BYTES_S, Sums
from offbeat.live.partial.told import Answer, Delivery, Recipe, Ref
from offbeat.live.transport.board import Board
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.transport.hub import Frame, Word, read_frame
from offbeat.rounds.seat import Event
from offbeat.tensors.vector import Vec, Way

LOOK_S = 0.1  # how often a waiting worker looks at the board
SOON_S = 0.02  # a wait that is over by then is no wait to tell of
FEW = 4  # deposits that lie in a tray; more are added up


class Reader:
    """What every kind of worker's side does. ``rank`` is how the hub knows it; ``heard`` is given every answer.

    ``pooled``: this worker has one slot of its own, and asks for others; ``replaces``: what it lays down replaces what
    it has laid down before; ``keeps``: so many slots stay its own while it computes, though nothing lies there.
    """

    def __init__(
        self,
        shelves: Shelves,
        line: socket.socket,
        rank: int,
        board: Board,
        patience_s: float,
        heard: Callable[[Answer], None],
        log: list[Event] | None = None,
        pooled: bool = False,
        replaces: bool = False,
        keeps: int = 0,
    ) -> None:
        self._heard, self._pooled, self._keeps = heard, pooled, keeps
        self._shelves, self._line, self._rank = shelves, line, rank
        self._board, self._patience_s, self._log = board, patience_s, log
        self._poll = select.poll()
        self._poll.register(line, select.POLLIN)
        self.sums = Sums(shelves, rank, waits=pooled and replaces)
        self._own = OwnSlots(rank, pooled, pooled and replaces, self.sums.is_there)
        self._grace_s = GRACE_S + shelves.vector_bytes / (DEVICE_BYTES_S if shelves.on_device else SLOW_BYTES_S)
        self._told: list[Delivery] = []  # what may still be read, as far as the hub knows
        self._books, self._line_is_ours = threading.Lock(), threading.RLock()
        self.listens: Callable[[str], Answer] | None = None  # another thread does, and this waits for what is for us
        self.asked_s = 0.0
        self.hung_up = False

    # Words.

    def send(self, word: Word, a: int = 0, b: int = 0, c: int = -1, data: bytes = b"", settled: bool = True) -> None:
        """``settled``: what was laid down before is there, and what was given has been read."""
        self._board.check()  # else one that needs nobody would go on without the others
        if settled:
            self._shelves.settle()
        self.asked_s = time.monotonic()
        try:
            with self._line_is_ours:
                self._line.sendall(Frame(word, self._rank, a, b, c, data=data).pack())
        except OSError as error:
            raise self._board.lost("the news from rank 0") from error

    def heard_within(self, seconds: float) -> bool:
        """Whether an answer is there; waits no longer than that."""
        return bool(self._poll.poll(seconds * 1e3))

    def answer(self) -> Answer:
        frame = read_frame(self._line)
        if frame is None:
            raise self._board.lost("the news from rank 0")
        answer = Answer(*marshal.loads(frame.data))  # quick, and safe from whoever has shown the job's token
        self._own.are_free(answer.freed)
        self._own.are_gone(answer.gone)
        if self._log is not None:
            self._log += answer.events
        self._heard(answer)
        return answer

    def note(self, what: str, number: int) -> None:
        """Something that is known here alone, behind what the hub has told so far."""
        if self._log is not None:
            self._log.append((what, number))

    def come_again(
        self, word: Word, a: int = 0, b: int = 0, c: int = -1, reads: Sequence[Delivery] = (), settled: bool = True
    ) -> None:
        """Say something after which nothing that I was given before is read any more, but for the results of ``reads``.

        Of a sum that has been seen the hub forgets what it was made of: so that is said only of one that is complete,
        or else an adder that is stopped in the middle of it would find other deposits in their place.
        """
        with self._books:
            for one in self._told:
                one.read = False if one.read else one.read
            for one in reads:
                one.read = True
        self._say(word, a, b, c, settled)

    def has_seen(self, told: Delivery) -> None:
        """What is to be read later is there. The hub hears of it: what it was made of is not needed any more."""
        if self._pooled and all(self.sums.is_there(told.sums[k]) for k in told.results):
            self._say(Word.READ, settled=False)

    def _say(self, word: Word, a: int = 0, b: int = 0, c: int = -1, settled: bool = True) -> None:
        """Say something, and with it of each sum that I was told of whether it is there, and may still be read.

        Nothing is said of what another thread may just be adding up, nor, where memory does not count, of what is to be
        read later.
        """
        with self._line_is_ours:
            if settled:
                self._shelves.settle()
            with self._books:
                told = list(itertools.takewhile(self._may_speak_of, self._told))
            said = bytearray()
            for one in told:
                needed = self._needs(one)
                said += bytes(SEEN * self.sums.is_there(one.sums[k]) | READS * (k in needed) for k in one.lent)
                one.lent = [k for k in one.lent if k in needed]
            self.sums.take_back(one for one in told if one.read is False)
            with self._books:  # of what I am still writing, the next word will tell
                self._told = [one for one in told if one.read is not False or one.lent] + self._told[len(told) :]
            self.send(word, a, b, c, data=bytes(said), settled=False)

    def _may_speak_of(self, one: Delivery) -> bool:
        return one.read is not None or (self._pooled and one.is_made)

    def _needs(self, one: Delivery) -> set[int]:
        """Which of its sums may still be read: the results, and of those that were not taken yet also what they are
        made of, until they are there. And what I am still writing: in its slot nothing else may lie."""
        needed = one.results if one.read is not False else set()
        if one.read is None and any(not self.sums.is_there(one.sums[k]) for k in needed & set(one.lent)):
            needed = set(one.lent)
        return needed | (self.sums.still_making(one) & set(one.lent))

    @property
    def is_reading(self) -> bool:
        """Whether the hub believes that I am."""
        return any(one.read for one in self._told)

    def ask(self, word: Word, a: int = 0, data: bytes = b"", settled: bool = True) -> Answer:
        """What the hub answers at once."""
        self.send(word, a, data=data, settled=settled)
        return (self.listens or self.wait)("an answer of rank 0")

    def wait(self, what: str, look: Callable[[], None] = lambda: None) -> Answer:
        start = time.monotonic()
        while not self.heard_within(LOOK_S):
            self._board.check(what)
            look()
            if time.monotonic() - start > self._patience_s:
                raise self._board.gave_up(self._patience_s, what)
        return self.answer()

    # Slots.

    def put(self, x: Vec, but_not: Collection[Home] = ()) -> int:
        """Lay ``x`` into a slot that nobody reads, and that is none of these; its number."""
        if self._own.look() >= FEW:
            self._merge(but_not)
        home = self._claim(lambda: but_not)
        self._shelves.lay(x, *home, mine=not self._pooled)
        return number_of(home)

    def claim(self) -> Home:
        """A slot to write to before anything is put there: none that what I was given stands on."""
        self._own.look()
        home = self._claim(self._stands_on)
        self._own.set_aside(home)
        return home

    def _stands_on(self) -> set[Home]:
        """Slots of mine that what I was given stands on."""
        return {home for one in self._told for home in one.deposits}

    def put_there(self, way: Way, home: Home) -> int:
        """Let the slot in which a way begins hold that way."""
        if self._own.look() >= FEW:
            self._merge((home, *self._stands_on()))
        if self._shelves.on_device:
            _ = way.parts  # made in place
            self._shelves.note_used(*home, way.used)
        else:
            self._shelves.lay(way, *home, mine=False)
        self._own.written_to(home)
        return number_of(home)

    def _claim(self, but_not: Callable[[], Collection[Home]]) -> Home:
        found = self._own.one(but_not) or (self._asked_for(but_not) if self._pooled else None)
        if found is None:
            raise OffbeatError(
                f"{DEPOSITS} deposits of rank {self._board.rank} are being read by workers that stand still"
            )
        if self._pooled:
            self._give_back(lambda: {*but_not(), *self._stands_on()})
        return found

    def _asked_for(self, but_not: Callable[[], Collection[Home]]) -> Home:
        """Where the hub says. It may know that one of mine is in a sum of which I have not heard yet."""
        room, taken = self.ask(Word.ROOM, settled=False).about[0]
        self._own.free_when_there(
            (Recipe(home, number, False, False, tuple(range(parts)), 1, []), mine)
            for mine, home, number, parts in taken
        )
        start = time.monotonic()
        while room is None:
            self._own.look()
            if found := self._own.one(but_not):
                return found
            if not taken or time.monotonic() - start > self._grace_s:
                (room, _) = self.ask(Word.ROOM, 1, settled=False).about[0]
            else:
                nap(start)
        self._own.written_to(room)
        return cast(Home, room)

    def _give_back(self, but_not: Callable[[], Collection[Home]], keeps: int = 0) -> None:
        for home in self._own.without_need(but_not, keeps):  # nobody reads there, nor do I: it need not be waited for
            self.send(Word.GIVE, number_of(home), settled=False)

    def give_back(self) -> None:
        """I need no slot before I come again, but for those that what I was given stands on."""
        self._own.look()
        self._give_back(self._stands_on, self._keeps)

    def let_go(self, settled: bool = True) -> None:
        """I compute, and nothing that I was given is read meanwhile. ``settled`` as above."""
        if self.is_reading:
            self.come_again(Word.READ, settled=settled)
        self.give_back()

    def _merge(self, but_not: Collection[Home]) -> None:
        """Many deposits lie in the tray: their sum takes their place, unless one has been taken in the meantime."""
        places: list[Ref] = self.ask(Word.OWED).about[0] or []
        if len(places) < 2:
            return
        home = self._claim(lambda: but_not)
        self._shelves.note_used(*home, self.sums.add(places, self._shelves.vec(*home)).used)
        old = [(member, slot) for member, slot, _ in places]
        if self.ask(Word.MERGE, number_of(home), data=marshal.dumps(old)).how != "merged":
            self._own.are_free([home])

    def added_up(self, places: Sequence[Ref]) -> Vec:
        """A copy of what these of my slots hold together."""
        return self.sums.add(places)

    @property
    def untaken(self) -> list[Ref]:
        """My slots that are in no sum I know of."""
        return self._own.untaken

    def slot(self, home: Home) -> Vec:
        """Memory that I have been told to write to."""
        return self._shelves.vec(*home)

    def laid(self, place: int) -> Vec:
        """What I have put there."""
        return self._shelves.vec(*home_of(place))

    # Sums.

    def make(self, answer: Answer, read: bool | None = True) -> Delivery:
        """My parts of the sums. ``read``: whether they are read now (None: not yet)."""
        told = Delivery(answer, [Recipe(*one) for one in answer.sums], time.monotonic(), read)
        with self._books:
            self._told.append(told)
        self.sums.make(told)
        told.is_made = True
        self._own.free_when_there((told.sums[k], home) for k, home in answer.free_then)
        return told

    def vectors(self, answer: Answer) -> list[Vec]:
        """Add up what there is to add, and give the vectors that were answered, to be read until I come again."""
        return self.sums.read(self.make(answer))

    def hang_up(self, together: bool) -> None:
        """``together``: so do all others, who have finished too."""
        self.hung_up = True
        self._heard = lambda answer: None
        self._line.close()
        self._told = []
        self.sums.forget()
        self._shelves.close(together)
