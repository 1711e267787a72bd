"""Shared weights that are kept at the hub: a meeting of two happens there, in one go, whatever the two are doing.

Weights are stacks of places (see `offbeat.live.partial.stacks`). When i meets j, both stacks become the mean of the
two; who needs its weights next adds it up. Neither's process is needed for the other's meeting.
"""

from __future__ import annotations

import marshal
import time
from collections.abc import Iterable
from typing import cast

from offbeat.live.partial.stacks import Guest, Reply, Slots, Stack, Sum, places
from offbeat.live.transport.hub import Frame, Letter, Quiet, Word
from offbeat.rounds.shared import Retired, SharedVec


class Sharer(Guest):
    """A worker and its shared weights."""

    def __init__(self, rank: int, place: int, logs: bool) -> None:
        super().__init__(rank, [] if logs else None)
        self.shared = SharedVec(self.put(place), self.log)

    @property
    def y(self) -> Stack:
        return cast(Stack, self.shared.weights)


class Meetings(Quiet):
    """The hub's side."""

    def __init__(self, size: int, slots: Slots) -> None:
        self._size, self._slots, self._retired = size, slots, Retired(size)
        self._sharers: dict[int, Sharer] = {}
        self._early: list[Frame] = []
        self._met = 0
        self._answers: list[Reply] = []

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
                me.comes_again(frame.data)
                me.shared.add(me.put(frame.a))
                self._show(me)
            case Word.SHIFT:
                me.shared.shift(me.put(frame.a))
                self._answers.append(Reply(me, "heard", None, (), me.y))
            case Word.STANDS:
                me.comes_again(frame.data)
                me.shared.stand()
                self._show(me)
            case Word.OWED:
                self._answers.append(Reply(me, "owed", (places(me.y),), (), me.y))
            case Word.MERGE:
                done = me.merge(me.y, frame.a, set(marshal.loads(frame.data)))
                self._answers.append(Reply(me, "merged" if done else "refused", None, (), me.y))
            case Word.FINISHED:
                if self._retired.one_more():
                    for one in self._sharers.values():
                        self._show(one, "over")
        answers, self._answers = self._answers, []
        return self._slots.letters(answers)

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
        self._answers.append(Reply(one, how, None, [(one.y.clone(), None)], one.y))
