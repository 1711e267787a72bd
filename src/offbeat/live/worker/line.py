"""A worker's one line to its host process, and the arena as this worker sees it.

One thread uses it, the one that trains. Nothing waits for the host process without looking up: `heard_within` is a poll
with a limit, and what has come is sorted by the channel it is for.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from torch._C._distributed_c10d import Store

from offbeat.live.host import looking
from offbeat.live.host import protocol as say
from offbeat.live.host.protocol import Inbox, Refused, packed
from offbeat.live.host.status import JobStatus
from offbeat.live.memory.arena import WORDS, WORDS_AT, Mapping
from offbeat.live.transport import elsewhere
from offbeat.live.transport.errors import OffbeatError, PeerFailed
from offbeat.live.worker import start
from offbeat.live.worker.stacks import Stacks

READ_BYTES = 1 << 18


class Line:
    """Open for as long as a run of this process uses it."""

    def __init__(self, token: str, rank: int, patience_s: float, starts: bool = True) -> None:
        self._socket, welcome, descriptor = start.connect(token, rank, patience_s, starts)
        self._name = self._socket.getpeername()
        try:
            self.arena = Mapping(descriptor, welcome.arena_bytes)
        finally:
            os.close(descriptor)
        self.page, self.host_pid, self.token = welcome.page, welcome.pid, token
        self._shown = self.arena.bytes_at(self.page, WORDS_AT)
        self._sequence = 0
        self._inbox = Inbox()
        self._heard: dict[str, deque[Any]] = {}
        self._ends_waits: dict[str, Callable[[Any], bool]] = {}
        self._words = list(range(WORDS))
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.runs: set[str] = set()
        self._stacks = Stacks()
        _open.add(self)
        elsewhere.shown(self.token, self.show)

    # What is said and heard.

    def join(self, key: str, ends_waits: Callable[[Any], bool] | None = None) -> int:
        """From now on this worker hears what is said at a channel. The word that is its own there.

        ``ends_waits``: whether a message is news for which a wait at another channel is to end.
        """
        self._heard[key] = deque()
        if ends_waits is not None:
            self._ends_waits[key] = ends_waits
        return self._words.pop()

    def part(self, key: str, word: int) -> None:
        """No longer."""
        self._heard.pop(key, None)
        self._ends_waits.pop(key, None)
        self._words.append(word)

    def send(self, message: Any) -> None:
        try:
            self._socket.sendall(packed(message))
        except OSError as error:
            raise PeerFailed(_GONE) from error

    def heard_within(self, key: str, seconds: float) -> Any:
        """The next message at this channel; waits no longer than that, and not when there is other news to look at."""
        answers = self._heard[key]
        if not answers:
            self._read(0.0)
            end_s, left_s = time.monotonic() + seconds, seconds
            while not answers and left_s > 0 and not self._read(left_s):
                left_s = end_s - time.monotonic()
        return answers.popleft() if answers else None

    def _read(self, seconds: float) -> bool:
        """Hear what has come, or what comes first within so long. Whether there is news that ends a wait."""
        found = False
        while self._poll.poll(seconds * 1e3):
            try:
                data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:  # a signal's handler was quicker
                return found
            except OSError as error:
                raise PeerFailed(_GONE) from error
            if not data:
                raise PeerFailed(_GONE)
            for message in self._inbox.feed(data):
                if isinstance(message, Refused):
                    raise OffbeatError(f"the host process refused: {message.words}")
                if message.key in self._heard:
                    self._heard[message.key].append(message)
                    ends = self._ends_waits.get(message.key)
                    found = found or (ends is not None and ends(message))
            seconds = 0.0
        return found

    # Other hosts.

    def listen(
        self, run: str, name: str, secret: str, address: str, port: int, patience_s: float
    ) -> tuple[str, str, int]:
        """Let the host process be there for other hosts. As whom they know it, and where it is."""
        key, end_s = f"{run}/hosts", time.monotonic() + patience_s
        word = self.join(key)
        try:
            self.send(say.Listen(key, name, secret, address, port))
            while (answer := self.heard_within(key, 0.1)) is None:
                if time.monotonic() > end_s:
                    raise OffbeatError(
                        f"the host process did not answer within {patience_s:g} s; its errors are on stderr"
                    )
            return answer.name, answer.address, answer.port
        finally:
            self.part(key, word)

    # What is shown.

    def show(self, state: dict[str, Any]) -> None:
        """Write into this worker's page; the host process may be reading it, and sees by the number that it changes."""
        state = {**state, "stacks": self._stacks.words}
        text = json.dumps(state, separators=(",", ":")).encode()[: WORDS_AT - 12]
        self._sequence += 2
        shown = self._shown
        shown[:8] = _bytes(self._sequence - 1, 8)
        shown[8:12] = _bytes(len(text), 4)
        shown[12 : 12 + len(text)] = bytearray(text)
        shown[:8] = _bytes(self._sequence, 8)

    def status(self) -> JobStatus:
        """What the host process knows of the job now, asked over a connection of its own: any thread may."""
        return looking.ask(self._name, self.token, self.host_pid)

    def close(self) -> None:
        elsewhere.shown(self.token, None)
        self._stacks.close()
        _open.discard(self)
        self._socket.close()
        self._shown = np.empty(0, np.uint8)  # a part of it would keep the arena
        self.arena.close()

    def close_in_child(self) -> None:
        """A process that was forked from this one has no business here."""
        self._socket.close()
        self._stacks.close()


def _bytes(number: int, count: int) -> bytearray:
    return bytearray(number.to_bytes(count, "little"))


_GONE = "the host process has ended, and with it the memory of this host's workers; begin again from a checkpoint"
_open: weakref.WeakSet[Line] = weakref.WeakSet()
_lines: dict[str, Line] = {}


def _after_fork() -> None:
    for line in list(_open):
        line.close_in_child()
    _lines.clear()


os.register_at_fork(after_in_child=_after_fork)


def join(run: str, store: Store, rank: int, patience_s: float, starts: bool = True) -> Line:
    """This process's line, for one run more. ``starts``: the host process, where there is none."""
    token = start.token_of(store)
    if token not in _lines:
        _lines[token] = Line(token, rank, patience_s, starts)
    line = _lines[token]
    line.runs.add(run)
    return line


def leave(run: str, line: Line) -> None:
    """The run is over; with the last one, so is the line."""
    line.runs.discard(run)
    if not line.runs and _lines.get(line.token) is line:
        del _lines[line.token]
        line.close()
