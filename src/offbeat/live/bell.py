"""The bell of a round: heard while computing, at the price of reading one number.

A thread reads the hub's frames and keeps the highest round whose bell has rung; the worker's thread compares it with
its own round between two micro-batches. One writer, one reader, one integer: no lock is needed. A late bell of round r
cannot stop round r + 1, since r < r + 1.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from offbeat.live.board import Board
from offbeat.live.errors import PeerFailed
from offbeat.live.group import Group
from offbeat.live.hub import Frame, Word, read_frame


class Bell:
    """This worker's ear and hand at the bell."""

    waited_s = 0.0
    wire_bytes = 0

    def __init__(self, connection: socket.socket, board: Board, patience_s: float) -> None:
        self._connection, self._board, self._patience_s = connection, board, patience_s
        self.rung = self._mine = -1
        self._thread = threading.Thread(target=self._run, name="offbeat-bell", daemon=True)
        self._thread.start()

    def ring(self, r: int, workers: int) -> None:
        """I am through my batch of round ``r``; the bell rings when ``workers`` are."""
        if r > max(self.rung, self._mine):
            self._mine = r  # once a round: a step that is given up and made anew must not count as two workers
            self._tell(Frame(Word.RING, self._board.rank, r, workers))

    def finished(self) -> None:
        """I shall ring no more."""
        self._tell(Frame(Word.FINISHED, self._board.rank))

    def _tell(self, frame: Frame) -> None:
        try:
            self._connection.sendall(frame.pack())
        except OSError as error:
            self._board.check()
            raise PeerFailed(f"rank {self._board.rank} lost the connection to rank 0's hub: {error}") from error

    def _run(self) -> None:
        while (frame := read_frame(self._connection)) is not None and frame.word is not Word.FLUSH:
            if frame.word is Word.RUNG and frame.a > self.rung:
                self.rung = frame.a

    def close(self) -> None:
        self._thread.join(self._patience_s)
        self._connection.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def groups(self) -> list[Group]:
        return []
