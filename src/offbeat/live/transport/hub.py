"""News between workers: a star of connections around a hub, which rank 0 starts.

A hub is one thread of rank 0's process, or a process of its own. Every worker has one connection to it; what a frame
means is a *handler's* business, which alone is called by that thread and so needs no lock. Frames from one worker are
heard in the order they were sent, and what the handler answers reaches every worker in one order. No tensor passes a
hub.

Until all workers have come, anybody can knock. Who says nothing, or something else than the token that lies in the
job's store, delays nobody; when all have come the door is shut.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

HEAD = struct.Struct("<BHqqqII")
HELLO = struct.Struct("<16sH")
CONNECT_S = 60.0
MOST_STRANGERS = 128  # that have not said who they are; the oldest must go
LONGEST = 1 << 24
# A host that vanishes says nothing. Its silence is noticed after 10 + 3 · 5 s; a process that is merely stopped is not
# silent in this sense, since its kernel answers.
ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Word(IntEnum):
    """What a frame says."""

    # Rounds.
    ARRIVED = 1  # position, base, what the next step will contain at least (or −1)
    PASSED = 2  # nothing, base, the same
    BEGAN = 3  # base
    FINISHED = 4
    RENEWED = 5  # base
    GO = 6  # version, started by; who takes part, as text, if that is not everyone
    FLUSH = 7  # version
    STANDS = 8
    BACK = 9
    STARTED = 10  # how many rounds have started that this worker has a part in: the answer to "back"
    WHERE = 11  # to a worker that a round waits for: where are you?
    ELSEWHERE = 12  # where I am, as text: the answer to "where"
    OVER = 36  # a round is over at my seat
    # Shared weights, and the bell.
    MEET = 13  # whom
    RING = 14  # round, how many must ring
    RUNG = 15  # round
    # The lifeline.
    FACT = 16  # name and value
    FAILED = 17  # why
    GONE = 18  # who
    BYE = 19
    WHAT = 20  # number of the question
    DOING = 21  # number of the question, who asked; what I am doing
    # The desk. A worker that comes again says beside which of the sums it was given it has seen complete.
    OPEN = 22  # place of the first deposit (−1: none), first step, whether events are logged (1), it takes spares (2)
    OFFER = 23  # place, step
    NEXT = 24  # the next result, for one without a step to take
    NOTHING = 25  # waits no longer for the next result
    CATCH_UP = 26  # how many results
    OWED = 27
    MERGE = 28  # place; the places whose sum it holds
    ADD = 29  # place of the step
    SHIFT = 30  # place of the difference
    ANSWER = 31
    WANTED = 32  # nothing, how many results this worker waits for
    NEWEST = 33  # what shared weights have become since they were shown
    SPARE = 35  # how many results my replica holds, of how many vectors it consists; what is said of them
    READ = 37  # what I was given is read no longer
    ROOM = 38  # where can I lay something down? 1: none of my own slots will do
    GIVE = 39  # place that is mine, and that I do not need
    # Inside an island.
    EVENT = 34  # number; what has happened at the leader's seat, as text


class Frame(NamedTuple):
    word: Word
    rank: int
    a: int = 0
    b: int = 0
    c: int = -1
    text: str = ""
    data: bytes = b""

    def pack(self) -> bytes:
        text = self.text.encode()
        return HEAD.pack(self.word, self.rank, self.a, self.b, self.c, len(text), len(self.data)) + text + self.data


Letter = tuple[int | None, Frame]  # to whom (None: to all), what


class Handler(Protocol):
    """What a hub does with what it hears. Only the hub's thread calls it."""

    def hear(self, frame: Frame) -> Iterable[Letter]:
        """A worker says something."""
        ...

    def gone(self, rank: int) -> Iterable[Letter]:
        """A worker's connection has closed."""
        ...

    @property
    def pause_s(self) -> float | None:
        """After how long a silence ``silence`` is called; None: never."""
        ...

    def silence(self) -> Iterable[Letter]:
        """Nobody has said anything for that long."""
        ...


