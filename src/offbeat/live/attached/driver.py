"""A strategy driven from the user's own loop.

The coroutine runs until it asks for something only the user's loop can give (the next step, a gradient) and is left
hanging there. A step has three moments: the first gradient of its backward appears (``begin``), backward is over, and
the user calls ``optimizer.step()``. All of this is one thread, the user's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch

from offbeat.live.carriers.exchanges import Transport
from offbeat.live.carriers.island import Island
from offbeat.live.carriers.sent import Sent
from offbeat.live.partial.endpoints import Endpoints
from offbeat.live.transport.errors import OffbeatError
from offbeat.method.effects import (
    Batch,
    Begin,
    Effect,
    Finish,
    Grad,
    GradMix,
    Mix,
    Next,
    OnlyOurs,
    Open,
    Spent,
    Turn,
)
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy
from offbeat.tensors.vector import Vec


class OwnTime:
    """The seconds that pass, without those in which others have a part."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._away_s = 0.0

    def since_now(self) -> float:
        """What has passed since this was called last; counts anew."""
        now_s = time.monotonic()
        passed_s = max(now_s - self._begun_s - self._away_s, 0.0)
        self._begun_s, self._away_s = now_s, 0.0
        return passed_s

    def away_since(self, begun_s: float) -> None:
        """What has passed since then is not counted."""
        self._away_s += time.monotonic() - begun_s


class Driver:
    """Answers one strategy's requests on this process."""

    def __init__(
        self,
        strategy: Strategy,
        me: Replica,
        transport: Transport,
        endpoints: Endpoints,
        tell_spent: Callable[[float], None],
        island: Island | None = None,
    ) -> None:
        self.strategy, self.me, self._transport, self._endpoints = strategy, me, transport, endpoints
        self._island = island
        self._coroutine: Coroutine[Effect[Any], Any, None] | None = None
        self._seq = 0
        self._in_flight: list[Sent] = []
        self._known: deque[Vec] = deque()  # what came of exchanges that a twin of this worker had begun
        self._own_time, self._tell_spent = OwnTime(), tell_spent
        self._owed: Vec | None = None  # to the channel, from before a resume
        self.asks: Effect[Any] | None = None  # what it hangs at: Next, or a kind of gradient; None: ended
        self.idle = False

    def start(self) -> None:
        """Run the strategy up to its first step, if that has not been done."""
        if self._coroutine is None:
            self._coroutine = self.strategy.body(self.me)
            self._own_time.since_now()
            self.answer(None)

    def refuse_if_begun(self) -> None:
        """What a channel or shared weights have begun cannot start anew."""
        if self._endpoints.is_open:
            raise OffbeatError("load_state_dict() came after the first step; load the state right after attach")

    def restart(self, exchanges: int, owed: Vec | None) -> None:
        """Forget the coroutine: its memory was replaced, and it will start anew from there.

        ``owed``: what its channel is to be opened with.
        """
        if self._coroutine is not None:
            self._coroutine.close()
        self._coroutine, self.asks, self._seq, self._in_flight = None, None, exchanges, []
        self._transport.turn_page(exchanges)
        self._owed = owed

    def release(self) -> None:
        """The run is over: let go of the coroutine and of what is under way, with everything they still hold."""
        self._coroutine = self.asks = None
        self._seq, self._in_flight = self.resume_from, []
        self._known.clear()

    @property
    def resume_from(self) -> int:
        """The number the next exchange has after a resume: what is in flight is begun again under its old number."""
        return self._seq - len(self._in_flight)

    def under_way(self) -> list[Vec]:
        """What comes of the exchanges that are under way, once all of it is there."""
        for sent in self._in_flight:
            self._transport.waiter.wait(sent.works, "the exchanges that are under way")
        return [sent.keep() for sent in self._in_flight]

    def take_over(self, exchanges: int, known: Sequence[Vec]) -> None:
        """Go on as a worker that has begun so many exchanges, and where it knows what comes of the last of them."""
        self.restart(exchanges, None)
        self._known.extend(known)

    def turn(self, turn: Turn) -> None:
        """Answer the question for the next step."""
        assert isinstance(self.asks, Next), f"the strategy asks {self.asks}, not for a step"
        self.idle = turn is Turn.IDLE
        self._transport.waiter.t = self.me.t if turn is Turn.WORK else -1
        self.answer(turn)

    def answer(self, value: object) -> None:
        """Go on with ``value`` until the strategy asks for a step or a gradient again, or ends."""
        assert self._coroutine is not None
        answer, coroutine = value, self._coroutine
        try:
            with OnlyOurs():
                while not isinstance(effect := coroutine.send(answer), (Next, Grad, GradMix, Batch)):
                    if isinstance(effect, Spent):
                        answer = self._spent()
                        continue
                    begun_s = time.monotonic()
                    answer = self._perform(effect)
                    self._own_time.away_since(begun_s)
        except StopIteration:
            self.asks = None
            return
        self.asks = effect
        if isinstance(effect, Next):
            self._transport.waiter.t = -1
        if self._endpoints.step_over is not None:
            self._endpoints.step_over()

    def _spent(self) -> float:
        for device in {part.device for part in self.me.x.parts if part.is_cuda}:
            torch.cuda.synchronize(device)  # what backward has begun there is time of ours, too
        seconds = self._own_time.since_now()
        if self._island is not None:
            seconds = self._island.longest(seconds)
        self._tell_spent(seconds)
        return seconds

    @property
    def steps_alone(self) -> bool:
        """Whether this worker counts its steps by itself and yet meets the others, who may be at any other step."""
        return isinstance(self.asks, Next) and self.asks.among == (self.me.rank,) and not self._endpoints.is_open

    def _perform(self, effect: Effect[Any]) -> object:
        if isinstance(effect, Mix):
            return self.wait(self.post(effect))
        if isinstance(effect, Begin) and isinstance(effect.effect, Mix):
            self._in_flight.append(sent := self.post(effect.effect, later=True))
            return sent
        if isinstance(effect, Finish) and isinstance(effect.ticket, Sent):
            self._in_flight.remove(effect.ticket)
            return self.wait(effect.ticket)
        if isinstance(effect, Open) and self._owed is not None:
            effect, self._owed = Open(effect.channel, self._owed), None
        return self._endpoints.perform(effect, self.me)

    def post(self, effect: Mix, later: bool = False) -> Sent:
        """Start an exchange: the n-th of this worker meets everybody's n-th. ``later``: it is waited for later."""
        if not self._known:
            self._transport.handing_over(with_gradient=isinstance(self.asks, Batch) and not self.idle)
        sent = self._begun_before() if self._known else self._transport.mix(effect, self._seq, self.me.seed, later)
        self.next_seq()
        return sent

    def _begun_before(self) -> Sent:
        known = self._known.popleft()
        return Sent((), lambda: known)

    @property
    def seq(self) -> int:
        """The number of the next exchange; also keys the codecs' draws, so both worlds count alike."""
        return self._seq

    def next_seq(self) -> None:
        """This worker has brought all that it brings to an exchange."""
        self._seq += 1
        self._transport.turn_page(self._seq)

    def wait(self, sent: Sent) -> Vec:
        self._transport.waiter.wait(sent.works, f"the others' share at step {self.me.t}")
        return sent.result()
