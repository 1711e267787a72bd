"""Results that come while their worker computes: heard, and added up, by a second thread of its process.

Where results may be a round late, a worker lays down its work and goes on at once. This thread says so to the hub,
hears what the hub says meanwhile, and makes this worker's parts of the sums. At its next step the worker finds them
there: in a step it waits for nothing but the round it handed in for the last time, if that is not over yet.

On a GPU work is there only later than the call that laid it down; then this thread waits for it before it says so.

The interpreter belongs to one thread at a time: woken in the middle of a step, this one would hold up the very worker
that it is to help. So where a vector is short, it is woken when the step is over; where it is long, a step takes long,
too, and the others are told at once. And where steps are shorter than rounds, the worker says it itself: it would only
wait for the other thread to do so.

``_lock`` protects the list of answers, what is to be said, and whether the thread listens. The worker takes answers
from one end in the order in which they came, and only what is complete; so it says to the hub how many it has taken,
and both count the same ones. Two threads never read from the line: while this one listens, what the worker asks for is
passed on to it. The worker asks for nothing but room before what it handed in has been said: else the hub would hear of
a step after a question that was asked behind it. That results are read no longer is said under the lock, and only while
the worker computes (`hush`): said a step later, it would be about what the worker reads by then. That they are there is
said at once: what they were made of is memory that somebody else may need.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from offbeat.live.carriers.shelves import Shelves
from offbeat.live.partial.marks import Marks
from offbeat.live.partial.reading import LOOK_S, Reader
from offbeat.live.partial.told import Answer, Delivery
from offbeat.live.transport.board import Board
from offbeat.live.transport.errors import OffbeatError, PeerFailed
from offbeat.live.transport.hub import Word

LEAVE_S = 5.0
LOOK_MS = 2.0  # how often this thread looks whether a GPU has come so far, unless there is something else to do
SAY, SAY_READ, LISTEN = b"!", b"r", b"."  # what the worker wakes this thread for
NEEDED, MORE, SPARE = "needed", "more", "spare"


class HandedIn(NamedTuple):
    """Work that was laid down, and what was taken before. ``mark`` tells when it is there; None: it is."""

    place: int
    step: int
    taken: list[Delivery]
    mark: Any


class HasRead(NamedTuple):
    """Nothing that was taken is read any more, as soon as ``mark`` is there; None: it is."""

    mark: Any

    @property
    def is_so(self) -> bool:
        return self.mark is None or bool(self.mark.query())


class Ahead:
    """The second thread of a worker's side. ``after_steps``: it is told by ``wake`` when a step is over.
    ``gives_back``: slots that the worker does not need go back to the hub while it computes."""

    def __init__(
        self,
        reader: Reader,
        shelves: Shelves,
        line: socket.socket,
        board: Board,
        after_steps: bool,
        gives_back: bool = False,
    ) -> None:
        self._reader, self._shelves, self._line, self._board = reader, shelves, line, board
        self._after_steps, self._gives_back = after_steps, gives_back
        self._lock = threading.Condition()
        self._told: deque[Delivery] = deque()
        self._waits = False  # for what it needs to hand in again
        self._hinted = False  # that there is more to be asked for
        self._asked: Answer | None = None  # for a replica, which the worker alone can lay down
        self._reply: Answer | None = None
        self._to_say: HandedIn | None = None
        self._is_woken_later = False  # by `wake`
        self._has_read: HasRead | None = None  # what was taken when it last handed in
        self._unseen: list[Delivery] = []  # what has been asked of the GPU, and is to be seen there
        self._listens = self._ended = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._wake_r, self._wake_w = os.pipe()
        self._marks = Marks()

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
        if not self._waits and self._failure is None:  # the worker alone lets it wait again
            return True
        self.wake()
        return self._within(lambda: not self._waits, seconds)

    def said_within(self, seconds: float) -> bool:
        """Whether the hub has been told of it."""
        self.hush()
        self.wake()
        return self._within(lambda: self._to_say is None, seconds)

    def _within(self, ready: Callable[[], bool], seconds: float) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: ready() or self._failure is not None, seconds)
            self._check()
            return ready()

    def take(self) -> list[Delivery]:
        """What is there, in order. (What was needed may miss others' parts: whoever reads it waits for them.)"""
        told = self._told
        with self._lock:
            hinted, self._hinted = self._hinted, False
            needed, out = [one.answer.how for one in told].count(NEEDED), list[Delivery]()
            # Where there was a hint, there is more behind all of it.
            while told and (needed or hinted or self._reader.sums.all_there(told[0])):
                out.append(told.popleft())
                needed -= out[-1].answer.how == NEEDED
        return [*out, self._reader.make(self._reader.ask(Word.NEWEST))] if hinted else out

    def asked(self) -> Answer | None:
        """Where a replica is to lie, if one was asked for."""
        asked, self._asked = self._asked, None
        return asked

    def hand_in(self, place: int, step: int, taken: list[Delivery], at_once: bool) -> None:
        """Say what has been laid down, and that the results ``taken`` before are read from now on.

        ``at_once``: the worker is waiting for rounds, and has nothing better to do than to say it itself.
        """
        mark = self._shelves.mark()
        with self._lock:
            listened, self._waits, self._listens = self._listens, True, True
            self._reader.listens = self._listen
            self._to_say, self._has_read = HandedIn(place, step, taken, mark), None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="offbeat-ahead", daemon=True)
            self._thread.start()
        if mark is None and at_once:
            self._say()
        elif mark is None and self._after_steps:
            self._is_woken_later = True
        else:
            if not listened:
                os.write(self._wake_w, LISTEN)
            self._marks.wait_for(mark, partial(os.write, self._wake_w, SAY))

    def wake(self) -> None:
        """The step is over: let the thread say what has been handed in, if it has not been woken before."""
        if self._is_woken_later:
            self._is_woken_later = False
            os.write(self._wake_w, SAY)

    def has_read(self) -> None:
        """The worker reads no longer what it took when it last handed in: let the hub hear of it."""
        if self._listens and self._has_read is None and (self._to_say is not None or self._reader.is_reading):
            mark = self._shelves.mark()
            with self._lock:
                self._has_read = HasRead(mark)
            self._marks.wait_for(mark, partial(os.write, self._wake_w, SAY_READ))

    def hush(self) -> None:
        """The worker is about to speak to the hub itself: this thread says nothing of what has been read."""
        with self._lock:
            self._has_read = None

    def stop(self, wait: Callable[[Callable[[float], bool]], bool]) -> None:
        """Hear of no more. What was not taken is told again to whoever asks for it."""
        if not self._listens:
            return
        wait(self.said_within)
        self._reader.send(Word.NOTHING)
        wait(self._stopped_within)
        self._reader.listens = None
        for told in self._told:
            told.read = False
        self._told.clear()
        self._waits, self._reply = False, None

    def _stopped_within(self, seconds: float) -> bool:
        return self._within(lambda: not self._listens, seconds)

    def _listen(self, what: str) -> Answer:
        """The answer to a question of the worker's.

        The thread may have been told to listen, and not been woken for that yet: then nobody would hear the answer.
        """
        self.wake()
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
        awake, listening = select.poll(), select.poll()
        for poll in (awake, listening):
            poll.register(self._wake_r, select.POLLIN)
        listening.register(self._line, select.POLLIN)
        while True:
            looks = LOOK_MS if self._unseen else None
            ready = {descriptor for descriptor, _ in (listening if self._listens else awake).poll(looks)}
            if self._ended:
                return
            if self._wake_r in ready:
                woken = os.read(self._wake_r, 64)
                if SAY in woken:
                    self._say()
                if SAY_READ in woken:
                    self._say_read()
            if self._line.fileno() in ready:
                self._hear(self._reader.answer())
            self._look()

    def _say(self) -> None:
        if self._to_say is not None:
            place, step, taken, mark = self._to_say
            if mark is not None:  # it is there already, if this thread was woken for it
                mark.synchronize()
            count = sum(len(told.answer.results) for told in taken)
            self._reader.come_again(Word.OFFER, place, step, count, taken)
            with self._lock:
                self._to_say = None
                self._lock.notify_all()

    def _look(self) -> None:
        """Has the GPU come so far? It is not waited for: others may need what this thread hears meanwhile."""
        unseen, self._unseen = self._unseen, []
        for told in unseen:
            self._see(told)

    def _say_read(self) -> None:
        """Unless the worker has handed in again meanwhile: then that says it, and it reads something else by now."""
        with self._lock:  # until it is said, the worker does not hand in
            has_read = self._has_read
            if has_read is not None and has_read.is_so and self._to_say is None:
                self._has_read = None
                self._reader.come_again(Word.READ)
                if self._gives_back:
                    self._reader.give_back()

    def _hear(self, answer: Answer) -> None:
        told = None
        if answer.how in (NEEDED, MORE):
            told = self._reader.make(answer, read=None)
            self._see(told)
        elif answer.how == "nothing":
            self._shelves.settle()  # from now on the worker speaks, and does not wait for this thread's stream
            self._unseen = []
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

    def _see(self, told: Delivery) -> None:
        """What was told may be there, to be read. On a GPU it comes later, and this thread looks again."""
        if told.read is not None:  # the worker was quicker
            return
        if self._shelves.on_device and not self._reader.sums.all_there(told):
            self._unseen.append(told)
            return
        self._reader.sums.find(told)
        self._reader.has_seen(told)
        if self._gives_back:
            self._reader.give_back()

    def end(self) -> bool:
        """Let the thread end; nobody is waited for, and nothing else is heard. False: it works on."""
        self._ended = True
        if self._wake_w >= 0:
            os.write(self._wake_w, SAY)
        if self._thread is not None:
            self._thread.join(LEAVE_S)
            if self._thread.is_alive():
                return False
        if not self._marks.end():
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
