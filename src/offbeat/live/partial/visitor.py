"""A worker's side of shared weights that are kept at the hub (see `offbeat.live.partial.meetings`)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from offbeat.live.carriers.shelves import Shelves
from offbeat.live.partial.reading import LOOK_S, Reader
from offbeat.live.partial.told import Answer
from offbeat.live.transport.board import Board
from offbeat.live.transport.hub import Word
from offbeat.live.transport.waiter import Waiter
from offbeat.method.effects import Ticket
from offbeat.rounds.seat import Event
from offbeat.runs.trace import Round, Trace
from offbeat.tensors.vector import Vec


class Meeting(Ticket[None]):
    """One that was asked for; it is over when the hub has heard of it."""

    __slots__ = ()


class Visitor:
    """A worker's side."""

    def __init__(
        self,
        x: Vec,
        shelves: Shelves,
        line: socket.socket,
        board: Board,
        trace: Trace,
        patience_s: float,
        log: list[Event] | None = None,
    ) -> None:
        self._board, self._trace, self._patience_s, self._nbytes = board, trace, patience_s, x.nbytes
        self._reader = Reader(shelves, line, board.rank, board, patience_s, self._heard, log)
        self._worker = Waiter(board, patience_s)
        self._stood: Vec | None = None
        self.waited_s = 0.0
        self.wire_bytes = 0
        self._reader.send(Word.OPEN, self._reader.put(x), 0, int(log is not None))

    def meet(self, peer: int) -> Meeting:
        """Both take the mean of the two, before anything else that either of them does from now on."""
        self._reader.send(Word.MEET, peer, settled=False)  # nothing was laid down for it
        if peer != self._board.rank:
            self.wire_bytes += 2 * self._nbytes
        return Meeting()

    def finish(self, visit: Ticket[None]) -> None:
        """Nothing is left to be done."""

    def add(self, delta: Vec) -> Vec:
        """My step, on top of whatever my weights have become."""
        return self._shown(Word.ADD, self._reader.put(delta))

    def _shown(self, word: Word, slot: int = 0) -> Vec:
        start = time.monotonic()
        self._reader.come_again(word, slot)
        answer = self._reader.wait("an answer of rank 0")
        value = self._reader.vectors(answer)[0]
        self.waited_s += time.monotonic() - start
        return value

    def _heard(self, answer: Answer) -> None:
        me, rounds = self._board.rank, self._trace.rounds
        for stale, end_s in answer.news:
            if self._trace.keep_rounds:
                rounds.append(Round(len(rounds), me, (me,), {me: stale}, {me: 0.0}, end_s))

    def retire(self, asked: Callable[[], bool], take_part: Callable[[], None]) -> Vec:
        """My weights when nobody can change them any more: all have retired."""
        reader = self._reader
        reader.send(Word.FINISHED)
        since = time.monotonic()
        with self._board.waits_for("the others to retire"):
            while not reader.heard_within(LOOK_S):
                since = self._board.bear_with(since, self._patience_s, "the others to retire")
                if asked():
                    take_part()
        answer = reader.answer()
        return reader.vectors(answer)[0]

    def stand(self, x: Vec, all_there: Callable[[], bool]) -> None:
        """Between two steps of all workers no meeting is under way; then ``x`` becomes what the shared weights are."""
        self._worker.until(all_there, "the others to stand still")
        self._stood = self._shown(Word.STANDS).clone()
        x.copy_(self._stood)

    def adopt(self, x: Vec) -> None:
        """The worker's weights were made equal to the others': so are the shared ones, by a difference."""
        if self._stood is not None:
            self._reader.ask(Word.SHIFT, self._reader.put(x - self._stood))
            self._stood = None

    def close(self) -> None:
        self._reader.hang_up(together=True)

    def release(self) -> None:
        """Nothing is kept."""

    def abandon(self) -> None:
        self._reader.hang_up(together=False)
