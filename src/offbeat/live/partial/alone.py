"""A channel with one worker, or one node: there is nobody to meet, and each deposit is a round of its own.

The same seat and referee as ever, driven by the worker itself: no host process, no copy to another device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from offbeat.live.worker.weights_client import Meeting
from offbeat.method.effects import Channel, Got, Ticket
from offbeat.rounds.referee import Notice, Referee
from offbeat.rounds.seat import Event, Outcome, Seat
from offbeat.rounds.shared import SharedVec
from offbeat.runs.trace import Round, Trace
from offbeat.tensors.vector import Vec, wide
from offbeat.topology.hierarchy import Nodes


class Alone:
    """The only one there."""

    waited_s = 0.0
    wire_bytes = 0

    def __init__(
        self,
        channel: Channel,
        x: Vec | None,
        nodes: Nodes,
        trace: Trace,
        seed: int,
        first_step: int,
        first_round: int,
        log: list[Event] | None = None,
    ) -> None:
        self._channel, self._nodes, self._trace = channel, nodes, trace
        self._referee = Referee(channel.rules, 1, seed, first_round)
        self._seat = Seat(
            channel.rules, channel.whom, nodes, 0, x, first_round=first_round, first_step=first_step, log=log
        )

    def offer(self, x: Vec, step: int) -> list[Got]:
        self._tell(self._seat.offer(x, step))
        taken = self._seat.take(step)
        self._tell(self._seat.began())
        return taken

    def through(self, step: int) -> bool:
        """Always: nobody else is waited for."""
        return self._seat.is_through(step)

    def finished(self, x: Vec | None) -> None:
        self.renew(x)
        self._tell(self._seat.finish())

    def renew(self, x: Vec | None) -> None:
        self._tell(self._seat.renew(x))

    def rest(self, x: Vec | None, asked: Callable[[], bool], take_part: Callable[[], None]) -> Got | None:
        """Nobody else brings anything; what is owed comes back at the end."""
        self.renew(x)
        if (got := self._seat.next()) is None and self._referee.all_finished and not self._seat.flushed:
            if self._seat.flushes:
                self._round(self._referee.started, flush=True)
            self._seat.flushed = True
            got = self._seat.next()
        return got

    def stand(
        self,
        all_there: Callable[[], bool],
        agree_on_largest: Callable[[int], int],
        apply: Callable[[list[Got]], None],
    ) -> None:
        self._tell(self._seat.stand())
        self.renew(self._channel.holds())
        while (got := self._seat.next()) is not None:
            apply([got])
            self.renew(self._channel.holds())
        self._tell(self._seat.back())
        apply(self._seat.catch_up(agree_on_largest(self._referee.started)))
        self._tell(self._seat.began())

    def owed(self) -> Vec | None:
        return self._seat.tray.owed()

    @property
    def rounds(self) -> int:
        return self._seat.results

    @property
    def lost(self) -> list[int]:
        return self._seat.lost

    def _tell(self, notice: Notice | None) -> None:
        if notice is not None:
            for version in self._referee.hear(0, notice):
                self._round(version)

    def _round(self, version: int, flush: bool = False) -> None:
        seat = self._seat
        given = seat.snapshot(version, flush)
        if given.value is None and not flush:
            raise AssertionError(f"round {version} was started by nobody")
        shares = {} if given.share is None else {0: given.share}
        value = given.value if given.value is not None else Vec(())
        if seat.deliver(Outcome.of(self._nodes, version, value, shares, 1, flush), given) and self._trace.keep_rounds:
            self._trace.rounds.append(
                Round.among(self._nodes, version, -1 if flush else 0, shares, {0: 0.0}, time.monotonic())
            )

    def close(self) -> None:
        """Nothing was opened."""

    def release(self) -> None:
        """Nothing was heard from elsewhere."""

    def abandon(self) -> None:
        """Nobody waits."""


class OwnWeights:
    """Weights that nobody else averages with."""

    waited_s = 0.0
    wire_bytes = 0

    def __init__(self, x: Vec, log: list[Event] | None) -> None:
        self._shared = SharedVec(Vec([p.detach().to(wide(p.dtype)) for p in x.parts]), log)
        self._stood: Vec | None = None

    def meet(self, peer: int) -> Meeting:
        """With itself: nothing changes."""
        return Meeting()

    def finish(self, visit: Ticket[None]) -> None:
        """Nothing is left to be done."""

    def add(self, delta: Vec) -> Vec:
        return self._shared.add(delta)

    def step_over(self) -> None:
        """Nothing was lent."""

    def retire(self, asked: Callable[[], bool], take_part: Callable[[], None]) -> Vec:
        return self._shared.now()

    def stand(self, x: Vec, all_there: Callable[[], bool]) -> None:
        self._stood = self._shared.stand()
        x.copy_(self._stood)

    def adopt(self, x: Vec) -> None:
        if self._stood is not None:
            self._shared.shift(x - self._stood)
            self._stood = None

    def close(self) -> None:
        """Nothing was opened."""

    def release(self) -> None:
        """Nothing was heard from elsewhere."""

    def abandon(self) -> None:
        """Nobody waits."""
