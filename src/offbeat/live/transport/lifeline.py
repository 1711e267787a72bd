"""One line from every worker to rank 0, from ``attach`` to the end: who is there, who has failed, and small facts.

It carries what the others must hear although nobody has asked: a worker's last words, a connection that has closed, the
facts of the board. A thread of its own listens, so that a worker hears while it computes, and answers while it waits.

Shared between that thread and the worker's, under ``changed``: the facts, the failure, the answers to a question. The
interleaving the lock prevents: a worker finds a fact missing, the fact comes and wakes nobody, the worker falls asleep.
A fact once known never changes its meaning (numbers grow, words stay), so reading one needs no lock.

Every fact passes rank 0, which tells all in one order: whoever knows a fact knows everything that its author knew.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from offbeat.live.transport.hub import Frame, Letter, Quiet, Word, read_frame
from offbeat.live.transport.processes import has_ended

ANSWER_S = 2.0  # a process that is alive answers within milliseconds, unless its interpreter is held
DYING_S = 0.5  # the connections of a process that ends close a moment before it is known to have ended
LEAVE_S = 5.0


class Failure(NamedTuple):
    """What ended the run for the others: a worker's last words, or that it vanished without any."""

    words: str
    vanished: bool


class Roll(Quiet):
    """The hub's side: passes on what is said, and says who has hung up without a farewell."""

    def __init__(self) -> None:
        self._left: set[int] = set()

    def hear(self, frame: Frame) -> Iterable[Letter]:
        match frame.word:
            case Word.BYE:
                self._left.add(frame.rank)
                return ()
            case Word.DOING:
                return [(frame.b, frame)]
            case Word.FAILED:
                self._left.add(frame.rank)
        return [(None, frame)]

    def gone(self, rank: int) -> Iterable[Letter]:
        return () if rank in self._left else [(None, Frame(Word.GONE, 0, rank))]


class Lifeline:
    """A worker's end. ``doing`` says in words what this worker is doing."""

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        doing: Callable[[], str],
        called: Callable[[int], int] = lambda rank: rank,
    ) -> None:
        self._called = called  # the number under which the script knows a rank of ours
        self._connection, self._rank, self._doing = connection, rank, doing
        self.changed = threading.Condition()
        self.facts: dict[str, str] = {}
        self.failure: Failure | None = None  # the first one stays
        self._sending = (
            threading.RLock()
        )  # two threads send, and a signal's handler may; a frame must not be cut in two
        self._questions = 0
        self._answers: dict[int, dict[int, str]] = {}
        self._processes: Callable[[int], tuple[list[str], list[str]]] = lambda rank: ([], [])
        self._over = False
        self._thread = threading.Thread(target=self._listen, name="offbeat-lifeline", daemon=True)
        self._thread.start()

    # The worker's thread.

    def post(self, name: str, value: str) -> None:
        """A fact, known here at once and to the others soon."""
        with self.changed:
            self.facts[name] = value
            self.changed.notify_all()
        self._say(Frame(Word.FACT, self._rank, text=f"{name}\n{value}"))

    def fail(self, words: str) -> None:
        """My last words to the others; nothing where they have failed before me, and know."""
        if self.failure is None:
            self._say(Frame(Word.FAILED, self._rank, text=words))

    def ask_all(self, size: int, within_s: float = ANSWER_S) -> dict[int, str]:
        """What each rank says it is doing; one that is not in it does not answer."""
        end = time.monotonic() + within_s
        with self.changed:
            self._questions += 1
            number, heard = self._questions, dict[int, str]()
            self._answers[number] = heard
        self._say(Frame(Word.WHAT, self._rank, number))
        with self.changed:
            while len(heard) < size and self.failure is None and (left_s := end - time.monotonic()) > 0:
                self.changed.wait(left_s)
            del self._answers[number]
            return dict(heard)

    def know_processes(self, of: Callable[[int], tuple[list[str], list[str]]]) -> None:
        """``of(rank)``: that rank's process and this one, to tell an end from a cut connection."""
        self._processes = of

    def close(self) -> None:
        """All are through."""
        self._leave(Frame(Word.BYE, self._rank))

    def abandon(self) -> None:
        """Hang up; what there was to say has been said."""
        self._leave(None)

    def _leave(self, farewell: Frame | None) -> None:
        self._over = True  # before the listener can notice: it is not to look for whoever is missing
        if farewell is not None:
            self._say(farewell)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_S)
        self._connection.close()

    def _say(self, frame: Frame) -> None:
        with self._sending, contextlib.suppress(OSError):  # rank 0 is gone: the listener hears so
            self._connection.sendall(frame.pack())

    # The listener's thread.

    def _listen(self) -> None:
        while True:
            frame = read_frame(self._connection)
            if self._over:
                return
            if frame is None:
                self._hear_failure(Failure(self._ended(0), vanished=True))
                return
            self._hear(frame)

    def _hear(self, frame: Frame) -> None:
        match frame.word:
            case Word.FACT:
                name, _, value = frame.text.partition("\n")
                with self.changed:
                    self.facts[name] = value
                    self.changed.notify_all()
            case Word.FAILED if frame.rank != self._rank:
                self._hear_failure(Failure(f"rank {self._called(frame.rank)} failed: {frame.text}", vanished=False))
            case Word.GONE:
                self._hear_failure(Failure(self._ended(frame.a), vanished=True))
            case Word.WHAT:
                self._say(Frame(Word.DOING, self._rank, frame.a, frame.rank, text=self._doing()))
            case Word.DOING:
                with self.changed:
                    if frame.a in self._answers:
                        self._answers[frame.a][frame.rank] = frame.text
                        self.changed.notify_all()

    def _hear_failure(self, failure: Failure) -> None:
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()

    def _ended(self, rank: int) -> str:
        process, here = self._processes(rank)
        end = time.monotonic() + DYING_S
        while process and here and process[0] == here[0] and time.monotonic() < end:
            if has_ended(process, here):
                return f"rank {self._called(rank)} gives no sign of life: the process has ended"
            time.sleep(0.005)
        return f"rank {self._called(rank)} gives no sign of life: its connection has closed"
