"""A step in the user's own loop: it begins with the first gradient, and ends with ``optimizer.step()``."""

from __future__ import annotations

from offbeat.live.attached.cutting import Stream
from offbeat.live.attached.driver import Driver
from offbeat.live.attached.finite import Finite
from offbeat.live.attached.flat import Flat
from offbeat.live.attached.gradients import Gradients
from offbeat.live.attached.recorder import NoRecorder
from offbeat.live.carriers.exchanges import Transport
from offbeat.live.partial.endpoints import Endpoints
from offbeat.live.transport import elsewhere
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.worker.board import Board
from offbeat.method.effects import Batch, Done, Next, Turn
from offbeat.runs.order import Part
from offbeat.tensors.vector import Vec, no_grad


class Stepping:
    """Steps of one worker, with data or without."""

    def __init__(
        self,
        flat: Flat,
        board: Board,
        transport: Transport,
        driver: Driver,
        endpoints: Endpoints,
        accumulate: int,
        recorder: NoRecorder,
        finite: Finite,
    ) -> None:
        self._flat, self._board, self._driver, self._endpoints = flat, board, driver, endpoints
        self._recorder, self._finite, self.me = recorder, finite, driver.me
        self.stream = Stream(flat, endpoints, recorder.part)
        self.gradients = Gradients(flat, driver, transport, accumulate, self.begin)
        self._everyone = board.members
        self.has_begun = self.has_stepped = self.is_over = False

    def begin(self) -> None:
        """The first gradient of a step is about to appear, or ``step()`` to be taken without one."""
        if self.has_begun:
            return
        if self.is_over:
            raise OffbeatError("backward() came after the run was ended; attach the optimizer again to go on")
        elsewhere.stepping()
        if not self._endpoints.has_channel:  # there, steps need not match
            elsewhere.count(f"{self._board.name}/step", self._everyone)
        self._flat.adopt()
        with no_grad():
            self._driver.start()
            if isinstance(self._driver.asks, Next):
                self._driver.turn(Turn.WORK)
            self._hang_bell()
        self._endpoints.look()
        self.has_begun = True

    def end(self) -> None:
        """The user's ``step()``: give the strategy its gradient, and let it do what it does."""
        self.begin()
        with no_grad():
            self._driver.answer(self._gradient())
        self.reset()
        self.has_stepped = True
        self._recorder.stepped()

    def _gradient(self) -> Vec | Done | None:
        """What the strategy asks for, finite. A mean over all is the same for all, and so is what is done about it."""
        asks, t = self._driver.asks, self.me.t
        if self.gradients.overlaps:
            mean = self.gradients.gradient()
            self._finite.look(t, "the mean gradient")
            return mean
        if self.stream.used:
            self.stream.end()
        self._finite.look(t, "its gradient")
        return self._done(asks) if isinstance(asks, Batch) else self.gradients.gradient()

    def without_data(self) -> None:
        """One step without a gradient of our own, for the sake of the others."""
        self._driver.idle = True
        self._hang_bell()
        while not isinstance(asks := self._driver.asks, Next) and asks is not None:
            self._driver.answer(self.gradients.without_own())
        self.reset()

    def give_up(self) -> None:
        """A backward without its ``step()``: the others may have counted on it."""
        self._board.reach(self.me.t)
        if self.gradients.was_made:
            self._driver.answer(None)
        self.without_data()

    def reset(self) -> None:
        self.has_begun = False
        self.gradients.reset()

    def batch(self) -> Batch:
        """What is asked for, where batches are cut."""
        self.begin()
        asks = self._driver.asks
        if not isinstance(asks, Batch):
            raise OffbeatError(
                f"{self._driver.strategy} takes whole batches; micro_batches() goes with ob.nonblocking()"
            )
        return asks

    def _done(self, asks: Batch) -> Done:
        if self.stream.used:
            return self.stream.done()
        done = self.gradients.whole_batch(asks)
        self._recorder.part(Part((), done.pieces, done.of, None, done.samples))
        if asks.stop.workers is not None:
            self._endpoints.ring(asks.r, asks.stop.workers)
        return done

    def _hang_bell(self) -> None:
        asks = self._driver.asks
        rings = isinstance(asks, Batch) and asks.stop.workers is not None
        if rings and self.me.size > 1 and not self._endpoints.is_open:
            self._board.reach(self.me.t)  # so that those without data come here, too: the bell is hung by all
            self._endpoints.hang_bell()

    def release(self) -> None:
        """Listen to backward no longer."""
        self.is_over = True
        self.gradients.release()

    def forget(self) -> None:
        """The run is over: let go of its memory."""
        self.gradients.forget()
        self.stream.release()
