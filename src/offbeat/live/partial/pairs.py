"""Shared weights, live: a thread that lets others average with this worker's weights while it computes.

It drives the worker's `SharedVec` (see `offbeat.rounds.shared`), which lies under ``_lock``. The interleaving this
prevents: the worker adds its step while a visitor's half is being added, and one of the two sums is lost.

No circle of workers can wait for each other: such threads wait only for workers that have announced a visit
and are already at the door; workers wait for them; they never wait for each other.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from offbeat.live.carriers.group import Group
from offbeat.live.carriers.sharing import shared
from offbeat.live.carriers.staging import Staging
from offbeat.live.carriers.visits import ByMessage, InMemory, VisitWay
from offbeat.live.partial.link import LOOK_S, Link
from offbeat.live.partial.telling import OVER, PART, Telling
from offbeat.live.transport import hosts
from offbeat.live.transport.hub import Frame, Letter, Quiet, Word
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter, Work
from offbeat.method.effects import Ticket
from offbeat.rounds.seat import Diary
from offbeat.rounds.shared import Retired, SharedVec
from offbeat.runs.trace import Round, Trace
from offbeat.tensors.vector import Vec


class Visits(Quiet):
    """The hub's side: announces visits, and tells all when everybody has retired."""

    def __init__(self, size: int) -> None:
        self._retired = Retired(size)

    def hear(self, frame: Frame) -> Iterable[Letter]:
        if frame.word is Word.MEET:
            return [(frame.a, frame)]
        return [(None, Frame(Word.FLUSH, 0))] if self._retired.one_more() else []


class Visit(Ticket[None]):
    """A meeting under way, as the one who asked sees it."""

    __slots__ = ("half", "number", "peer", "sent", "works")

    def __init__(self, number: int, peer: int, sent: Vec, half: Vec, works: list[Work]) -> None:
        self.number, self.peer, self.sent, self.half, self.works = number, peer, sent, half, works


