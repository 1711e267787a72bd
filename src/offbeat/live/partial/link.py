"""A worker's line to the hub: what it says goes out from the worker's thread, what it hears comes in on one of its own.

``lock`` protects whatever the two threads share; it is the owner's to say what. An error on the listening thread is
kept under it, and raised in the worker's thread by whoever looks: nobody waits for a listener that has ended.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from offbeat.live.transport.errors import OffbeatError, PeerFailed
from offbeat.live.transport.hub import Frame, Word, read_frame
from offbeat.live.worker.board import Board

LOOK_S = 0.1  # how often a waiting worker looks at the board
LEAVE_S = 5.0


class Link:
    """One connection, one thread. ``rank`` is how the hub knows this end."""

    def __init__(self, owner: str, connection: socket.socket, rank: int, board: Board, patience_s: float) -> None:
        self._owner, self._connection, self._rank = owner, connection, rank
        self._board, self._patience_s = board, patience_s
        self.lock = threading.Condition()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self.hung_up = False
        self._sending = threading.RLock()  # the listener may answer while the worker speaks; frames stay whole

    def listen(self, hear: Callable[[Frame], bool]) -> None:
        """Give every frame to ``hear``, on a thread of its own, until it answers that this was the last."""
        self.alongside(lambda: self._read(hear))

    def alongside(self, work: Callable[[], None]) -> None:
        """Do it on a thread of its own, whose error is kept as the listener's."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                with self.lock:
                    self._failure = error
                    self.lock.notify_all()

        thread = threading.Thread(target=run, name=f"offbeat-{self._owner}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _read(self, hear: Callable[[Frame], bool]) -> None:
        over = False
        while not over:
            frame = read_frame(self._connection)
            if self.hung_up:
                return
            if frame is None:
                raise self._board.lost("the news from rank 0")
            over = hear(frame)

    def tell(self, word: Word, a: int = 0, b: int = 0) -> None:
        self.send(Frame(word, self._rank, a, b))

    def send(self, frame: Frame) -> None:
        try:
            with self._sending:
                self._connection.sendall(frame.pack())
        except OSError as error:
            raise self._board.lost("the news from rank 0") from error

    def mention(self, word: Word, a: int = 0, text: str = "") -> None:
        """The same from a place where nothing may be raised: whoever looks next hears that the line is cut."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.sendall(Frame(word, self._rank, a, text=text).pack())

    def check(self) -> None:
        """Raise what ended the listener, if something did."""
        if isinstance(self._failure, OffbeatError):
            raise self._failure
        if self._failure is not None:
            words = f"rank {self._board.rank}'s {self._owner} failed: {self._failure}"
            raise PeerFailed(words) from self._failure

    def forget_failure(self) -> None:
        """The run is over. An error knows the frames it passed through, and these all that they worked on."""
        self._failure = None

    def close(self) -> None:
        """The listener has heard its last frame."""
        for thread in self._threads:
            thread.join(self._patience_s)
        self._connection.close()

    def abandon(self, give_up: Callable[[], None] = lambda: None) -> None:
        """Hang up without waiting for anybody; ``give_up`` ends what the listener waits for."""
        self.hung_up = True  # before the listener can notice: it is not to look for whoever is missing
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        give_up()
        for thread in self._threads:
            thread.join(LEAVE_S)
        self._connection.close()
