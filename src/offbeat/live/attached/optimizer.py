"""``attach``: a strategy under the user's own optimiser, in the user's own loop."""

from __future__ import annotations

import atexit
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from offbeat.live.attached import refusals as checks
from offbeat.live.attached import state
from offbeat.live.attached.cutting import MicroBatches, Stream, batches
from offbeat.live.attached.driver import Driver
from offbeat.live.attached.equal import equalise, share_beginning
from offbeat.live.attached.flat import Flat
from offbeat.live.attached.gradients import Gradients
from offbeat.live.attached.recorder import Recorder
from offbeat.live.attached.stats import Log, Stats, Summary
from offbeat.live.partial.endpoints import Endpoints
from offbeat.live.transport import elsewhere
from offbeat.live.transport.board import Board
from offbeat.live.transport.errors import OffbeatError, PeerFailed
from offbeat.live.transport.exchanges import Transport
from offbeat.live.transport.waiter import Waiter
from offbeat.method.effects import Batch, Done, Next, Turn
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy
from offbeat.runs.order import Part
from offbeat.runs.trace import Trace
from offbeat.tensors.vector import Vec

P = ParamSpec("P")
T = TypeVar("T")


def _over_when_a_peer_fails(method: Callable[Concatenate[Attached, P], T]) -> Callable[Concatenate[Attached, P], T]:
    """A run that has lost a peer is over: its threads end and its memory is given back before the user hears of it."""

    @functools.wraps(method)
    def call(self: Attached, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except PeerFailed as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise

    return call


class Attached(torch.optim.Optimizer):
    """A torch optimiser whose ``step`` is a strategy's. It shares ``param_groups`` and ``state`` with the inner one.

    ``finish()`` (or the end of a ``with`` block) ends the run on all ranks with equal weights; ``average()`` makes them
    equal in the middle of one.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        strategy: Strategy,
        board: Board,
        *,
        max_norm: float | None,
        accumulate: int,
        seed: int,
        steps: int | None,
        patience_s: float,
        log: Log | None,
        recorder: Recorder | None,
        closed: Callable[[], None],
    ) -> None:
        # torch's own __init__ would add the parameters anew; what it sets up is shared with the inner optimiser.
        self.inner, self.strategy = inner, strategy
        self._flat = Flat(model, inner)
        self._board = board
        self._max_norm = max_norm
        self._on_close = closed
        self._stats = Stats(log)
        board.agree(checks.facts(self._flat, strategy, accumulate=accumulate, seed=seed, steps=steps))
        self._waiter = Waiter(board, patience_s)
        try:
            self._transport = Transport(self._waiter, board, [p.device for p in self._flat.parts])
            share_beginning(self._flat, self._transport)
        except BaseException as error:
            board.fail(f"{type(error).__name__}: {error}")
            board.abandon()
            raise
        self.me = Replica(
            board.rank,
            board.size,
            self._flat.x,
            self._flat.buffers,
            self._update,
            lambda: inner.param_groups,
            seed,
            steps,
            parameters=len(self._flat.params),
        )
        self._recorder = recorder
        if recorder is not None:
            weights, how = self._flat.params, {"max_norm": max_norm, "accumulate": accumulate}
            recorder.begin(strategy, board.size, seed, steps, weights, **how)
        events = recorder.told.events if recorder is not None else None
        self._endpoints = Endpoints(board, self._transport, patience_s, self._average_is_asked, self._equalise, events)
        self._driver = Driver(strategy, self.me, self._transport, self._endpoints)
        self._stream = Stream(self._flat, self._ring, self._rung, recorder.part if recorder is not None else None)
        self._left = state.Left()
        self._averages = 0
        self._in_step = self._closed = False
        self._gradients = Gradients(self._flat, self._driver, self._transport, accumulate, self._begin)
        self._everyone = tuple(range(board.size))
        self._handled = id(sys.exc_info()[1])  # the script may have been started from an except clause
        elsewhere.attached(board.name)
        atexit.register(self._at_exit)

    # What a torch optimiser has.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def __repr__(self) -> str:
        return f"{self.strategy} on rank {self.me.rank} of {self.me.size} over {self.inner!r}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradients.forget_backwards()
        self._stream.forget()
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise OffbeatError("parameters cannot be added after attach; give them to the optimizer before it")

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.inner.register_step_post_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimiser's state and, under "offbeat", the strategy's. Local: nothing is communicated.

        Methods whose rounds nobody waits for (``eager``, ``wagma``, ``ad_psgd``) have some under way at any moment:
        call ``average()`` on all ranks before, and nothing is lost or applied twice.
        """
        if not self._closed:
            self._remember()
        return {**self.inner.state_dict(), "offbeat": state.saved(self.strategy, self.me, self._left)}

    def _remember(self) -> None:
        owed = self._endpoints.owed() if self._endpoints.is_open else self._left.owed
        self._left = state.Left(self._driver.resume_from, self._endpoints.rounds, owed, self._stream.waiting)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a run where ``state_dict`` left it.

        Load this rank's model after ``attach`` too, which gives all ranks the weights of rank 0.
        """
        rest = dict(state_dict)
        own = rest.pop("offbeat", None)
        if self._recorder is not None:
            self._recorder.cannot("it was taken up from a state, which the record does not hold")
        if own is not None:  # first, as it may refuse: then nothing is loaded
            self._driver.refuse_if_begun()
            self._left = state.restore(own, self.strategy, self.me)
            self._driver.restart(self._left.exchanges, self._left.owed)
            self._endpoints.resume(self._left.rounds)
            self._reset_step()
            self._warn_waited(self._left.waiting)
        self.inner.load_state_dict(rest)

    # What Offbeat adds.

    @property
    def rank(self) -> int:
        """Which worker this is, from 0."""
        return self.me.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self.me.size

    @property
    def wait_s(self) -> float:
        """Seconds this worker has spent waiting for the network and the others."""
        return self._transport.waiter.waited_s + self._endpoints.waited_s

    @property
    def wire_bytes(self) -> int:
        """Bytes this worker has sent."""
        return self._transport.wire_bytes + self._endpoints.wire_bytes

    @property
    def trace(self) -> Trace:
        """The partial rounds this worker took part in: who was fresh, how stale the others were, how long it waited."""
        return self._endpoints.trace

    @property
    def lost(self) -> list[int]:
        """The steps of this worker whose gradients were dropped (``eager`` with ``stale="drop"``)."""
        return self._endpoints.lost

    def summary(self) -> Summary:
        """How the run goes: this worker's own numbers and, after ``finish()``, which workers were waited for."""
        return self._stats.summary(self)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._abandon(f"{type(error).__name__}: {error}")

    @_over_when_a_peer_fails
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the strategy with the gradients that backward left in ``p.grad``."""
        self._refuse_if_closed("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        with torch.no_grad():
            asks = self._driver.asks
            self._driver.answer(self._done(asks) if isinstance(asks, Batch) else self._gradients.gradient())
        self._reset_step()
        if self._recorder is not None:
            self._recorder.stepped()
        self._stats.stepped(self)
        return loss

    @_over_when_a_peer_fails
    def micro_batches(self, batch: Any, cost: Callable[[Any], float] | None = None) -> MicroBatches:
        """Cut ``batch`` for ``nonblocking``: micro-batches until the others move on; the rest comes first next time.

        A batch is a tensor, or a tuple, list or dict of tensors with one row a sample. ``cost`` cuts by the cost of
        samples instead of their number: it is given one sample, a batch without its first dimension. The loss of a
        micro-batch must be the mean over its samples. A micro-batch without a ``backward`` does not count.
        """
        self._refuse_if_closed("micro_batches()")
        self._begin()
        asks = self._driver.asks
        if not isinstance(asks, Batch):
            raise OffbeatError(f"{self.strategy} takes whole batches; micro_batches() goes with ob.nonblocking()")
        self._stream.add(batch, cost)
        return self._stream.open(asks)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """A loader's batches for ``micro_batches``; new data is fetched only when the leftovers do not make a round."""
        return batches(self._stream, lambda: self.me.reported.micro_batches, loader)

    @property
    def samples_used(self) -> list[int]:
        """How many samples each worker has contributed (``nonblocking``): epochs and schedules count their sum.

        A worker uses its samples in order, so a resumed one goes on behind its first ``samples_used[rank]``. Along a
        graph, the counts of the others are those of the round before.
        """
        return list(self.me.reported.samples_used)

    @_over_when_a_peer_fails
    def average(self) -> None:
        """Make all replicas equal now (weights and buffers), to evaluate or to save. Every rank must call it."""
        self._refuse_if_closed("average()")
        elsewhere.stepping()
        elsewhere.count(f"{self._board.name}/average", self._everyone)
        self._flat.adopt()
        if self._recorder is not None:
            self._recorder.averages(self.me.t, self._in_step, self._endpoints.per_node)
        if self.me.size > 1:
            with torch.no_grad():
                self._driver.start()  # as those without data have done
            self._board.reach(self.me.t - 1)  # those without data first take the steps that we took
            self._board.ask_for_average(self._averages)
            self._equalise()

    @_over_when_a_peer_fails
    def finish(self) -> None:
        """End the run: answer the others until all are done, apply what is in flight, make all replicas equal.

        Called again, it does nothing. Called while an exception is on its way, as in a ``finally:``, it ends the run on
        all ranks as the ``with`` block would, with the words of that exception.
        """
        if self._closed:
            return
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, StopIteration) and id(error) != self._handled:
            self._abandon(f"{type(error).__name__}: {error}")
            return
        elsewhere.stepping()
        elsewhere.count(f"{self._board.name}/finish", self._everyone)
        with torch.no_grad():
            self._flat.adopt()
            self._driver.start()
            if self._in_step:  # a backward without its step(): the others may have counted on it
                if self._recorder is not None:
                    self._recorder.cannot("it ended between backward() and step()")
                self._board.reach(self.me.t)
                if self._gradients.was_made:
                    self._driver.answer(None)
                self._idle_turn()
            self._board.post_done(self.me.t)
            while self._driver.asks is not None:
                self._idle_or_stop()
            if self.me.size > 1:
                self._equalise()
                self._stats.exchange(self._transport)
                self._transport.agree_on(torch.zeros(1), dist.ReduceOp.SUM, "the others to finish")
        if self._recorder is not None:
            self._recorder.end(self.me.rank, self._flat.params)
        self._release()
        self._endpoints.close()
        self._give_back()
        self._transport.close()
        self._board.close()
        self._on_close()
        self._warn_leftovers()  # last: where warnings are errors, the others are not kept waiting

    # A step: begin (first gradient), backward over, step().

    def _begin(self) -> None:
        if self._in_step:
            return
        self._refuse_if_closed("backward()")
        elsewhere.stepping()
        if not self._endpoints.has_channel:  # there, steps need not match
            elsewhere.count(f"{self._board.name}/step", self._everyone)
        with torch.no_grad():
            self._flat.adopt()
            self._driver.start()
            if isinstance(self._driver.asks, Next):
                self._driver.turn(Turn.WORK)
            self._hang_bell()
        self._in_step = True

    def _hang_bell(self) -> None:
        asks = self._driver.asks
        if (
            isinstance(asks, Batch)
            and asks.stop.workers is not None
            and self.me.size > 1
            and not self._endpoints.is_open
        ):
            self._board.reach(self.me.t)  # so that those without data come here, too: the bell is hung by all
            self._endpoints.hang_bell()

    def _done(self, asks: Batch) -> Done:
        if self._stream.used:
            return self._stream.done()
        done = self._gradients.whole_batch(asks)
        if self._recorder is not None:
            self._recorder.part(Part((), done.pieces, done.of, None, done.samples))
        if asks.stop.workers is not None:
            self._ring(asks.r, asks.stop.workers)
        return done

    def _ring(self, r: int, workers: int) -> None:
        if self.me.size > 1:
            self._endpoints.hang_bell().ring(r, workers)

    def _rung(self) -> int:
        return self._endpoints.hang_bell().rung if self.me.size > 1 else -1

    def _warn_leftovers(self) -> None:
        if self._stream.waiting or self._stream.samples:
            warnings.warn(
                f"{self._stream.waiting + self._stream.samples} samples of this worker were never used; loop over "
                "optimizer.batches(loader), which hands them out at the end, with a step() for each batch",
                stacklevel=3,
            )

    def _warn_waited(self, waiting: int) -> None:
        if waiting:
            warnings.warn(
                f"when this state was saved, {waiting} samples waited on rank {self.me.rank}; samples are not saved; "
                "let the data go on behind this worker's first optimizer.samples_used[rank] samples",
                stacklevel=3,
            )

    def _update(self, g: Vec) -> None:
        """The inner optimiser's step."""
        self._gradients.put(g)
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._flat.params, self._max_norm)
        self.inner.step()

    def _reset_step(self) -> None:
        self._in_step = False
        self._gradients.reset()

    # Without data: answering the others.

    def _idle_or_stop(self) -> None:
        # Asked first: the steps before an average come before it. Of its own crowd only: others are at other steps.
        asked = self._board.average_is_asked(self._averages, self._crowd)
        done, reached = self._board.progress(self._crowd)
        if self.me.t <= reached:
            self._driver.turn(Turn.IDLE)
            self._idle_turn()
        elif done:
            self._endpoints.finished()
            self._driver.turn(Turn.STOP)
        elif asked:
            self._equalise()
        else:
            self._waiter.until(self._something_to_do, "the others to finish", bears=True)

    @property
    def _crowd(self) -> tuple[int, ...] | None:
        """Those who take their steps together with this worker."""
        return self._driver.asks.among if isinstance(self._driver.asks, Next) else None

    def _something_to_do(self) -> bool:
        done, reached = self._board.progress(self._crowd)
        return done or self.me.t <= reached or self._board.average_is_asked(self._averages, self._crowd)

    def _idle_turn(self) -> None:
        """Run one step without a gradient of our own."""
        self._driver.idle = True
        self._hang_bell()
        while not isinstance(asks := self._driver.asks, Next) and asks is not None:
            self._driver.answer(self._gradients.without_own())
        self._reset_step()

    # Beginning and ending.

    def _average_is_asked(self) -> bool:
        return self._board.average_is_asked(self._averages)

    def _equalise(self) -> None:
        self._averages += 1
        if self._driver.asks is not None:  # in the middle of a run
            self._endpoints.align(self._flat.x, self._largest)
        equalise(self._flat, self._transport)
        self._endpoints.adopt(self._flat.x)

    def _largest(self, number: int) -> int:
        agreed = self._transport.agree_on(torch.tensor([number]), dist.ReduceOp.MAX, "the others to stand still")
        return int(agreed.item())

    def _release(self) -> None:
        self._closed = True
        elsewhere.released(self._board.name)
        atexit.unregister(self._at_exit)
        self._gradients.release()

    def _give_back(self) -> None:
        """Let go of all memory of the run now. What stays is what it was like, and what ``state_dict`` saves."""
        self._remember()
        self._gradients.forget()
        for part in (self._driver, self._stream, self._endpoints, self.me, self._flat):
            part.release()

    def _abandon(self, message: str) -> None:
        """Leave without waiting for anybody, and tell the others why."""
        if self._closed:
            return
        self._release()
        self._board.fail(message)  # before hanging up, so that whoever notices that finds the reason
        self._driver.release()  # with what it has begun: what has ended well is not parked with the groups
        self._endpoints.abandon()
        with suppress(RuntimeError):  # a device that has failed: its memory is not to be had
            self._give_back()
        self._transport.park()
        self._board.abandon()

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self._abandon(f"{type(error).__name__}: {error}" if error else "the process ended without finish()")

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise OffbeatError(f"{what} came after the run was ended; attach the optimizer again to go on")