class Ear(Protocol):
    """What a service hears at that the run is given up: it can be read from then on."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Quiet:
    """A handler that minds neither silence nor connections that close."""

    pause_s: float | None = None

    def gone(self, rank: int) -> Iterable[Letter]:
        return ()

    def silence(self) -> Iterable[Letter]:
        return ()


def read_frame(connection: socket.socket) -> Frame | None:
    """The next frame; None when the other end has closed."""
    try:
        data = connection.recv(HEAD.size, socket.MSG_WAITALL)
        if len(data) < HEAD.size:
            return None
        word, rank, a, b, c, text_length, data_length = HEAD.unpack(data)
        length, more = text_length + data_length, b""
        if length:
            if length > LONGEST:
                return None
            more = connection.recv(length, socket.MSG_WAITALL)
            if len(more) < length:
                return None
    except OSError:
        return None
    return Frame(Word(word), rank, a, b, c, more[:text_length].decode(), more[text_length:])


# A data loader that a worker forks must not hold these open: the others would not hear that its worker has died.
_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for connection in list(_ours):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class Entrance:
    """Where workers come to a hub: a port, and for those of its host a Unix socket without a file."""

    def __init__(self, address: str, token: bytes) -> None:
        self.address, self.token = address, token
        tcp = socket.create_server((address, 0), backlog=MOST_STRANGERS)
        self.port = int(tcp.getsockname()[1])
        self.listeners = [tcp]
        if hasattr(socket, "AF_UNIX") and sys.platform == "linux":
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix.bind(_unix_name(token))
            unix.listen(MOST_STRANGERS)
            self.listeners.append(unix)

    @property
    def told(self) -> str:
        """What a worker must know to come in."""
        return json.dumps([self.address, self.port, self.token.hex()])


def _unix_name(token: bytes) -> bytes:
    # Not the token itself: names of such sockets can be read by everybody on the machine.
    return b"\0offbeat-hub-" + hashlib.sha256(b"name" + token).hexdigest()[:32].encode()


class Hub:
    """A service in a thread of this process."""

    def __init__(self, handler: Handler, size: int, doors: Entrance) -> None:
        self.port = doors.port
        ear, self._mouth = socket.socketpair()  # hears that the run is given up
        service = Service(handler, size, doors.token, doors.listeners, ear)
        self._thread = threading.Thread(target=service.run, name="offbeat-hub", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until every worker has hung up."""
        self._thread.join(timeout_s)
        self.abandon()

    def abandon(self) -> None:
        """Hang up on everybody. What they have said by now is still passed on."""
        self._mouth.close()
        self._thread.join(CONNECT_S)


