"""A worker's side of shared weights that the host process keeps (`offbeat.live.host.weights_server`)."""

from __future__ import annotations

import time
from collections.abc import Callable

from offbeat.live.host import protocol as say
from offbeat.live.host.protocol import Answer
from offbeat.live.worker.board import Board
from offbeat.live.worker.channel_client import LONG_BYTES, LOOK_S, HostClient
from offbeat.live.worker.line import Line
from offbeat.live.worker.slots import Slots
from offbeat.live.worker.waiter import Waiter
from offbeat.method.effects import Ticket
from offbeat.rounds.seat import Event
from offbeat.runs.trace import Round, Trace
from offbeat.tensors.vector import Vec


class Meeting(Ticket[None]):
    """One that was asked for; it is over when the host process has heard of it."""

    __slots__ = ()


class WeightsClient(HostClient):
    """A worker's side."""

    def __init__(
        self,
        key: str,
        line: Line,
        word: int,
        slots: Slots,
        board: Board,
        trace: Trace,
        nbytes: int,
        patience_s: float,
        log: list[Event] | None = None,
    ) -> None:
        super().__init__(key, line, word, slots, board, patience_s)
        self._trace, self._nbytes, self._log = trace, nbytes, log
        self._worker = Waiter(board, patience_s)
        self._stood: Vec | None = None
        self._unread = False
        self.waited_s, self.wire_bytes = 0.0, 0

    def begin(self, message: say.OpenChannel, x: Vec) -> None:
        """All workers come here; ``x`` is what the others find."""
        self.open(message)
        slot = self._write(x)
        self.send(say.Release(self.key, 0, self._slots.due()))
        self._ask(say.FirstDeposit(self.key, slot))

    def meet(self, peer: int) -> Meeting:
        """Both take the mean of the two, before anything else that either of them does from now on."""
        self._board.handing_over()
        self.send(say.MeetPeer(self.key, peer))
        if peer != self._board.rank:
            self.wire_bytes += 2 * self._nbytes
        return Meeting()

    def finish(self, visit: Ticket[None]) -> None:
        """Nothing is left to be done."""

    def add(self, delta: Vec) -> Vec:
        """My step, on top of whatever my weights have become."""
        start_s = time.monotonic()
        slot = self._write(delta)
        self.send(say.AddStep(self.key, slot, self._answered, self._slots.due()))
        value = self._shown()
        self.waited_s += time.monotonic() - start_s
        return value

    def _shown(self) -> Vec:
        self._unread = True
        return self._slots.read(self._wait("an answer of the host process").given[0][0])

    def step_over(self) -> None:
        """The worker goes back to its own loop: where vectors are long, what it has read is free for others."""
        if self._unread and self._nbytes >= LONG_BYTES:
            self._unread = False
            self.send(say.Release(self.key, self._answered, self._slots.due()))

    def _hear(self, answer: Answer) -> None:
        self._answered = answer.number
        if self._log is not None:
            self._log += [(what, number) for what, number in answer.events]
        me, rounds = self._board.rank, self._trace.rounds
        for stale, end_s in answer.news:
            if self._trace.keep_rounds:
                rounds.append(Round(len(rounds), me, (me,), {me: stale}, {me: 0.0}, end_s))

    def retire(self, asked: Callable[[], bool], take_part: Callable[[], None]) -> Vec:
        """My weights when nobody can change them any more: all have retired."""
        self.send(say.Finished(self.key))
        since = time.monotonic()
        with self._board.waits_for("the others to retire"):
            while (answer := self._heard_within(LOOK_S)) is None:
                since = self._board.bear_with(since, self._patience_s, "the others to retire")
                if asked():
                    take_part()
        return self._slots.read(answer.given[0][0])

    def stand(self, x: Vec, all_there: Callable[[], bool]) -> None:
        """Between two steps of all workers no meeting is under way; then ``x`` becomes what the shared weights are."""
        self._worker.until(all_there, "the others to stand still")
        self.send(say.Stands(self.key))
        self._stood = self._shown().clone()
        x.copy_(self._stood)

    def adopt(self, x: Vec) -> None:
        """The worker's weights were made equal to the others': so are the shared ones, by a difference."""
        if self._stood is not None:
            slot = self._write(x - self._stood)
            self._ask(say.Shift(self.key, slot, self._slots.due()))
            self._stood = None

    def close(self) -> None:
        self.hang_up()

    def release(self) -> None:
        """Nothing is kept."""

    def abandon(self) -> None:
        self.hang_up()
