"""Shared weights that are kept at the hub: a meeting of two happens there, in one go, whatever the two are doing.

Weights are stacks of places (see `offbeat.live.partial.stacks`). When i meets j, both stacks become the mean of the
two; who needs its weights next adds it up. Neither's process is needed for the other's meeting.
"""

from __future__ import annotations

import marshal
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

from offbeat.live.carriers.shelves import Shelves
from offbeat.live.partial.reading import LOOK_S, Reader
from offbeat.live.partial.reading import Answer as Heard
from offbeat.live.partial.stacks import Answer, Chair, Slots, Stack, Sum, places
from offbeat.live.transport.board import Board
from offbeat.live.transport.hub import Frame, Letter, Quiet, Word
from offbeat.live.transport.waiter import Waiter
from offbeat.method.effects import Ticket
from offbeat.rounds.seat import Event
from offbeat.rounds.shared import Retired, SharedVec
from offbeat.runs.trace import Round, Trace
from offbeat.tensors.vector import Vec


class Sharer(Chair):
    """A worker and its shared weights."""

    def __init__(self, rank: int, slot: int, logs: bool) -> None:
        super().__init__(rank, [] if logs else None)
        self.shared = SharedVec(self.put(slot), self.log)
        self.retires = False

    @property
    def y(self) -> Stack:
        return cast(Any, self.shared.weights)  # type: ignore[no-any-return]


class Meetings(Quiet):
    """The hub's side."""

    def __init__(self, size: int, slots: Slots) -> None:
        self._size, self._slots, self._retired = size, slots, Retired(size)
        self._sharers: dict[int, Sharer] = {}
        self._early: list[Frame] = []
        self._met = 0
        self._answers: list[Answer] = []

    def hear(self, frame: Frame) -> Iterable[Letter]:
        if frame.word is Word.OPEN:
            self._sharers[frame.rank] = Sharer(frame.rank, frame.a, bool(frame.c))
        else:
            self._early.append(frame)
        if len(self._sharers) < self._size:  # nobody can be met before all have come
            return []
        frames, self._early = self._early, []
        return [letter for f in frames for letter in self._hear(f)]

    def _hear(self, frame: Frame) -> list[Letter]:
        me = self._sharers[frame.rank]
        match frame.word:
            case Word.MEET:
                self._meet(me, self._sharers[frame.a])
            case Word.ADD:
                me.comes_again(saw_all=bool(frame.c))
                me.shared.add(me.put(frame.a))
                self._show(me)
            case Word.SHIFT:
                me.shared.shift(me.put(frame.a))
                self._answers.append(Answer(me, "heard", None, (), me.y))
            case Word.STANDS:
                me.comes_again(saw_all=bool(frame.c))
                me.shared.stand()
                self._show(me)
            case Word.OWED:
                self._answers.append(Answer(me, "owed", (places(me.y),), (), me.y))
            case Word.MERGE:
                done = me.merge(me.y, frame.a, set(marshal.loads(frame.data)))
                self._answers.append(Answer(me, "merged" if done else "refused", None, (), me.y))
            case Word.FINISHED:
                me.retires = True
                if self._retired.one_more():
                    for one in self._sharers.values():
                        one.comes_again(saw_all=False)
                        self._show(one, "over")
        answers, self._answers = self._answers, []
        return self._slots.letters(answers, frame.rank)

    def _meet(self, me: Sharer, peer: Sharer) -> None:
        if me is not peer:
            number, sent = me.shared.depart()
            half = peer.shared.visited(me.rank, sent)
            stale = me.shared.home(number, half)
            mean = Sum(self._met, [me.y.clone()], 1)
            me.y.refs = peer.y.refs = ((mean, 1.0),)  # both have become this
            self._met += 1
        else:
            stale = 0
        me.news.append((stale, time.monotonic()))

    def _show(self, one: Sharer, how: str = "shown") -> None:
        self._answers.append(Answer(one, how, None, [(one.y.clone(), None)], one.y))


class Meeting(Ticket[None]):
    """One that was asked for; it is over when the hub has heard of it."""

    __slots__ = ()


class Visitor:
    """A worker's side."""

    def __init__(
        self,
        x: Vec,
        shelves: Shelves,
        line: socket.socket,
        board: Board,
        trace: Trace,
        patience_s: float,
        log: list[Event] | None = None,
    ) -> None:
        self._board, self._trace, self._patience_s, self._nbytes = board, trace, patience_s, x.nbytes
        self._reader = Reader(shelves, line, board.rank, board, patience_s, self._heard, log)
        self._worker = Waiter(board, patience_s)
        self._stood: Vec | None = None
        self._over = False
        self.waited_s = 0.0
        self.wire_bytes = 0
        self._reader.send(Word.OPEN, self._reader.put(x), 0, int(log is not None))

    def meet(self, peer: int) -> Meeting:
        """Both take the mean of the two, before anything else that either of them does from now on."""
        self._reader.send(Word.MEET, peer)
        if peer != self._board.rank:
            self.wire_bytes += 2 * self._nbytes
        return Meeting()

    def finish(self, meeting: Meeting) -> None:
        """Nothing is left to be done."""

    def add(self, delta: Vec) -> Vec:
        """My step, on top of whatever my weights have become."""
        return self._shown(Word.ADD, self._reader.put(delta))

    def _shown(self, word: Word, slot: int = 0) -> Vec:
        start = time.monotonic()
        answer = self._reader.ask(word, slot, 0, int(self._reader.saw_all))
        value = self._reader.vectors(answer)[0]
        self.waited_s += time.monotonic() - start
        return value

    def _heard(self, answer: Heard) -> None:
        me, rounds = self._board.rank, self._trace.rounds
        for stale, end_s in answer.news:
            if self._trace.keep_rounds:
                rounds.append(Round(len(rounds), me, (me,), {me: stale}, {me: 0.0}, end_s))

    def retire(self, asked: Callable[[], bool], take_part: Callable[[], None]) -> Vec:
        """My weights when nobody can change them any more: all have retired."""
        reader = self._reader
        reader.send(Word.FINISHED)
        since = time.monotonic()
        with self._board.waits_for("the others to retire"):
            while not reader.heard_within(LOOK_S):
                since = self._board.bear_with(since, self._patience_s, "the others to retire")
                if asked():
                    take_part()
        answer = reader.answer()
        return reader.vectors(answer)[0]

    def stand(self, x: Vec, all_there: Callable[[], bool]) -> None:
        """Between two steps of all workers no meeting is under way; then ``x`` becomes what the shared weights are."""
        self._worker.until(all_there, "the others to stand still")
        self._stood = self._shown(Word.STANDS).clone()
        x.copy_(self._stood)

    def adopt(self, x: Vec) -> None:
        """The worker's weights were made equal to the others': so are the shared ones, by a difference."""
        if self._stood is not None:
            self._reader.ask(Word.SHIFT, self._reader.put(x - self._stood))
            self._stood = None

    def groups(self) -> list[Any]:
        return []

    def close(self) -> None:
        self._reader.hang_up(together=True)

    def release(self) -> None:
        """Nothing is kept."""

    def abandon(self) -> None:
        self._reader.hang_up(together=False)
