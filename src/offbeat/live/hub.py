"""News between clerks: a star of TCP connections around rank 0, where the referee sits.

A worker that arrives tells the hub; the referee decides; "go" reaches every clerk. Two hops, a few small frames, no
tensors. The hub is one thread of rank 0's process; it alone touches the referee, so the referee needs no lock. Frames
from one worker arrive in the order they were sent, and every clerk sees "go" in the order of the rounds.

Until all clerks have come, anybody can knock. Who says nothing, or something else than the token that was posted on the
board, delays nobody; when all have come the door is shut.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import threading
from collections import Counter
from enum import IntEnum
from typing import NamedTuple

from offbeat.live.board import Board
from offbeat.live.errors import OffbeatError
from offbeat.rounds import Referee

FRAME = struct.Struct("<BHqqq")
HELLO = struct.Struct("<16sH")
CONNECT_S = 60.0
MOST_STRANGERS = 128  # that have not said who they are; the oldest must go


class Word(IntEnum):
    """What a frame says."""

    ARRIVED = 1  # position, base, what the next step will contain at least (or −1)
    PASSED = 2  # nothing, base, the same
    BEGAN = 3  # base
    FINISHED = 4
    RENEWED = 5  # base
    GO = 6  # version, started by
    FLUSH = 7  # version
    MEET = 8  # whom
    RING = 9  # round, how many must ring
    RUNG = 10  # round
    STANDS = 11
    BACK = 12
    STARTED = 13  # how many rounds have started: the answer to "back"


class Frame(NamedTuple):
    word: Word
    rank: int
    a: int = 0
    b: int = 0
    c: int = -1

    def pack(self) -> bytes:
        return FRAME.pack(self.word, self.rank, self.a, self.b, self.c)


def read_frame(connection: socket.socket) -> Frame | None:
    """The next frame; None when the other end has closed."""
    try:
        data = connection.recv(FRAME.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(data) < FRAME.size:
        return None
    word, rank, a, b, c = FRAME.unpack(data)
    return Frame(Word(word), rank, a, b, c)


class Hub:
    """Rank 0's side: accepts every clerk, feeds the referee, spreads the news."""

    def __init__(self, referee: Referee, address: str, token: bytes) -> None:
        self._referee, self._token, self._size = referee, token, referee.size
        self._listener = socket.create_server((address, 0), backlog=MOST_STRANGERS)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._ear, self._mouth = socket.socketpair()  # hears that the run is given up
        self._strangers: dict[socket.socket, bytes] = {}
        self._clerks: dict[int, socket.socket] = {}
        self._flushed = False
        self._rings: Counter[int] = Counter()
        self._thread = threading.Thread(target=self._run, name="offbeat-hub", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until every clerk has hung up."""
        self._thread.join(timeout_s)
        self._mouth.close()

    def abandon(self) -> None:
        """Hang up on everybody."""
        self._mouth.close()
        self._thread.join(CONNECT_S)

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._ear, selectors.EVENT_READ)
                if self._let_in(selector):
                    self._serve(selector)
        finally:  # also after a bug of ours: whoever waits then notices
            for connection in (self._listener, self._ear, *self._strangers, *self._clerks.values()):
                connection.close()

    # The door.

    def _let_in(self, selector: selectors.BaseSelector) -> bool:
        """Until every clerk has come; False if the run is given up before."""
        selector.register(self._listener, selectors.EVENT_READ)
        while len(self._clerks) < self._size:
            for knocking in [key.fileobj for key, _ in selector.select()]:
                if knocking is self._ear:
                    return False
                if knocking is self._listener:
                    self._open_door(selector)
                elif isinstance(knocking, socket.socket) and knocking in self._strangers:
                    self._ask_who(knocking, selector)
        for stranger in list(self._strangers):
            self._send_away(stranger, selector)
        selector.unregister(self._listener)
        self._listener.close()
        return True

    def _open_door(self, selector: selectors.BaseSelector) -> None:
        try:
            stranger, _ = self._listener.accept()
        except OSError:
            return  # gone again
        stranger.setblocking(False)
        self._strangers[stranger] = b""
        selector.register(stranger, selectors.EVENT_READ)
        if len(self._strangers) > MOST_STRANGERS:
            self._send_away(next(iter(self._strangers)), selector)

    def _ask_who(self, stranger: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            more = stranger.recv(HELLO.size - len(self._strangers[stranger]))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said = self._strangers[stranger] = self._strangers[stranger] + more
        if more and len(said) < HELLO.size:
            return
        token, rank = HELLO.unpack(said.ljust(HELLO.size, b"\0"))
        if hmac.compare_digest(token, self._token) and rank < self._size and rank not in self._clerks:
            del self._strangers[stranger]
            stranger.setblocking(True)
            stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.unregister(stranger)
            self._clerks[rank] = stranger
        else:
            self._send_away(stranger, selector)

    def _send_away(self, stranger: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(stranger)
        del self._strangers[stranger]
        stranger.close()

    # The news.

    def _serve(self, selector: selectors.BaseSelector) -> None:
        for rank, connection in self._clerks.items():
            selector.register(connection, selectors.EVENT_READ, rank)
        while self._clerks:
            for key, _ in selector.select():
                if key.data is None:
                    return
                connection = self._clerks[key.data]
                frame = read_frame(connection)
                if frame is None:
                    selector.unregister(connection)
                    del self._clerks[key.data]
                    connection.close()
                else:
                    self._hear(frame)

    def _hear(self, frame: Frame) -> None:
        referee, rank, started = self._referee, frame.rank, list[int]()
        next_base = frame.c if frame.c >= 0 else None
        match frame.word:
            case Word.ARRIVED:
                started = referee.arrived(rank, frame.a, frame.b, next_base)
            case Word.PASSED:
                started = referee.passed(rank, frame.b, next_base)
            case Word.BEGAN:
                started = referee.began(rank, frame.b)
            case Word.FINISHED:
                started = referee.finished(rank)
            case Word.RENEWED:
                started = referee.renewed(rank, frame.b)
            case Word.STANDS:
                started = referee.stands(rank)
            case Word.BACK:
                started = referee.back(rank)
            case Word.MEET:
                self._send(frame.a, frame.pack())
            case Word.RING:
                self._rings[frame.a] += 1
                if self._rings[frame.a] == frame.b:
                    self._tell(Frame(Word.RUNG, 0, frame.a))
                    self._rings = Counter({r: n for r, n in self._rings.items() if r >= frame.a})
        for version in started:
            self._tell(Frame(Word.GO, 0, version, rank))
        if frame.word is Word.BACK:
            self._send(rank, Frame(Word.STARTED, 0, referee.started).pack())
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


def lost(board: Board) -> OffbeatError:
    """The error for a connection to the hub that is gone: rank 0 posts its own words, if it can, before it hangs up."""
    try:
        board.check()
        board.fail("the news from rank 0", lost=True)
        return board.lost("the news from rank 0")
    except OffbeatError as error:
        return error
