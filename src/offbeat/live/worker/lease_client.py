"""A worker's side of a share's batches (`offbeat.live.host.lease_server`): it asks, and says what it has used.

It has no thread. A question is answered at once, but one that waits for what others may give back. A worker alone has a
dealer of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from offbeat.live.host import protocol as say
from offbeat.live.transport import notice
from offbeat.live.transport.errors import ConfigMismatch, OffbeatError
from offbeat.live.worker.board import Board
from offbeat.rounds.leases import Account, Dealer, Dealt, Taker

LOOK_S = 0.1  # how often a waiting worker looks at the board


class Leases:
    """What a share asks, whoever answers."""

    rank, size, steps = 0, 1, 0  # steps: of all workers, when it was last told

    def taker(self, epoch: int, batches: int, about: str) -> Taker:
        """This worker's way through an epoch of so many batches. All must say the same ``about`` it."""
        return Taker(self.rank, self.size, OfEpoch(self, epoch, batches, about))

    def open(self, epoch: int, batches: int, about: str) -> Dealt:
        raise NotImplementedError

    def begin(self, epoch: int, place: int, batch_us: int) -> Dealt:
        raise NotImplementedError

    def take(self, epoch: int, batch_us: int, backlog: int) -> Dealt:
        raise NotImplementedError

    def look(self, epoch: int) -> Dealt:
        """How far all are in it."""
        raise NotImplementedError

    def accounts(self) -> list[Account]:
        """What has become of all epochs."""
        raise NotImplementedError

    def step(self, epoch: int, places: Sequence[int], skipped: Sequence[int], steps: int, hands_over: bool) -> None:
        """So many steps more, with these batches. ``hands_over``: what is handed in next has all steps so far in it."""
        raise NotImplementedError

    def count(self) -> None:
        """They count, though nothing is handed in."""
        raise NotImplementedError

    def close_epoch(self, epoch: int) -> None:
        """This worker uses none of what it holds, and asks for no more of this epoch; −1: of any."""
        raise NotImplementedError

    def wait(self, epoch: int, batch_us: int, until: Callable[[Callable[[], bool]], None] | None) -> Dealt | None:
        """What others have given back, when that is known. ``until`` waits for it, and may return before."""
        return None

    def close(self) -> None:
        """Ask no more."""


class OfEpoch:
    """The questions about one epoch."""

    def __init__(self, leases: Leases, epoch: int, batches: int, about: str) -> None:
        self._leases, self._epoch, self._batches, self._about = leases, epoch, batches, about

    def open(self) -> Dealt:
        return self._leases.open(self._epoch, self._batches, self._about)

    def begin(self, place: int, batch_us: int) -> Dealt:
        return self._leases.begin(self._epoch, place, batch_us)

    def take(self, batch_us: int, backlog: int) -> Dealt:
        return self._leases.take(self._epoch, batch_us, backlog)


class AloneLeases(Leases):
    """A worker alone."""

    def __init__(self) -> None:
        self._dealer = Dealer(1)

    def open(self, epoch: int, batches: int, about: str) -> Dealt:
        return self._dealer.open(0, epoch, batches)

    def begin(self, epoch: int, place: int, batch_us: int) -> Dealt:
        return self._dealer.begin(0, epoch, place, batch_us)

    def take(self, epoch: int, batch_us: int, backlog: int) -> Dealt:
        return self._dealer.take(0, epoch, batch_us, backlog)

    def look(self, epoch: int) -> Dealt:
        return self._dealer.look(0, epoch)

    def accounts(self) -> list[Account]:
        return self._dealer.accounts()

    def step(self, epoch: int, places: Sequence[int], skipped: Sequence[int], steps: int, hands_over: bool) -> None:
        self._dealer.step(0, epoch, places, skipped, steps)
        self.steps += steps
        self.count()

    def count(self) -> None:
        self._dealer.hands_over(0)
        self._dealer.handed_in(0)

    def close_epoch(self, epoch: int) -> None:
        self._dealer.close(0, epoch)


