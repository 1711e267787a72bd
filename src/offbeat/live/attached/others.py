"""What a worker does for the sake of the others: steps without data, and averages of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from offbeat.live.attached.driver import Driver
from offbeat.live.attached.equal import equalise
from offbeat.live.attached.flat import Flat
from offbeat.live.attached.stepping import Stepping
from offbeat.live.carriers.exchanges import Transport
from offbeat.live.carriers.island import Island
from offbeat.live.partial.endpoints import Endpoints
from offbeat.live.transport import elsewhere
from offbeat.live.work import share
from offbeat.live.worker.board import Board
from offbeat.method.effects import Next, Turn


class Others:
    """This worker's answers to what the others ask for."""

    def __init__(
        self,
        flat: Flat,
        board: Board,
        transport: Transport,
        driver: Driver,
        endpoints: Endpoints,
        stepping: Stepping,
        idled: Callable[[], None],
        island: Island | None = None,
    ) -> None:
        """``idled`` is called after each step without data."""
        self._flat, self._board, self._transport, self._driver = flat, board, transport, driver
        self._endpoints, self._stepping, self.me = endpoints, stepping, driver.me
        self._idled, self._island = idled, island

    # Averages.

    def asked(self) -> bool:
        """Whether somebody asks for an average that this worker has not taken part in."""
        return self._board.average_is_asked(self._board.averages)

    def average(self) -> None:
        """Ask all for an average, and take part in it."""
        self._board.reach(self.me.t - 1)  # those without data first take the steps that we took
        self._board.ask_for_average(self._board.averages)
        if self._meets_in_steps and isinstance(self._driver.asks, Next):
            self._keep_up()
        self.take_part()

    def _keep_up(self) -> None:
        """Until all ask for this average, take the steps that the others still take: there they wait for this worker.

        Workers that share their work take unequally many: one is at the end of an epoch, and another has a batch more.
        """
        while not self._all_are_here():
            if self._is_behind():
                self._idle()
            else:
                here = "the others to average"
                self._transport.waiter.until(lambda: self._all_are_here() or self._is_behind(), here)
        while self._is_behind():  # who asks has said before which steps it took
            self._idle()

    @property
    def _meets_in_steps(self) -> bool:
        """Whether workers wait for each other in their steps; else each is where it is when an average is asked for."""
        return not self._endpoints.has_channel

    def _all_are_here(self) -> bool:
        return self._board.all_ask_for_average(self._board.averages, self._crowd)

    def _is_behind(self) -> bool:
        """Whether somebody takes a step with data that this worker has not taken."""
        return self.me.t <= self._board.progress(self._crowd)[1]

    def take_part(self) -> None:
        """Make all replicas equal, in the middle of a run or at its end."""
        self._board.averages += 1
        share.tell(self._board.name)
        if self._driver.asks is not None:  # in the middle of a run
            self._endpoints.align(self._flat.x, self._largest)
            self._largest(0)  # all have told what they hold, and nobody goes on before the replicas are equal
            share.take_snapshots(self._board.name)
        equalise(self._flat, self._transport, self._island)
        self._endpoints.adopt(self._flat.x)

    def _largest(self, number: int) -> int:
        agreed = self._transport.agree_on(torch.tensor([number]), dist.ReduceOp.MAX, "the others to stand still")
        return int(agreed.item())

    # Without data.

    def until(self, ready: Callable[[], bool]) -> None:
        """Until ``ready``, while this worker's loop has no batch and may be given one; or until somebody asks for an
        average, which its loop may have come to.
        """
        with torch.no_grad():
            self._driver.start()
            if self._stepping.has_begun or self._driver.steps_alone:
                return
            self._stay_out("no batch", "batches that others may give back", lambda: ready() or self.asked())

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Of what all workers have measured, one after the other: each calls it equally often."""
        known = self._board.say_for_mean(numbers)
        with torch.no_grad():
            self._driver.start()
            self._stay_out("mean", "a mean of all", lambda: known() is not None)
        found = known()
        assert found is not None
        return found

    def _stay_out(self, meeting: str, what: str, over: Callable[[], bool]) -> None:
        """Wait between two steps. The others' steps are taken without data, and their rounds do not wait for this
        worker: it is in a meeting of its own, which nobody else ever enters.
        """
        name = f"{meeting}/{self._board.name}/{self.me.rank}"
        self._board.waits_for_data(True)
        elsewhere.count(name, self._board.members)
        with elsewhere.waiting(name, what):
            while not over():
                if self._takes_their_steps():
                    self._idle()
                else:
                    self._transport.waiter.until(lambda: over() or self._takes_their_steps(), what, bears=True)
        self._board.waits_for_data(False)

    def _takes_their_steps(self) -> bool:
        return self._meets_in_steps and isinstance(self._driver.asks, Next) and self._is_behind()

    def until_all_are_done(self) -> None:
        """No data left: answer the others until the strategy has ended."""
        self._board.post_done(self.me.t)
        while self._driver.asks is not None:
            self._idle_or_stop()

    def _idle_or_stop(self) -> None:
        # Asked first: the steps before an average come before it. Of its own crowd only: others are at other steps.
        asked = self._average_is_due()
        all_done, last = self._board.progress(self._crowd)  # of one moment: who is done has said its last step before
        if self.me.t <= last:
            self._idle()
        elif all_done:
            self._endpoints.finished()
            self._driver.turn(Turn.STOP)
        elif asked:
            self.take_part()
        else:
            self._transport.waiter.until(self._something_to_do, "the others to finish", bears=True)

    def _idle(self) -> None:
        self._driver.turn(Turn.IDLE)
        self._stepping.without_data()
        self._idled()

    def _average_is_due(self) -> bool:
        """Whether one is asked for; where workers wait for each other in their steps, by all who still have data."""
        asked = self._board.average_is_asked(self._board.averages, self._crowd)
        return asked and (not self._meets_in_steps or self._all_are_here())

    @property
    def _crowd(self) -> tuple[int, ...] | None:
        """Those who take their steps together with this worker."""
        return self._driver.asks.among if isinstance(self._driver.asks, Next) else None

    def _something_to_do(self) -> bool:
        return self._board.progress(self._crowd)[0] or self._is_behind() or self._average_is_due()
