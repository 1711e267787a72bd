"""The connections of a host process to those of the other hosts of a job.

Two host processes have one TCP connection, which the one with the larger name dials. It begins with a challenge to
each of the two: an HMAC-SHA256 under the job's secret over both nonces, both names and who dialled. Before that proof
no more than a kilobyte is read from it. Afterwards nothing is encrypted: strangers are kept out, but not somebody who
can read or change what is on the cable.

**Exactly once.** Messages to a peer are numbered, and kept until the peer says that it has them. A connection that
breaks is dialled anew; both say then how much they have heard, and go on from there, within a vector too. Only when
that does not succeed for ``REDIAL_S`` is the peer lost, and for good: a later process of the same name is another peer.

**Silence.** Each gives the other a sign every few seconds. A connection by which nothing comes for ``SILENT_S`` is
broken, whatever the kernel there says: its process may be stopped. So a peer is lost ``SILENT_S`` and ``REDIAL_S``
after its last word at the latest.

**Two orders.** A message with a vector goes in chunks, and messages without one pass between them. So messages without
a vector come in the order in which they were sent, and messages with one do; a message of the one sort may be heard
before an earlier one of the other.

On the line each frame has a head: its kind, the length of what follows, its number, how many messages and vectors the
sender has heard, and how long ago the last of these messages came. So every answer measures the trip, in both
directions, without two clocks to compare. What follows the head is a message as in protocol.py, or a chunk, which is
received straight into the memory it is meant for.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from offbeat.live.host.protocol import HEAD, KINDS, LONGEST, LONGEST_HELLO, Challenge, Inbox, Knock, Proof, packed

VERSION = 4  # of all that is said here
CHUNK_BYTES = 1 << 20  # of a vector, between which messages pass
TURN_BYTES = 1 << 21  # that a connection sends, and receives, in a turn of the loop
UNSENT_BYTES = 1 << 19  # in the kernel, ahead of a message that comes next
SCRATCH_BYTES = 1 << 16
MOST_UNPROVED = 128  # connections; the oldest must go
MOST_BUFFERS = 512  # in a call to the kernel

PROOF_S = 5.0  # for both to prove themselves
FIRST_S = 120.0  # for a peer to dial for the first time: it may hear of this process much later
REDIAL_S = 20.0  # for a connection to come back
REFUSED_S = 2.0  # nobody listens where the peer did: its process has ended
PROBE_S = 0.2  # for a peer to dial again, before it is looked whether it is there
PAUSES_S = (0.05, 1.0)  # between two tries, at first and at most
SILENT_S = 20.0  # without a sign of the other process or its kernel: the connection is broken
BEAT_S = 4.0  # after so long without a word to the other, it is given a sign
HEARD_S = 0.01  # until a message is acknowledged, if there is nothing to say to the peer
HEARD_MESSAGES = 32  # that are acknowledged at once
TRIPS = 15  # the last ones, whose median counts

_FRAME = struct.Struct("<BIQQQd")  # kind, length, number, messages heard, vectors heard, seconds since the last message
_NBYTES = struct.Struct("<Q")
_MESSAGE, _VECTOR, _CHUNK, _HEARD, _BYE = range(5)
_LOST = (-1, -1, -1)  # what has been heard of a peer that was lost
_LONGEST_BYE = 1 << 10
_LONGEST_NAME = 200

Address = tuple[str, int]


class _Nonsense(Exception):
    """What no process that runs this file says."""


class _Letter:
    """A message to a peer. ``at``: how much of its vector has been given to the connection; −1: not even its head.
    ``sent_s``: when it was given to the connection.
    """

    __slots__ = ("acknowledged", "at", "message", "nbytes", "sent_s", "vector")

    def __init__(self, message: bytes, vector: list[memoryview], acknowledged: Callable[[], None] | None) -> None:
        self.message, self.vector, self.acknowledged = message, vector, acknowledged
        self.nbytes, self.at, self.sent_s = sum(map(len, vector)), -1, 0.0


class _Stream:
    """Numbered letters of one sort to a peer, kept until it has them."""

    def __init__(self) -> None:
        self.waiting, self.sent, self.done = deque[_Letter](), deque[_Letter](), 0

    @property
    def number(self) -> int:
        """Of the first that waits."""
        return self.done + len(self.sent)

    def heard(self, upto: int) -> list[_Letter]:
        """The peer has so many. Those that it had not before."""
        if not self.done <= upto <= self.number:
            raise _Nonsense(f"that it has heard {upto} messages, of {self.number} after {self.done}")
        new = [self.sent.popleft() for _ in range(upto - self.done)]
        self.done = upto
        return new

    def again(self) -> None:
        """What the peer does not have waits anew."""
        self.waiting.extendleft(reversed(self.sent))
        self.sent.clear()
        for letter in self.waiting:
            letter.at = -1


class _Coming:
    """A message whose vector is on its way. Without ``room`` the vector is received and dropped."""

    def __init__(self, message: Any, nbytes: int, room: list[memoryview]) -> None:
        self.message, self.nbytes, self.room, self.at = message, nbytes, room, 0


class PeerState(NamedTuple):
    """How another host process is connected, for whoever looks. Moments are those of ``time.monotonic``.

    ``stalls_s``: since when it has owed an acknowledgement, without a byte either way; None: it owes none.
    """

    name: str
    address: str
    is_connected: bool
    words: str
    heard_s: float | None
    stalls_s: float | None
    sent_bytes: int
    received_bytes: int


class _Peer:
    """Another host process, over all its connections."""

    def __init__(self, name: str, until_s: float) -> None:
        self.name, self.life = name, ""
        self.address: Address | None = None
        self.line: _Line | None = None  # proved, or dialled
        self.messages, self.vectors = _Stream(), _Stream()
        self.heard_messages, self.heard_vectors = 0, 0
        self.came_s = 0.0  # when the last message did
        self.trips_s = deque[float](maxlen=TRIPS)  # there and back
        self.told = (0, 0)  # what the peer knows of that
        self.tell_s: float | None = None  # when it is to know
        self.coming: _Coming | None = None
        self.is_lost = False
        # Without a connection: until when, when to try again, what went wrong, and since when nobody listens there.
        self.until_s, self.try_s, self.pause_s = until_s, 0.0, PAUSES_S[0]
        self.words = "it has not been reached"
        self.since_s = time.monotonic()
        self.refused_s: float | None = None
        self.sent_bytes, self.received_bytes = 0, 0
        self.sent_s: float | None = None  # when bytes went to it and came from it the last time
        self.heard_s: float | None = None
        self.proved_s = 0.0  # when its connection came about

    @property
    def is_connected(self) -> bool:
        return self.line is not None and self.line.is_proved

    @property
    def silent_since_s(self) -> float:
        """Since when nothing has come by its connection."""
        return max(self.proved_s, self.heard_s or 0.0)

    @property
    def has_heard(self) -> tuple[int, int]:
        return self.heard_messages, self.heard_vectors


class _Line:
    """One connection, from its first byte on. ``role``: who this process is in it; a probe only looks whether
    somebody listens.
    """

    def __init__(self, line: socket.socket, role: str, peer: _Peer | None, until_s: float) -> None:
        self.line, self.role, self.peer, self.until_s = line, role, peer, until_s
        self.is_open, self.is_proved, self.is_connecting = True, False, role != "accepts"
        self.events = 0
        self.inbox, self.heard = Inbox(LONGEST_HELLO), bytearray()
        self.out: deque[memoryview] = deque()
        self.chunk = 0  # bytes of it that are still to come
        self.sends, self.receives = TURN_BYTES, TURN_BYTES  # in this turn
        self.nonce = secrets.token_hex(16)
        self.knock: Knock | None = None
        self.challenge: Challenge | None = None


class Links:
    """The connections of this host process to those of the other hosts of a job.

    ``hear(peer, message)``: a message has come, with its whole vector if it has one. ``room(peer, message, nbytes)``:
    where the vector that follows is to be written, in all ``nbytes``; nothing: it is dropped. ``lost(peer, words)``:
    the peer is gone for good, nothing is read from its vectors or written into its room any more, and what is sent to
    it goes nowhere. All of them may call what is here.
    """

    def __init__(
        self,
        me: str,
        secret: bytes,
        selector: selectors.BaseSelector,
        hear: Callable[[str, Any], None],
        room: Callable[[str, Any, int], Sequence[memoryview]],
        lost: Callable[[str, str], None],
    ) -> None:
        if not secret:
            raise ValueError("a job's secret is empty; anybody could join it")
        self.me, self._secret, self._selector = _named(me), secret, selector
        self._hear, self._room, self._tell_lost = hear, room, lost
        self._life = secrets.token_hex(8)
        self._listener: socket.socket | None = None
        self._listens_at: Address | None = None
        self._peers: dict[str, _Peer] = {}
        self._unproved: dict[_Line, None] = {}  # that others have dialled, oldest first
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._next_head = memoryview(bytearray(_FRAME.size))

    # Who is where.

    def listen(self, address: str, port: int = 0) -> Address:
        """Be reachable at that address of this host, and at no other. The address and the port."""
        if self._listens_at is not None:
            if self._listens_at[0] != address or port not in (0, self._listens_at[1]):
                raise ValueError(f"{self.me} listens at {self._listens_at} already, not at {(address, port)}")
            return self._listens_at
        if ipaddress.ip_address(address).is_unspecified:
            raise ValueError(f"{address} means every network of this host; give the address that other hosts reach")
        listener = _socket(address)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(MOST_UNPROVED)
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"no connections can be had at {address}, port {port}: {error}") from error
        self._listener, self._listens_at = listener, (address, listener.getsockname()[1])
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return self._listens_at

    def know(self, peer: str, address: str, port: int) -> None:
        """A peer listens there."""
        ipaddress.ip_address(address)
        if _named(peer) == self.me:
            raise ValueError(f"{peer} is the name of this host process itself")
        now_s = time.monotonic()
        one = self._peers.get(peer)
        if one is None:
            one = self._peers[peer] = _Peer(peer, now_s + (REDIAL_S if self.me > peer else FIRST_S))
        one.address = (address, port)
        if self.me > peer:
            self._try(one, now_s)

    def part_with(self, peer: str, words: str) -> None:
        """The peer is lost, and for good, by a decision that was made elsewhere; ``lost`` is told, if it was not."""
        if peer in self._peers:
            self._lose(self._peers[peer], words)

    def where(self, peer: str) -> str:
        """Its address, in words."""
        one = self._peers.get(peer)
        return f"{one.address[0]}:{one.address[1]}:" if one is not None and one.address is not None else ""

    def forget(self, peer: str) -> None:
        """Part with a peer, without a word to ``lost``. A later process of that name may come."""
        if peer in self._peers:
            self._part(self._peers.pop(peer), "it was sent away")

    def send(
        self,
        peer: str,
        message: Any,
        vector: Sequence[memoryview] = (),
        acknowledged: Callable[[], None] | None = None,
    ) -> None:
        """Say it, as soon as there is a connection. ``vector`` is read until ``acknowledged`` is called, which is when
        the peer has all of it, or until the peer is lost.
        """
        one = self._peers.get(peer)
        if one is None:
            raise KeyError(f"{self.me} knows no host process {peer}; it has to be told where that listens")
        if not one.is_lost:
            letter = _Letter(packed(message), [part for part in map(_bytes, vector) if len(part)], acknowledged)
            (one.vectors if letter.nbytes else one.messages).waiting.append(letter)

    def owes(self, peer: str) -> int:
        """How many messages the peer is not known to have."""
        one = self._peers.get(peer)
        return 0 if one is None else sum(len(s.waiting) + len(s.sent) for s in (one.messages, one.vectors))

    def trip_s(self, peer: str) -> float:
        """How long a message takes until the peer has read it, as far as it is known."""
        one = self._peers.get(peer)
        return statistics.median(one.trips_s) / 2 if one is not None and one.trips_s else 0.0

    def peers(self) -> list[PeerState]:
        """How everybody is connected."""
        found = []
        for one in self._peers.values():
            owes = self.owes(one.name) > 0
            moments = [moment for moment in (one.sent_s, one.heard_s) if moment is not None]
            found.append(
                PeerState(
                    one.name,
                    f"{one.address[0]}:{one.address[1]}" if one.address else "",
                    one.is_connected,
                    one.words,
                    one.heard_s,
                    max(moments) if owes and moments else None,
                    one.sent_bytes,
                    one.received_bytes,
                )
            )
        return found

    @property
    def owes_anybody(self) -> bool:
        """Whether some peer is not known to have all that it was told."""
        return any(not peer.is_lost and self.owes(name) for name, peer in self._peers.items())

    # The loop.

    def flush(self) -> None:
        """As much as the connections take now. Called once in a turn."""
        for peer in list(self._peers.values()):
            line = peer.line
            if line is None or not line.is_proved:
                continue
            if not line.out and line.sends > 0:  # else the selector says when there is room
                self._write(line)
            line.sends, line.receives = TURN_BYTES, TURN_BYTES

    @property
    def wakes_s(self) -> float | None:
        """When ``on_time`` has something to do."""
        times = [line.until_s for line in self._unproved]
        for peer in self._peers.values():
            if peer.is_lost:
                continue
            if peer.is_connected:
                if peer.tell_s is not None and peer.line is not None and not peer.line.out:
                    times.append(peer.tell_s)
                times.append(peer.silent_since_s + SILENT_S)
                if peer.tell_s is None and peer.line is not None and not peer.line.out:
                    times.append((peer.sent_s or 0.0) + BEAT_S)
            else:
                times.append(peer.until_s)
                if peer.line is not None:
                    times.append(peer.line.until_s)
                elif peer.address is not None and (self.me > peer.name or peer.life):
                    times.append(peer.try_s)
        return min(times, default=None)

    def on_time(self, now_s: float) -> None:
        """Whatever is due."""
        for line in [one for one in self._unproved if now_s >= one.until_s]:
            self._drop(line)
        for peer in list(self._peers.values()):
            if peer.is_lost:
                continue
            if peer.line is not None and peer.is_connected:
                if now_s >= peer.silent_since_s + SILENT_S:
                    self._failed(peer.line, f"it has given no sign of life for {SILENT_S:.0f} s", now_s)
                elif now_s >= (peer.sent_s or 0.0) + BEAT_S and peer.tell_s is None:
                    peer.tell_s = now_s
                continue
            if peer.line is not None and now_s >= peer.line.until_s:
                self._failed(peer.line, f"it does not answer for {PROOF_S:.0f} s", now_s)
            if not peer.is_lost and now_s >= peer.until_s:
                self._lose(peer, f"{peer.words}, and no connection came about in {now_s - peer.since_s:.0f} s")
            elif not peer.is_lost and (self.me > peer.name or peer.life):
                self._try(peer, now_s)

    def close(self) -> None:
        """Say goodbye to everybody, as far as the connections take it now. What peers do not have is gone."""
        for peer in self._peers.values():
            self._part(peer, "it has ended")
        self._peers.clear()
        for line in list(self._unproved):
            self._drop(line)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = self._listens_at = None

    # How connections come about.

    def _try(self, peer: _Peer, now_s: float) -> None:
        """Dial, if it is time. Whose peer dials looks whether the peer still listens, once a connection has broken."""
        if peer.line is not None or peer.is_lost or peer.address is None or now_s < peer.try_s:
            return
        dialled = _socket(peer.address[0])
        line = _Line(dialled, "dials" if self.me > peer.name else "probes", peer, now_s + PROOF_S)
        peer.line = line
        code = dialled.connect_ex(peer.address)
        if code in (0, errno.EINPROGRESS):
            self._await(line, selectors.EVENT_WRITE)
        else:
            self._failed(line, _words(code), now_s, code == errno.ECONNREFUSED)

    def _failed(self, line: _Line, words: str, now_s: float, refused: bool = False) -> None:
        """A connection did not come about, or has broken."""
        peer, was_proved = line.peer, line.is_proved
        self._drop(line)
        if peer is None or peer.line is not line:
            return
        peer.line, peer.words = None, words
        if was_proved:
            peer.since_s = now_s
            peer.until_s, peer.pause_s, peer.refused_s = now_s + REDIAL_S, PAUSES_S[0], None
            peer.try_s = now_s if self.me > peer.name else now_s + PROBE_S
            return
        peer.try_s, peer.pause_s = now_s + peer.pause_s, min(2 * peer.pause_s, PAUSES_S[1])
        if not refused:
            peer.refused_s = None
        elif peer.refused_s is None:
            peer.refused_s = now_s
        elif now_s - peer.refused_s >= REFUSED_S:
            self._lose(peer, f"nobody listens there any more ({words})")

    def _accept(self) -> None:
        for _ in range(MOST_UNPROVED):
            try:
                assert self._listener is not None
                line, _ = self._listener.accept()
            except OSError:
                return
            line.setblocking(False)
            one = _Line(line, "accepts", None, time.monotonic() + PROOF_S)
            self._unproved[one] = None
            self._await(one, selectors.EVENT_READ)
            if len(self._unproved) > MOST_UNPROVED:
                self._drop(next(iter(self._unproved)))

    def _await(self, line: _Line, events: int) -> None:
        if line.events == 0:
            self._selector.register(line.line, events, lambda: self._ready(line))
        elif line.events != events:
            self._selector.modify(line.line, events, self._selector.get_key(line.line).data)
        line.events = events

    def _drop(self, line: _Line) -> None:
        """Close a connection."""
        self._unproved.pop(line, None)
        if line.is_open:
            line.is_open = False
            if line.events:
                self._selector.unregister(line.line)
            line.line.close()
            line.out.clear()

    def _ready(self, line: _Line) -> None:
        """Something can be read or written."""
        if not line.is_open:  # since the selector looked
            return
        try:
            if line.is_connecting:
                self._connected(line)
            elif not line.is_proved:
                self._greet(line)
            else:
                with contextlib.suppress(BlockingIOError):
                    self._read(line)
                if line.is_open and line.sends > 0:
                    self._write(line)
        except BlockingIOError:
            pass
        except OSError as error:
            self._failed(line, str(error), time.monotonic())
        except _Nonsense as nonsense:
            if line.is_proved and line.peer is not None:
                self._lose(line.peer, f"it said {nonsense}")
            else:
                self._failed(line, str(nonsense), time.monotonic())

    def _connected(self, line: _Line) -> None:
        peer, code = line.peer, line.line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        assert peer is not None
        if code:
            self._failed(line, _words(code), time.monotonic(), code == errno.ECONNREFUSED)
        elif line.role == "probes":
            self._failed(line, "it does not come back", time.monotonic())
        else:
            line.is_connecting = False
            line.knock = Knock(VERSION, self.me, peer.name, line.nonce, self._life)
            line.line.sendall(packed(line.knock))
            self._await(line, selectors.EVENT_READ)

    # Proofs. No more is read than a message of the greeting is long.

    def _greet(self, line: _Line) -> None:
        while line.is_open and not line.is_proved:
            wants = HEAD.size
            if len(line.heard) >= wants:
                length, kind = HEAD.unpack_from(line.heard)
                if length > LONGEST_HELLO or kind >= len(KINDS):
                    raise _Nonsense("what no host process of this job says")
                wants += length
            if len(line.heard) < wants:
                data = line.line.recv(wants - len(line.heard))
                if not data:
                    raise ConnectionError("it hangs up before it has proved itself; does it have the job's secret?")
                line.heard += data
                continue
            body = bytes(line.heard)
            line.heard.clear()
            try:
                message, *_ = line.inbox.feed(body)
            except ValueError as error:
                raise _Nonsense(str(error)) from error
            if line.role == "accepts":
                self._answer(line, message)
            else:
                self._challenged(line, message)

    def _answer(self, line: _Line, message: Any) -> None:
        """What the one who was dialled says."""
        if line.knock is None:
            if not isinstance(message, Knock) or message.version != VERSION or message.peer != self.me:
                raise _Nonsense("what nobody says who wants to talk to this host process")
            if not self.me < message.name or len(message.name) > _LONGEST_NAME:
                raise _Nonsense("a name that does not dial")
            line.knock, line.challenge = message, Challenge(line.nonce, self._life)
            line.line.sendall(packed(line.challenge))
            return
        self._check(line, message, "dials")
        self._unproved.pop(line)
        peer = self._peers.get(line.knock.name)
        if peer is None:
            peer = self._peers[line.knock.name] = _Peer(line.knock.name, time.monotonic() + FIRST_S)
        if peer.life not in ("", line.knock.life) and not peer.is_lost:
            self._lose(peer, "its process has ended, and there is another of its name")
        if peer.is_lost:
            line.line.sendall(packed(self._prove(line, "accepts", _LOST)))
            self._say_bye(line)
            return
        old, peer.line, line.peer, peer.life = peer.line, line, peer, line.knock.life
        if old is not None:
            self._drop(old)
        line.line.sendall(packed(self._prove(line, "accepts", self._state(peer))))
        self._go_on(line, peer, message)

    def _challenged(self, line: _Line, message: Any) -> None:
        """What the one who dialled says."""
        peer = line.peer
        assert peer is not None
        if line.challenge is None:
            if not isinstance(message, Challenge):
                raise _Nonsense("something else than a challenge")
            line.challenge = message
            line.line.sendall(packed(self._prove(line, "dials", self._state(peer))))
            return
        self._check(line, message, "accepts")
        if peer.life not in ("", line.challenge.life):
            self._lose(peer, "its process has ended, and there is another of its name")
            return
        if (message.messages, message.vectors, message.at) == _LOST:
            self._lose(peer, "it has lost this host process before")
            return
        peer.life = line.challenge.life
        self._go_on(line, peer, message)

    def _state(self, peer: _Peer) -> tuple[int, int, int]:
        return *peer.has_heard, -1 if peer.coming is None else peer.coming.at

    def _prove(self, line: _Line, role: str, state: tuple[int, int, int]) -> Proof:
        assert line.knock is not None
        assert line.challenge is not None
        text = json.dumps([role, *line.knock, *line.challenge, *state]).encode()
        return Proof(hmac.new(self._secret, text, hashlib.sha256).hexdigest(), *state)

    def _check(self, line: _Line, message: Any, role: str) -> None:
        if not isinstance(message, Proof):
            raise _Nonsense("something else than a proof")
        right = self._prove(line, role, (message.messages, message.vectors, message.at))
        if not hmac.compare_digest(right.proof.encode(), message.proof.encode(errors="replace")):
            raise _Nonsense("no proof that it has the job's secret")

    def _go_on(self, line: _Line, peer: _Peer, state: Proof) -> None:
        """The connection is there; both know what the other has heard."""
        line.is_proved, line.inbox = True, Inbox()
        peer.proved_s = time.monotonic()
        peer.told, peer.tell_s, peer.refused_s, peer.pause_s = peer.has_heard, None, None, PAUSES_S[0]
        self._acknowledge(peer, state.messages, state.vectors)
        if not line.is_open:
            return
        peer.messages.again()
        peer.vectors.again()
        if state.at >= 0:
            if not peer.vectors.waiting or state.at >= peer.vectors.waiting[0].nbytes:
                raise _Nonsense(f"that it has heard {state.at} bytes of a vector that is not so long")
            peer.vectors.waiting[0].at = state.at
        self._write(line)

    def _acknowledge(self, peer: _Peer, messages: int, vectors: int, ago_s: float | None = None) -> None:
        """The peer has so many; the last message came to it ``ago_s`` before it said so."""
        new = peer.messages.heard(messages)
        if new and ago_s is not None:
            peer.trips_s.append(max(0.0, time.monotonic() - new[-1].sent_s - ago_s))
        for letter in (*new, *peer.vectors.heard(vectors)):
            if letter.acknowledged is not None:
                letter.acknowledged()

    # Reading.

    def _read(self, line: _Line) -> None:
        while line.is_open and line.receives > 0:
            coming = line.peer.coming if line.peer is not None else None
            if line.chunk and coming is not None and coming.room:
                into = _cut(coming.room, coming.at, line.chunk)
                n, _, _, _ = line.line.recvmsg_into([*into[: MOST_BUFFERS - 1], self._next_head])
                beyond = n - min(n, sum(map(len, into[: MOST_BUFFERS - 1])))
                line.heard += self._next_head[:beyond]
                self._came(line, n - beyond)
            else:
                n = line.line.recv_into(self._scratch)
                line.heard += self._scratch[:n]
            if n == 0:
                raise ConnectionError("it has hung up")
            line.receives -= n
            if line.peer is not None:
                line.peer.received_bytes, line.peer.heard_s = line.peer.received_bytes + n, time.monotonic()
            while line.is_open and line.heard and self._take(line):
                pass

    def _came(self, line: _Line, nbytes: int) -> None:
        """So much of a chunk is where it belongs."""
        peer = line.peer
        assert peer is not None
        coming = peer.coming
        assert coming is not None
        line.chunk -= nbytes
        coming.at += nbytes
        if coming.at == coming.nbytes:
            peer.coming = None
            peer.heard_vectors += 1
            peer.tell_s = 0.0
            self._hear(peer.name, coming.message)

    def _take(self, line: _Line) -> bool:
        """The next thing among the bytes that have come. Whether it was there as a whole."""
        peer, heard = line.peer, line.heard
        assert peer is not None
        if line.chunk:
            assert peer.coming is not None
            n = min(line.chunk, len(heard))
            at = 0
            for part in _cut(peer.coming.room, peer.coming.at, n):
                part[:] = heard[at : at + len(part)]
                at += len(part)
            del heard[:n]
            self._came(line, n)
            return True
        if len(heard) < _FRAME.size:
            return False
        kind, length, number, messages, vectors, ago_s = _FRAME.unpack_from(heard)
        _check_frame(peer, kind, length, number)
        if kind == _CHUNK:
            line.chunk = length
        elif len(heard) < _FRAME.size + length:
            return False
        end = _FRAME.size + (0 if kind == _CHUNK else length)
        body = bytes(heard[_FRAME.size : end])
        del heard[:end]
        with contextlib.suppress(_Nonsense) if kind == _BYE else contextlib.nullcontext():
            self._acknowledge(peer, messages, vectors, ago_s)
        if not line.is_open:
            return False
        if kind == _MESSAGE:
            message = _unpacked(line.inbox, body)
            peer.heard_messages += 1
            peer.came_s = time.monotonic()
            if peer.heard_messages - peer.told[0] >= HEARD_MESSAGES:
                peer.tell_s = 0.0
            elif peer.tell_s is None:
                peer.tell_s = time.monotonic() + HEARD_S
            self._hear(peer.name, message)
        elif kind == _VECTOR:
            self._make_room(line, peer, body)
        elif kind == _BYE:
            self._lose(peer, body.decode(errors="replace"))
        return True

    def _make_room(self, line: _Line, peer: _Peer, body: bytes) -> None:
        (nbytes,) = _NBYTES.unpack_from(body)
        message = _unpacked(line.inbox, body[_NBYTES.size :])
        if not 0 < nbytes < 1 << 62:
            raise _Nonsense(f"a vector of {nbytes} bytes")
        try:
            room = [part for part in map(_bytes, self._room(peer.name, message, nbytes)) if len(part)]
        except ValueError as error:
            raise _Nonsense(f"a {type(message).__name__} for whose vector there is no room: {error}") from error
        if room and sum(map(len, room)) != nbytes:
            raise _Nonsense(f"a vector of {nbytes} bytes for a room of {sum(map(len, room))}")
        if line.is_open:
            peer.coming = _Coming(message, nbytes, room)

    # Writing.

    def _write(self, line: _Line) -> None:
        """As much as the connection takes, and its turn allows."""
        peer = line.peer
        assert peer is not None
        try:
            while line.sends > 0 and (line.out or self._fill(line, peer)):
                n = _send(line)
                line.sends -= n
                peer.sent_bytes, peer.sent_s = peer.sent_bytes + n, time.monotonic()
        except BlockingIOError:
            pass
        except OSError as error:
            self._failed(line, str(error), time.monotonic())
            return
        waits = line.out or peer.messages.waiting or peer.vectors.waiting
        self._await(line, selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0))

    def _fill(self, line: _Line, peer: _Peer) -> bool:
        """What is said next: messages and a chunk; without those, what was heard. Whether there is something."""
        now_s = time.monotonic()
        frames, size, heard = list[bytes](), 0, (*peer.has_heard, now_s - peer.came_s)
        messages, vectors = peer.messages, peer.vectors
        while messages.waiting and size < CHUNK_BYTES:
            frames.append(_frame(_MESSAGE, messages.waiting[0].message, messages.number, heard))
            messages.waiting[0].sent_s = now_s
            messages.sent.append(messages.waiting.popleft())
            size += len(frames[-1])
        chunk: Iterable[memoryview] = ()
        if vectors.waiting:
            letter, number = vectors.waiting[0], vectors.number
            if letter.at < 0:
                frames.append(_frame(_VECTOR, _NBYTES.pack(letter.nbytes) + letter.message, number, heard))
                letter.at = 0
            length = min(CHUNK_BYTES, letter.nbytes - letter.at)
            frames.append(_FRAME.pack(_CHUNK, length, number, *heard))
            chunk = _cut(letter.vector, letter.at, length)
            letter.at += length
            if letter.at == letter.nbytes:
                vectors.sent.append(vectors.waiting.popleft())
        if not frames and peer.tell_s is not None and peer.tell_s <= now_s:
            frames.append(_frame(_HEARD, b"", 0, heard))
        if frames:
            peer.told, peer.tell_s = peer.has_heard, None
            line.out.append(memoryview(b"".join(frames)))
            line.out.extend(chunk)
        return bool(frames)

    # Ends.

    def _lose(self, peer: _Peer, words: str) -> None:
        if not peer.is_lost:
            peer.words = words
            self._part(peer, f"it lost this one: {words}")
            self._tell_lost(peer.name, words)

    def _part(self, peer: _Peer, words: str) -> None:
        """Nothing of what the peer was to have, or had begun to say, is kept."""
        line, peer.line, peer.is_lost, peer.coming, peer.tell_s = peer.line, None, True, None, None
        peer.vectors.waiting.clear()
        if line is not None and line.is_proved and line.is_open:
            with contextlib.suppress(OSError):
                while line.out or (peer.messages.waiting and self._fill(line, peer)):
                    _send(line)
                line.out.append(memoryview(_frame(_BYE, words.encode()[:_LONGEST_BYE], 0, (*peer.has_heard, 0.0))))
                self._say_bye(line)
        if line is not None:
            self._drop(line)
        peer.messages, peer.vectors = _Stream(), _Stream()

    def _say_bye(self, line: _Line) -> None:
        """The last words. Unread bytes would make the kernel take them back, so those are read first."""
        with contextlib.suppress(OSError):
            while line.out:
                _send(line)
            line.line.shutdown(socket.SHUT_WR)
            left = 1 << 24
            while left > 0 and (n := line.line.recv_into(self._scratch)):
                left -= n
        self._drop(line)


def _named(name: str) -> str:
    if not 0 < len(name) <= _LONGEST_NAME:
        raise ValueError(f"a host process's name has 1 to {_LONGEST_NAME} letters, not {len(name)}")
    return name


def _words(code: int) -> str:
    return os.strerror(code).lower()


def _socket(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S)),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ):
        made.setsockopt(level, option, value)  # those of a listener are those of its connections
    return made


def _bytes(part: memoryview) -> memoryview:
    return part.cast("B") if part.nbytes else memoryview(b"")


def _cut(parts: Sequence[memoryview], at: int, length: int) -> list[memoryview]:
    """``length`` bytes of what lies in ``parts``, from ``at`` on."""
    cut = list[memoryview]()
    for part in parts:
        if at < len(part) and length > 0:
            cut.append(part[at : at + length])
            length -= len(cut[-1])
        at = max(0, at - len(part))
    return cut


def _frame(kind: int, body: bytes, number: int = 0, heard: tuple[int, int, float] = (0, 0, 0.0)) -> bytes:
    return _FRAME.pack(kind, len(body), number, *heard) + body


def _send(line: _Line) -> int:
    """As much of what is next as the kernel takes."""
    sent = left = line.line.sendmsg(list(islice(line.out, MOST_BUFFERS)))
    while left:
        first = line.out.popleft()
        if left < len(first):
            line.out.appendleft(first[left:])
            break
        left -= len(first)
    return sent


def _check_frame(peer: _Peer, kind: int, length: int, number: int) -> None:
    """Before anything of it is kept."""
    if kind == _MESSAGE:
        is_right = number == peer.heard_messages and length <= LONGEST + HEAD.size
    elif kind == _VECTOR:
        is_right = number == peer.heard_vectors and peer.coming is None
        is_right = is_right and _NBYTES.size < length <= LONGEST + HEAD.size + _NBYTES.size
    elif kind == _CHUNK:
        coming = peer.coming
        is_right = number == peer.heard_vectors and coming is not None and 0 < length <= coming.nbytes - coming.at
    else:
        is_right = kind in (_HEARD, _BYE) and length <= (_LONGEST_BYE if kind == _BYE else 0)
    if not is_right:
        raise _Nonsense(f"a frame of kind {kind}, number {number} and {length} bytes")


def _unpacked(inbox: Inbox, body: bytes) -> Any:
    try:
        messages = list(inbox.feed(body))
    except ValueError as error:
        raise _Nonsense(str(error)) from error
    if len(messages) != 1:
        raise _Nonsense(f"{len(messages)} messages in place of one")
    return messages[0]
