"""The hub's side of partial rounds: feeds the referee with what the clerks say, and tells all when a round starts.

Where a round has been waited for a while, the others are asked where they are: one may be inside a collective of the
script's own, in which it waits for the very worker that waits here. When all have said so, ``rounds.held`` decides;
until the round has started and nobody is held any more, each of them says whenever that changes. How long it takes to
ask is a matter of time, what is decided is not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from offbeat.live.transport.hub import Frame, Letter, Quiet, Word
from offbeat.rounds.held import Elsewhere, held
from offbeat.rounds.referee import Notice, Referee, Say

ASK_S = 0.02
NOBODY = -1  # has started a round that waited for more


class Asking(Quiet):
    """A handler with a referee, whose rounds do not wait for those who are held up elsewhere."""

    def __init__(self, referee: Referee) -> None:
        self._referee = referee
        self._asked: int | None = None  # the round about which all were asked
        self._said: dict[int, Elsewhere] = {}  # their answers

    def _to_all(self, frame: Frame) -> list[Letter]:
        return [(None, frame)]

    @property
    def pause_s(self) -> float | None:  # type: ignore[override]
        ask_s = ASK_S if self._referee.waits and self._asked is None else None
        if self._referee.deadline_s is None:
            return ask_s
        left_s = max(0.0, self._referee.deadline_s - time.monotonic())
        return left_s if ask_s is None else min(left_s, ask_s)

    def silence(self) -> Iterable[Letter]:
        now_s = time.monotonic()
        if self._referee.deadline_s is not None and now_s >= self._referee.deadline_s:
            return self._in_time(self._referee.tick(now_s))
        if not self._referee.waits or self._asked is not None:
            return ()
        self._asked = self._referee.started
        return self._to_all(Frame(Word.WHERE, 0, 1))

    def _in_time(self, started: list[int]) -> Iterable[Letter]:
        """The time of a grace window is over, and these rounds start."""
        raise NotImplementedError

    def _hear_where(self, rank: int, where: Elsewhere) -> list[int]:
        """The rounds that start, now that this is known."""
        if self._asked is None:
            return []
        self._said[rank] = where
        return self._judge()

    def _is_here(self, rank: int) -> list[int]:
        """It speaks of a step: so it is inside nothing else."""
        mine = self._said.get(rank)
        if mine is None or not mine.inside:
            return []
        self._said[rank] = Elsewhere(False, mine.met, mine.rounds)
        return self._judge()

    def _judge(self) -> list[int]:
        everyone = len(self._said) == self._referee.size
        return self._referee.held(held(self._said)) if everyone else []

    def _stop_asking(self) -> list[Letter]:
        """The round has started, and nobody is held: what has been said is no longer needed, and will grow old."""
        if self._asked is None or self._asked == self._referee.started or self._referee.holds:
            return []
        self._asked = None
        self._said.clear()
        return self._to_all(Frame(Word.WHERE, 0, 0))


class Coordinator(Asking):
    """One channel's referee, at the hub."""

    def __init__(self, referee: Referee) -> None:
        super().__init__(referee)
        self._flushed = False

    def hear(self, frame: Frame) -> Iterable[Letter]:
        referee, rank = self._referee, frame.rank
        if frame.word is Word.ELSEWHERE:
            started = self._hear_where(rank, unpack(frame.text))
        else:  # that a round is over, a clerk says, wherever its worker is
            here = [] if frame.word is Word.OVER else self._is_here(rank)
            started = here + referee.hear(rank, notice_of(frame), time.monotonic())
        letters = [letter for version in started for letter in self._go(version, rank)]
        if frame.word is Word.BACK:
            letters.append((rank, Frame(Word.STARTED, 0, referee.started_with(rank))))
        if referee.all_finished and not self._flushed:
            self._flushed = True
            letters.append((None, Frame(Word.FLUSH, 0, referee.started, 0)))
        return [*letters, *self._stop_asking()]

    def _in_time(self, started: list[int]) -> Iterable[Letter]:
        return [*(letter for version in started for letter in self._go(version, NOBODY)), *self._stop_asking()]

    def _go(self, version: int, started_by: int) -> list[Letter]:
        members = self._referee.members(version)
        if members is None:
            return [(None, Frame(Word.GO, 0, version, started_by))]
        go = Frame(Word.GO, 0, version, started_by, text=" ".join(map(str, members)))
        return [(rank, go) for rank in members]


def frame_of(rank: int, notice: Notice) -> Frame:
    """What a seat tells, on its way to the hub."""
    return Frame(Word[notice.what.name], rank, notice.position, notice.base, notice.next_base)


def notice_of(frame: Frame) -> Notice:
    return Notice(Say[frame.word.name], frame.a, frame.b, frame.c)


def pack(where: Elsewhere) -> str:
    return json.dumps([where.inside, where.met, where.rounds])


def unpack(text: str) -> Elsewhere:
    inside, met, rounds = json.loads(text)
    return Elsewhere(
        inside,
        {name: (count, tuple(ranks)) for name, (count, ranks) in met.items()},
        {name: (results, wanted) for name, (results, wanted) in rounds.items()},
    )