class LeaseClient(Leases):
    """A worker of several. ``needs_all``: the failure of another ends its waits."""

    def __init__(self, key: str, board: Board, patience_s: float, needs_all: bool = True) -> None:
        assert board.line is not None
        self._key, self._board, self._line, self._patience_s = key, board, board.line, patience_s
        self.rank, self.size = board.rank, board.size
        self._needs_all = needs_all
        self._asked, self._answer = 0, None  # type: int, Any
        self._is_open = True
        self._word = self._line.join(key, lambda message: True)
        plan = {**board.plan(), "what": "leases"}
        self._line.send(say.OpenChannel(key, board.rank, plan, 0, False, False, self._word))

    def open(self, epoch: int, batches: int, about: str) -> Dealt:
        answer = self._ask(lambda number: say.BeginEpoch(self._key, number, epoch, batches, about))
        if answer.other:
            raise ConfigMismatch(
                f"the ranks share different work: one has {answer.other}, rank {self.rank} has {about}; make them "
                "equal, and load the same state on all ranks: save it after optimizer.average()"
            )
        return self._dealt(answer)

    def begin(self, epoch: int, place: int, batch_us: int) -> Dealt:
        return self._dealt(self._ask(lambda number: say.BeginBatch(self._key, number, epoch, place, batch_us)))

    def take(self, epoch: int, batch_us: int, backlog: int) -> Dealt:
        return self._dealt(
            self._ask(lambda number: say.TakeBatches(self._key, number, epoch, batch_us, backlog, False))
        )

    def look(self, epoch: int) -> Dealt:
        return self._dealt(self._ask(lambda number: say.HowFar(self._key, number, epoch)))

    def accounts(self) -> list[Account]:
        answer = self._ask(lambda number: say.HowFar(self._key, number, -1))
        self.steps = answer.steps
        return [Account(*one) for one in answer.epochs]

    def step(self, epoch: int, places: Sequence[int], skipped: Sequence[int], steps: int, hands_over: bool) -> None:
        self.steps += steps
        self._line.send(say.Stepped(self._key, epoch, list(places), list(skipped), steps, hands_over))

    def count(self) -> None:
        self._line.send(say.HandedIn(self._key))

    def close_epoch(self, epoch: int) -> None:
        self._line.send(say.CloseEpoch(self._key, epoch))

    def wait(self, epoch: int, batch_us: int, until: Callable[[Callable[[], bool]], None] | None) -> Dealt | None:
        if until is None:
            return None
        self._asked += 1
        self._line.send(say.TakeBatches(self._key, self._asked, epoch, batch_us, 0, True))
        until(self._has_answered)
        if self._answer is None:
            self._line.send(say.StopWaiting(self._key))
        return self._dealt(self._answered())

    @notice.heeding
    def _ask(self, question: Callable[[int], Any]) -> Any:
        self._asked += 1
        self._line.send(question(self._asked))
        return self._answered()

    def _answered(self) -> Any:
        start_s, what = time.monotonic(), "an answer of the host process"
        while not self._has_answered(LOOK_S):
            if self._needs_all:
                self._board.check(what)
            if time.monotonic() - start_s > self._patience_s:
                raise OffbeatError(
                    f"waited {self._patience_s:.0f} s for {what} about shared work; offbeat status says who is busy"
                )
        answer, self._answer = self._answer, None
        return answer

    def _has_answered(self, within_s: float = 0.0) -> bool:
        """Whether the question that was asked last is answered."""
        while self._answer is None and (heard := self._line.heard_within(self._key, within_s)) is not None:
            if heard.number == self._asked:  # else somebody has asked, and was interrupted
                self._answer = heard
        return self._answer is not None

    def _dealt(self, answer: Any) -> Dealt:
        self.steps = answer.steps
        taken = tuple(answer.taken)
        return Dealt(answer.front, answer.back, taken, answer.is_over, answer.used, answer.has_last, answer.steps)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with suppress(OffbeatError):
                self._line.send(say.Close(self._key))
            self._line.part(self._key, self._word)