class SharedWeights:
    """A worker's shared weights and the thread that answers for them."""

    def __init__(
        self,
        x: Vec,
        peers: tuple[int, ...],
        connection: socket.socket,
        board: Board,
        homes: Sequence[str],
        trace: Trace,
        patience_s: float,
        log: Diary | None = None,
        telling: Telling | None = None,
    ) -> None:
        self._board, self._trace, self._rank, self._patience_s = board, trace, board.rank, patience_s
        self._link = Link("pairs", connection, board.rank, board, patience_s)
        self._lock = self._link.lock
        self._staging = Staging(x)
        self._telling = telling
        self._shared = SharedVec(self._staging.down(x), log if telling is None else telling)
        self._stood: Vec | None = None
        self._worker, self._visitors = Waiter(board, patience_s), Waiter(board, patience_s)
        # One way for each pair and direction: visits there and back never share a queue, as two threads serve them.
        # All are made here, by one thread, in one order on all ranks. (Gloo holds the store while it waits for the
        # other side: two threads of one process that make groups at the same time lock both sides for good.)
        mine, waiter = board.rank, self._worker
        pairs = sorted({pair for peer in peers for pair in ((mine, peer), (peer, mine))}, key=lambda p: (sorted(p), p))
        like = self._shared.empty()
        ways = {pair: self._way(*pair, like, homes, waiter) for pair in pairs}
        self._out = {visited: way for (visitor, visited), way in ways.items() if visitor == mine}
        self._in = {visitor: way for (visitor, visited), way in ways.items() if visited == mine}
        self._over = False
        self.wire_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self._link.listen(self._hear)

    @property
    def waited_s(self) -> float:
        return self._worker.waited_s

    # The worker's thread.

    def meet(self, peer: int) -> Visit:
        """Announce a visit, send my weights to ``peer`` and be ready for its answer."""
        with self._turn("depart"):
            number, sent = self._shared.depart()
        half = sent.zeros_like()
        works: list[Work] = []
        if peer != self._rank:
            self._announce(peer)
            works = self._out[peer].visit(sent, half)
            self.wire_bytes += sent.nbytes
        return Visit(number, peer, sent, half, works)

    def _announce(self, peer: int) -> None:
        self._link.tell(Word.MEET, peer)

    @contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        """The worker does something with its weights."""
        with self._lock:
            yield

    def _way(self, visitor: int, visited: int, like: Vec, homes: Sequence[str], waiter: Waiter) -> VisitWay:
        """Through memory where the two are on one host and others are not. (Where all are on one, and a thread answers
        for weights all the same, memory is not to be shared.)"""
        board, pair = self._board, (min(visitor, visited), max(visitor, visited))
        found = None
        if len(set(homes)) > 1 and homes[visitor] == homes[visited] and hosts.wanted() in (None, "shm"):
            name = board.numbered(f"visits/{visitor}-{visited}", pair)
            found = shared(name, pair, lambda: InMemory(name, visitor, visited, like, board, waiter), board, waiter)
        return found or ByMessage(visitor, visited, board, waiter)

    def finish(self, visit: Ticket[None]) -> None:
        """Take the other half of the difference out of my weights."""
        assert isinstance(visit, Visit)
        self._link.check()
        start = time.monotonic()
        self._worker.wait(visit.works, f"rank {visit.peer}'s half of a meeting")
        with self._lock:
            stale = self._shared.home(visit.number, visit.half)
            now, me, rounds = time.monotonic(), self._rank, self._trace.rounds
            if self._trace.keep_rounds:
                rounds.append(Round(len(rounds), me, (me,), {me: stale}, {me: now - start}, now))

    def add(self, delta: Vec) -> Vec:
        """My step, on top of whatever my weights have become. Answers a copy."""
        self._link.check()
        mine = self._staging.down(delta)
        with self._turn("add"):
            now = self._shared.add(mine).clone()
        return self._staging.up(now)

    def retire(self, asked: Callable[[], bool], take_part: Callable[[], None]) -> Vec:
        """Answer visitors until all have retired; then nobody can change my weights any more."""
        self._link.tell(Word.FINISHED)
        since = time.monotonic()
        with self._board.waits_for("the others to retire"):
            while True:
                with self._lock:
                    if self._over:
                        if self._telling is not None:
                            self._telling.say(OVER)
                        return self._staging.up(self._shared.now())
                    self._link.check()
                    self._lock.wait(LOOK_S)
                since = self._board.bear_with(since, self._patience_s, "the others to retire")
                if asked():
                    if self._telling is not None:
                        self._telling.say(PART)
                    take_part()

    def stand(self, x: Vec, all_there: Callable[[], bool]) -> None:
        """Between two steps of all workers no visit is under way; then ``x`` becomes what the shared weights are."""
        self._worker.until(all_there, "the others to stand still")
        with self._lock:
            self._stood = self._shared.stand()
        x.copy_(self._stood)

    def adopt(self, x: Vec) -> None:
        """The worker's weights were made equal to the others': so are the shared ones.

        By a difference, as everything here: another worker may be on its way already, and visit before we are here.
        """
        if self._stood is not None:
            equal = self._staging.down(x)
            with self._turn("shift"):
                self._shared.shift(equal - self._stood)
            self._stood = None

    def close(self) -> None:
        self._link.close()
        if self._telling is not None:
            self._telling.close()

    def release(self) -> None:
        self._link.forget_failure()

    def abandon(self) -> None:
        if self._telling is not None:
            self._telling.abandon()
        self._link.abandon(self._visitors.give_up)

    @property
    def carriers(self) -> set[str]:
        """The ways visits go."""
        return {way.carrier for way in self._ways()}

    def groups(self) -> list[Group]:
        return [group for way in self._ways() for group in way.groups()]

    def let_go(self, together: bool) -> None:
        """Give the memory back that a host's ranks share; ``together``: so do the others now."""
        for way in self._ways():
            way.close(together)

    def _ways(self) -> list[VisitWay]:
        return [*self._out.values(), *self._in.values()]

    # The thread that answers.

    def _hear(self, frame: Frame) -> bool:
        if frame.word is Word.MEET:
            self._visited(frame.rank)
        elif frame.word is Word.FLUSH:
            with self._lock:
                self._over = True
                self._lock.notify_all()
        return self._over

    @contextmanager
    def _visit(self) -> Iterator[None]:
        """A visitor does."""
        with self._lock:
            yield

    def _visited(self, visitor: int) -> None:
        way, theirs = self._in[visitor], self._shared.empty()
        self._visitors.wait(way.receive(theirs), f"rank {visitor}'s weights")
        with self._visit():
            half = self._shared.visited(visitor, theirs)
        self.wire_bytes += half.nbytes
        self._visitors.wait(way.answer(half), f"rank {visitor} to take its half")