class Service:
    """Accepts every worker, asks the handler, spreads the news, until all workers have hung up or ``ear`` has closed.

    A worker that does not read delays nobody: what does not fit into its connection waits here.
    """

    def __init__(self, handler: Handler, size: int, token: bytes, listeners: Sequence[socket.socket], ear: Ear) -> None:
        self._handler, self._token, self._size, self._ear = handler, token, size, ear
        self._listeners = list(listeners)
        for listener in self._listeners:
            listener.setblocking(False)
        self._strangers: dict[socket.socket, bytes] = {}
        self._workers: dict[int, socket.socket] = {}
        self._waiting: dict[int, bytearray] = {}  # what a worker has not read yet
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        try:
            with self._selector as selector:
                selector.register(self._ear, selectors.EVENT_READ)
                if self._let_in(selector):
                    self._serve(selector)
        finally:  # also after a bug of ours: whoever waits then notices
            for connection in (*self._listeners, self._ear, *self._strangers, *self._workers.values()):
                connection.close()

    # The door.

    def _let_in(self, selector: selectors.BaseSelector) -> bool:
        """Until every worker has come; False if the run is given up before."""
        for listener in self._listeners:
            selector.register(listener, selectors.EVENT_READ)
        while len(self._workers) < self._size:
            for knocking in [key.fileobj for key, _ in selector.select()]:
                if knocking is self._ear:
                    return False
                if knocking in self._listeners:
                    self._open_door(knocking, selector)
                elif isinstance(knocking, socket.socket) and knocking in self._strangers:
                    self._ask_who(knocking, selector)
        for stranger in list(self._strangers):
            self._send_away(stranger, selector)
        for listener in self._listeners:
            selector.unregister(listener)
            listener.close()
        return True

    def _open_door(self, door: Any, selector: selectors.BaseSelector) -> None:
        try:
            stranger, _ = door.accept()
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
        if hmac.compare_digest(token, self._token) and rank < self._size and rank not in self._workers:
            del self._strangers[stranger]
            stranger.setblocking(True)
            _prepare(stranger)
            selector.unregister(stranger)
            self._workers[rank] = stranger
            _ours.add(stranger)
        else:
            self._send_away(stranger, selector)

    def _send_away(self, stranger: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(stranger)
        del self._strangers[stranger]
        stranger.close()

    # The news.

    def _serve(self, selector: selectors.BaseSelector) -> None:
        for rank, connection in self._workers.items():
            selector.register(connection, selectors.EVENT_READ, rank)
        given_up = False
        while self._workers:
            ready = selector.select(0.0 if given_up else self._handler.pause_s)
            if not ready and given_up:
                return
            if not ready:
                self._deliver(self._handler.silence())
            for key, events in ready:
                if key.data is None:
                    given_up = True
                    selector.unregister(self._ear)
                    continue
                if events & selectors.EVENT_WRITE:
                    self._send(key.data, b"")
                if events & selectors.EVENT_READ and key.data in self._workers:
                    self._read(key.data, selector)

    def _read(self, rank: int, selector: selectors.BaseSelector) -> None:
        connection = self._workers[rank]
        frame = read_frame(connection)
        if frame is not None:
            self._deliver(self._handler.hear(frame))
            return
        selector.unregister(connection)
        del self._workers[rank]
        self._waiting.pop(rank, None)
        connection.close()
        self._deliver(self._handler.gone(rank))

    def _deliver(self, letters: Iterable[Letter]) -> None:
        for rank, frame in letters:
            data = frame.pack()
            for one in list(self._workers) if rank is None else (rank,):
                if one in self._workers:
                    self._send(one, data)

    def _send(self, rank: int, data: bytes) -> None:
        """As much as the connection takes now; the rest when it takes more."""
        connection, rest = self._workers[rank], self._waiting.pop(rank, bytearray())
        was_full = bool(rest)
        rest += data
        with contextlib.suppress(OSError):  # it is full, or its worker is gone, which its connection says, too
            while rest:
                sent = connection.send(rest, socket.MSG_DONTWAIT)
                del rest[:sent]
        if rest:
            self._waiting[rank] = rest
        if was_full != bool(rest):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rest else 0)
            self._selector.modify(connection, events, rank)


def connect(told: str, rank: int) -> socket.socket:
    """A worker's connection to a hub, of which it was ``told``: on the hub's own host without the network."""
    address, port, token_hex = json.loads(told)
    token = bytes.fromhex(token_hex)
    connection = _connect_here(token)
    if connection is None:
        connection = socket.create_connection((address, port), timeout=CONNECT_S)
        _prepare(connection)
    _ours.add(connection)
    connection.sendall(HELLO.pack(token, rank))
    connection.settimeout(None)
    return connection


def _connect_here(token: bytes) -> socket.socket | None:
    """By the Unix socket, which is found only in the hub's own network namespace."""
    if not hasattr(socket, "AF_UNIX") or sys.platform != "linux":
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_S)
    try:
        connection.connect(_unix_name(token))
    except OSError:
        connection.close()
        return None
    return connection


def _prepare(connection: socket.socket) -> None:
    if connection.family == getattr(socket, "AF_UNIX", None):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def own_address() -> str:
    """Where rank 0 can be reached: at the address torch.distributed met at, if that is this machine's."""
    for host in (os.environ.get("MASTER_ADDR", "127.0.0.1"), socket.gethostname()):
        try:
            address = socket.gethostbyname(host)
            socket.create_server((address, 0)).close()
        except OSError:
            continue
        return address
    return "127.0.0.1"
