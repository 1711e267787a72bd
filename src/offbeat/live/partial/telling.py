"""What happens at the seat of an island's leader, told to the island's other ranks, who do the same in the same order.

The entries of a seat's diary (or of shared weights'), which are all that chance decides in a run, and some of the
leader's own: what it was answered, that it takes part in an average, that the run is over.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from offbeat.live.partial.link import LOOK_S, Link
from offbeat.live.transport.errors import PeerFailed
from offbeat.live.transport.hub import Frame, Letter, Quiet, Word
from offbeat.live.worker.board import Board
from offbeat.rounds.seat import THROUGH, Diary, Event

OVER = "over"
PART = "take part"
MEMBERS = "members"
LEADER = "the first shard of this island"


class ToTheOthers(Quiet):
    """The hub inside an island, in its leader's process: what the leader says goes to all others."""

    def __init__(self, size: int) -> None:
        self._others = range(1, size)

    def hear(self, frame: Frame) -> Iterable[Letter]:
        return [(shard, frame) for shard in self._others]


class Telling:
    """The leader's diary. Written under the lock of its seat, so that the order of the entries is that of the events.

    ``log``: where they are kept as well, if they are.
    """

    def __init__(self, connection: socket.socket, board: Board, patience_s: float, log: Diary | None) -> None:
        self._link, self._log = Link("island", connection, 0, board, patience_s), log

    def append(self, event: Event, /) -> None:
        if self._log is not None:
            self._log.append(event)
        if event[0] != THROUGH:  # written down only where it was so; the others need every answer
            self.say(*event)

    def say(self, what: str, number: int = 0) -> None:
        """Something that is not the seat's, and on no record."""
        self._link.send(Frame(Word.EVENT, 0, number, text=what))

    def say_members(self, members: tuple[int, ...]) -> None:
        """Who is in the round whose snapshot comes next, where the referee has named them."""
        self.say(f"{MEMBERS}:{' '.join(map(str, members))}")

    def close(self) -> None:
        self._link.close()

    def abandon(self) -> None:
        self._link.abandon()


class Orders:
    """What the leader has done and this rank has not, oldest first. All under the lock of ``link``.

    Two threads of this process do what is said, each its own part: one waits until its turn has come, does it, and
    strikes it out.
    """

    def __init__(self, link: Link, board: Board, patience_s: float) -> None:
        self._link, self._board, self._patience_s = link, board, patience_s
        self._told = deque[Event]()
        self._members = deque[tuple[int, ...]]()  # of the rounds of which members have been told
        self._over = False
        self.waited_s = 0.0

    def hear(self, frame: Frame) -> bool:
        """The listener's: one more. Answers whether it was the last."""
        what, _, members = frame.text.partition(":")
        with self._link.lock:
            if what == MEMBERS:
                self._members.append(tuple(map(int, members.split())))
            self._told.append((what, frame.a))
            self._over = frame.text == OVER
            self._link.lock.notify_all()
        return self._over

    def _next_is(self, whats: tuple[str, ...]) -> bool:
        return bool(self._told) and self._told[0][0] in whats

    def first(self, *whats: str) -> Event:
        """The worker's: waits until one of these is next. Holds the lock on entry and on return."""
        start = since = time.monotonic()
        with self._board.waits_for(LEADER):
            while not self._next_is(whats):
                self._link.check()
                if not self._link.lock.wait(LOOK_S):
                    self._link.lock.release()
                    try:  # a leader without data may rest for as long as others train
                        since = self._board.bear_with(since, self._patience_s, LEADER)
                    finally:
                        self._link.lock.acquire()
        self.waited_s += time.monotonic() - start
        return self._told[0]

    def strike(self) -> Event:
        """What is next has been done. Holds the lock."""
        done = self._told.popleft()
        self._link.lock.notify_all()
        return done

    @contextmanager
    def turn(self, what: str) -> Iterator[Event]:
        """The worker's turn."""
        with self._link.lock:
            yield self.first(what)
            self.strike()

    def answer(self, what: str) -> int:
        """What the leader was answered."""
        with self.turn(what) as (_, number):
            return number

    # The other thread.

    def upcoming(self, *whats: str) -> Event | None:
        """Waits until one of these is next; None when nothing more will be."""
        with self._link.lock:
            while not self._next_is(whats):
                if self._over and (not self._told or self._next_is((OVER,))):
                    return None
                self.look()
            return self._told[0]

    def members(self) -> tuple[int, ...]:
        """Those of the next round, who are next to be told."""
        with self.other_turn(MEMBERS):
            return self._members.popleft()

    @contextmanager
    def other_turn(self, what: str) -> Iterator[None]:
        """That thread's turn."""
        with self._link.lock:
            while not self._next_is((what,)):
                self.look()
            yield
            self.strike()

    def look(self) -> None:
        """Waits for news. Holds the lock."""
        if self._link.hung_up:
            raise PeerFailed(f"gave up waiting for {LEADER}")
        self._link.lock.wait(LOOK_S)
