"""Results that come while their worker computes: heard, and added up, by a second thread of its process.

Where results may be a round late, a worker hands in its work and goes on at once. This thread hears what the hub says
meanwhile, and makes this worker's parts of the sums. At its next step the worker finds them there: in a step it waits
for nothing but the round it handed in for the last time, if that is not over yet.

On a GPU the work that was laid down is there only later than the call that laid it down; then this thread also waits
for it, and says so to the hub.

``_lock`` protects the list of answers, what is to be said, and whether the thread listens. The worker takes answers
from one end in the order in which they came, and only what is complete; so it says to the hub how many it has taken,
and both count the same ones. Two threads never read from the line: while this one listens, what the worker asks for is
passed on to it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from offbeat.live.carriers.shelves import Shelves
from offbeat.live.partial.reading import LOOK_S, Answer, Delivery, Reader
from offbeat.live.transport.board import Board
from offbeat.live.transport.errors import OffbeatError, PeerFailed
from offbeat.live.transport.hub import Word

LEAVE_S = 5.0
NEEDED, MORE, SPARE = "needed", "more", "spare"


class Ahead:
    """The second thread of a worker's side."""

    def __init__(self, reader: Reader, shelves: Shelves, line: socket.socket, board: Board) -> None:
        self._reader, self._shelves, self._line, self._board = reader, shelves, line, board
        self._lock = threading.Condition()
        self._told: deque[Delivery] = deque()
        self._waits = False  # for what it needs to hand in again
        self._hinted = False  # that there is more to be asked for
        self._asked: Answer | None = None  # for a replica, which the worker alone can lay down
        self._reply: Answer | None = None
        self._to_say: tuple[Any, Callable[[], None]] | None = None
        self._listens = self._ended = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._wake_r, self._wake_w = os.pipe()

    # The worker.

    def _check(self) -> None:
        """Raise what ended the thread, if something did."""
        if isinstance(self._failure, OffbeatError):
            raise self._failure
        if self._failure is not None:
            words = f"rank {self._board.rank} could not take what came: {self._failure}"
            raise PeerFailed(words) from self._failure

    def ready_within(self, seconds: float) -> bool:
        """Whether what was handed in is through, now or in so long."""
        return self._within(lambda: not self._waits, seconds)

    def _within(self, ready: Callable[[], bool], seconds: float) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: ready() or self._failure is not None, seconds)
            self._check()
            return ready()

    def take(self) -> list[Delivery]:
        """What is there, in order. (What was needed may miss others' parts: whoever reads it waits for them.)"""
        with self._lock:
            last = max((k for k, told in enumerate(self._told) if told.answer.how == NEEDED), default=-1)
            out = [self._told.popleft() for _ in range(last + 1)]
            hinted, self._hinted = self._hinted, False
            while self._told and (hinted or self._reader.all_there(self._told[0])):  # there is more behind all of it
                out.append(self._told.popleft())
        return [*out, self._reader.make(self._reader.ask(Word.NEWEST))] if hinted else out

    def asked(self) -> Answer | None:
        """Where a replica is to lie, if one was asked for."""
        asked, self._asked = self._asked, None
        return asked

    def hand_in(self, slot: int, step: int, taken: list[Delivery]) -> None:
        """Say what has been laid down, and that the results ``taken`` before are read from now on."""
        count = sum(len(told.answer.results) for told in taken)

        def say() -> None:
            self._reader.come_again(Word.OFFER, slot, step, count, taken)

        mark = self._shelves.mark()
        with self._lock:
            self._waits = self._listens = True
            self._reader.listens = self._listen
            self._to_say = None if mark is None else (mark, say)
            self._lock.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="offbeat-ahead", daemon=True)
            self._thread.start()
        if mark is None:
            say()
        else:
            os.write(self._wake_w, b"!")

    def stop(self, wait: Callable[[Callable[[float], bool]], None]) -> None:
        """Hear of no more. What was not taken is told again to whoever asks for it."""
        if not self._listens:
            return
        wait(self._said_within)
        self._reader.send(Word.NOTHING)
        wait(self._stopped_within)
        self._reader.listens = None
        for told in self._told:
            told.read = False
        self._told.clear()
        self._waits, self._reply = False, None

    def _said_within(self, seconds: float) -> bool:
        return self._within(lambda: self._to_say is None, seconds)

    def _stopped_within(self, seconds: float) -> bool:
        return self._within(lambda: not self._listens, seconds)

    def _listen(self, what: str) -> Answer:
        """The answer to a question of the worker's."""
        with self._lock:
            while self._reply is None:
                self._check()
                self._board.check(what)
                self._lock.wait(LOOK_S)
            answer, self._reply = self._reply, None
            return answer

    # The thread.

    def _run(self) -> None:
        try:
            with self._shelves.aside():
                self._go_on()
        except BaseException as error:
            with self._lock:
                if not self._ended:
                    self._failure = error
                self._lock.notify_all()

    def _go_on(self) -> None:
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        while True:
            with self._lock:
                while not (self._listens or self._ended):
                    self._lock.wait()
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._ended:
                return
            if self._wake_r in ready:
                os.read(self._wake_r, 64)
                self._say()
            if self._line.fileno() in ready:
                self._hear(self._reader.answer())

    def _say(self) -> None:
        if self._to_say is not None:
            mark, say = self._to_say
            mark.synchronize()
            say()
            with self._lock:
                self._to_say = None
                self._lock.notify_all()

    def _hear(self, answer: Answer) -> None:
        told = None
        if answer.how in (NEEDED, MORE):
            told = self._reader.make(answer, read=None)
            self._shelves.settle()
        with self._lock:
            if told is not None:
                self._told.append(told)
                self._waits = self._waits and answer.how != NEEDED
            elif answer.how == "nothing":
                self._listens = self._hinted = False
            elif answer.how == "hint":
                self._hinted = True
            elif answer.how == SPARE:
                self._asked = answer
            else:
                self._reply = answer
            self._lock.notify_all()

    def end(self) -> bool:
        """Let the thread end; nobody is waited for, and nothing else is heard. False: it works on."""
        self._ended = True
        with self._lock:
            self._lock.notify_all()
        if self._wake_w >= 0:
            os.write(self._wake_w, b"!")
        if self._thread is not None:
            self._thread.join(LEAVE_S)
            if self._thread.is_alive():
                return False
        self._reader.listens = None
        self._told.clear()
        if self._wake_w >= 0:
            os.close(self._wake_r)
            os.close(self._wake_w)
            self._wake_r = self._wake_w = -1
        return True

    def forget_failure(self) -> None:
        """The run is over. An error knows the frames it passed through, and these all that they worked on."""
        self._failure = None
