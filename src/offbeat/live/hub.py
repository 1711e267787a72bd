"""News between clerks: a star of TCP connections around rank 0, where the referee sits.

A worker that arrives tells the hub; the referee decides; "go" reaches every clerk. Two hops, a few small frames, no
tensors. The hub is one thread of rank 0's process; it alone touches the referee, so the referee needs no lock. Frames
from one worker arrive in the order they were sent, and every clerk sees "go" in the order of the rounds.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

from offbeat.rounds import Referee

FRAME = struct.Struct("<BHqq")
HELLO = struct.Struct("<16sH")
CONNECT_S = 60.0


class Word(IntEnum):
    """What a frame says."""

    ARRIVED = 1  # position, base
    PASSED = 2  # base
    BEGAN = 3  # base
    FINISHED = 4
    RENEWED = 5  # base
    GO = 6  # version, started by
    FLUSH = 7  # version
    MEET = 8  # whom
    RING = 9  # round, how many must ring
    RUNG = 10  # round


@dataclass(frozen=True)
class Frame:
    word: Word
    rank: int
    a: int = 0
    b: int = 0

    def pack(self) -> bytes:
        return FRAME.pack(self.word, self.rank, self.a, self.b)


def read_frame(connection: socket.socket) -> Frame | None:
    """The next frame; None when the other end has closed."""
    data = b""
    while len(data) < FRAME.size:
        try:
            more = connection.recv(FRAME.size - len(data))
        except OSError:
            return None
        if not more:
            return None
        data += more
    word, rank, a, b = FRAME.unpack(data)
    return Frame(Word(word), rank, a, b)


class Hub:
    """Rank 0's side: accepts every clerk, feeds the referee, spreads the news."""

    def __init__(self, referee: Referee, address: str, token: bytes) -> None:
        self._referee, self._token, self._size = referee, token, referee.size
        self._listener = socket.create_server((address, 0), backlog=referee.size)
        self._listener.settimeout(CONNECT_S)
        self.port = int(self._listener.getsockname()[1])
        self._clerks: dict[int, socket.socket] = {}
        self._flushed = False
        self._rings: Counter[int] = Counter()
        self._thread = threading.Thread(target=self._run, name="offbeat-hub", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until every clerk has hung up."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while len(self._clerks) < self._size:
                self._accept()
        except OSError:
            return  # the clerks notice that nobody answers
        finally:
            self._listener.close()
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._clerks.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while self._clerks:
                for key, _ in selector.select():
                    connection = self._clerks[key.data]
                    frame = read_frame(connection)
                    if frame is None:
                        selector.unregister(connection)
                        del self._clerks[key.data]
                        connection.close()
                    else:
                        self._hear(frame)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(CONNECT_S)
        try:
            token, rank = HELLO.unpack(_exactly(connection, HELLO.size))
        except OSError:
            connection.close()  # a stranger that says nothing, or hangs up
            return
        if not hmac.compare_digest(token, self._token) or rank >= self._size or rank in self._clerks:
            connection.close()
            return
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clerks[rank] = connection

    def _hear(self, frame: Frame) -> None:
        referee, started = self._referee, list[int]()
        if frame.word is Word.ARRIVED:
            started = referee.arrived(frame.rank, frame.a, frame.b)
        elif frame.word is Word.PASSED:
            started = referee.passed(frame.rank, frame.b)
        elif frame.word is Word.BEGAN:
            started = referee.began(frame.rank, frame.b)
        elif frame.word is Word.FINISHED:
            started = referee.finished(frame.rank)
        elif frame.word is Word.RENEWED:
            referee.renewed(frame.rank, frame.b)
        elif frame.word is Word.MEET:
            self._send(frame.a, frame.pack())
        elif frame.word is Word.RING:
            self._rings[frame.a] += 1
            if self._rings[frame.a] == frame.b:
                self._tell(Frame(Word.RUNG, 0, frame.a))
                self._rings = Counter({r: n for r, n in self._rings.items() if r >= frame.a})
        for version in started:
            self._tell(Frame(Word.GO, 0, version, frame.rank))
        if referee.all_finished and not self._flushed:
            self._flushed = True
            self._tell(Frame(Word.FLUSH, 0, referee.started, 0))

    def _tell(self, frame: Frame) -> None:
        data = frame.pack()
        for rank in self._clerks:
            self._send(rank, data)

    def _send(self, rank: int, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a worker that is gone: whoever waits for its tensors will say so
            if rank in self._clerks:
                self._clerks[rank].sendall(data)


def connect(address: str, port: int, token: bytes, rank: int) -> socket.socket:
    """A clerk's connection to the hub."""
    connection = socket.create_connection((address, port), timeout=CONNECT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(HELLO.pack(token, rank))
    connection.settimeout(None)
    return connection


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("closed before it had said who it is")
        data += more
    return data
