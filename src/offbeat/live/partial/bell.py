"""The bell of a round: heard while computing, at the price of reading one number.

A thread reads the hub's frames and keeps the highest round whose bell has rung; the worker's thread compares it with
its own round between two micro-batches. One writer, one reader, one integer: no lock is needed. A late bell of round r
cannot stop round r + 1, since r < r + 1.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from offbeat.live.partial.link import Link
from offbeat.live.transport.hub import Frame, Letter, Quiet, Word
from offbeat.live.worker.board import Board
from offbeat.rounds.bell import Rope


class Rings(Quiet):
    """The hub's side: counts who is through a round, and tells all when enough are."""

    def __init__(self, size: int) -> None:
        self._size, self._finished, self._rope = size, 0, Rope()

    def hear(self, frame: Frame) -> Iterable[Letter]:
        if frame.word is Word.FINISHED:
            self._finished += 1
            return [(None, Frame(Word.FLUSH, 0))] if self._finished == self._size else []
        return [(None, Frame(Word.RUNG, 0, frame.a))] if self._rope.pull(frame.a, frame.b) else []


class Bell:
    """This worker's ear and hand at the bell."""

    waited_s = 0.0

    def __init__(self, connection: socket.socket, board: Board, patience_s: float) -> None:
        self._link = Link("bell", connection, board.rank, board, patience_s)
        self.rung = self._mine = -1
        self._link.listen(self._hear)

    def ring(self, r: int, workers: int) -> None:
        """I am through my batch of round ``r``; the bell rings when ``workers`` are."""
        if r > max(self.rung, self._mine):
            self._mine = r  # once a round: a step that is given up and made anew must not count as two workers
            self._link.tell(Word.RING, r, workers)

    def finished(self) -> None:
        """I shall ring no more."""
        self._link.tell(Word.FINISHED)

    def _hear(self, frame: Frame) -> bool:
        if frame.word is Word.RUNG and frame.a > self.rung:
            self.rung = frame.a
        return frame.word is Word.FLUSH

    def close(self) -> None:
        self._link.close()

    def release(self) -> None:
        self._link.forget_failure()

    def abandon(self) -> None:
        self._link.abandon()
