"""``attach``: a strategy under the user's own optimiser, in the user's own loop."""

from __future__ import annotations

import atexit
import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.effects import Grad, GradMix, Next, Turn
from offbeat.live import state
from offbeat.live.board import Board
from offbeat.live.buckets import STEP_MODULUS, Buckets
from offbeat.live.errors import OffbeatError
from offbeat.live.flat import Flat
from offbeat.live.gradient import OwnGradient
from offbeat.live.session import Session
from offbeat.live.transport import Transport
from offbeat.live.waiting import Waiter
from offbeat.replica import Replica
from offbeat.strategy import Strategy
from offbeat.vector import Vec
from offbeat.version import __version__


class Attached(torch.optim.Optimizer):
    """A torch optimiser whose ``step`` is a strategy's step. It shares ``param_groups`` and ``state`` with the inner one.

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
        owns_default_group: bool,
    ) -> None:
        # torch's own __init__ would add the parameters anew; what it sets up is shared with the inner optimiser.
        self.inner, self.strategy = inner, strategy
        self._flat = Flat(model, inner)
        self._board = board
        self._max_norm, self._accumulate = max_norm, accumulate
        self._owns_default_group = owns_default_group
        waiter = Waiter(board, patience_s)
        board.agree(_facts(self._flat, strategy, accumulate))
        self._transport = Transport(waiter, board.rank, board.size, any(p.is_cuda for p in self._flat.parts))
        self._share_beginning()
        self.me = Replica(
            board.rank,
            board.size,
            self._flat.x,
            self._flat.buffers,
            self._update,
            lambda: float(inner.param_groups[0]["lr"]),
            seed,
            steps,
        )
        self._session = Session(strategy, self.me, self._transport)
        self._lazy_buckets: Buckets | None = None
        self._in_step = self._exchanging = self._exchanged = self._callback_waits = False
        self._backwards = self._averages = 0
        self._closed = self._warned = False
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(k)) for k, p in enumerate(self._flat.params)]
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
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise OffbeatError("parameters cannot be added after attach; give them to the optimizer before it")

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.inner.register_step_post_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimiser's state and, under "offbeat", the strategy's. Local: nothing is communicated."""
        return {**self.inner.state_dict(), "offbeat": state.saved(self.strategy, self.me, self._session.resume_from)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a run where ``state_dict`` left it; load the model's weights before ``attach``."""
        rest = dict(state_dict)
        own = rest.pop("offbeat", None)
        self.inner.load_state_dict(rest)
        if own is not None:
            self._session.restart(state.restore(own, self.strategy, self.me))
            self._reset_step()

    # What Offbeat adds.

    @property
    def wait_s(self) -> float:
        """Seconds this worker has spent waiting for the network and the others."""
        return self._transport.waiter.waited_s

    @property
    def wire_bytes(self) -> int:
        """Bytes this worker has sent."""
        return self._transport.wire_bytes

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._abandon(f"{type(error).__name__}: {error}")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the strategy with the gradients that backward left in ``p.grad``."""
        self._refuse_if_closed("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if not self._in_step:
                self._begin()
            self._session.answer(self._gradient())
        self._reset_step()
        return loss

    def average(self) -> None:
        """Make all replicas equal now (weights and buffers), for evaluation or a checkpoint. Every rank must call it."""
        self._refuse_if_closed("average()")
        self._flat.adopt()
        if self.me.size > 1:
            self._board.ask_for_average(self._averages)
            self._equalise()

    def finish(self) -> None:
        """End the run: answer the others until all are done, apply what is in flight, make all replicas equal.

        Called again, it does nothing.
        """
        if self._closed:
            return
        with torch.no_grad():
            self._flat.adopt()
            self._session.start()
            if self._in_step:  # a backward without its step(): the others may have counted on it
                self._board.reach(self.me.t)
                self._idle_turn()
            self._board.post_done(self.me.t)
            while self._session.asks is not None:
                self._idle_or_stop()
            if self.me.size > 1:
                self._equalise()
                self._transport.agree_on(torch.zeros(1), dist.ReduceOp.SUM, "the others to finish")
        self._release()
        self._transport.close()
        if self._owns_default_group:
            dist.destroy_process_group()

    # A step: begin (first gradient), backward over, step().

    def _hook(self, slot: int) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if not self._in_step:
                with torch.no_grad():
                    self._begin()
            if self._overlaps:
                self._collect(slot)
            elif not self._callback_waits:
                self._after_backward()

        return arrived

    def _begin(self) -> None:
        self._refuse_if_closed("backward()")
        self._flat.adopt()
        self._session.start()
        if isinstance(self._session.asks, Next):
            self._session.turn(Turn.WORK)
        self._in_step = True

    @property
    def _overlaps(self) -> bool:
        asks = self._session.asks
        return self.me.size > 1 and isinstance(asks, GradMix) and asks.codec is None

    @property
    def _buckets(self) -> Buckets:
        if self._lazy_buckets is None:
            self._lazy_buckets = Buckets(self._flat)
        return self._lazy_buckets

    def _collect(self, slot: int) -> None:
        self._buckets.collect(slot)
        if self._backwards >= self._accumulate - 1:
            if not self._exchanging:
                self._exchanging = True
                self._buckets.begin()
            self._buckets.arrived(slot, self._transport.all_reduce)
        if not self._callback_waits:
            self._after_backward()

    def _after_backward(self) -> None:
        self._callback_waits = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        self._callback_waits = False
        self._backwards += 1
        if self._exchanging:
            if self._exchanged:
                self._warn_accumulate()
            with torch.no_grad():
                self._exchange(active=True)

    def _exchange(self, active: bool) -> int:
        """Sum what backward left, wait for it, divide. Gradients averaged before stay so: the mean of means is equal."""
        t = self.me.t
        self._session.next_seq()
        works = self._buckets.finish(self._transport.all_reduce, t, active)
        self._transport.waiter.wait(works, t if active else -1, f"the gradients of step {t}")
        count, step = self._buckets.settle(t, active)
        self._exchanging, self._exchanged = False, True
        if not active and count and step == (t - 1) % STEP_MODULUS:
            self._buckets.begin()  # the others exchanged the step before once more (see accumulate)
            return self._exchange(active)
        return count

    def _gradient(self) -> Vec | None:
        asks = self._session.asks
        if isinstance(asks, GradMix) and asks.codec is not None:
            return self._coded_gradient(asks, active=True)
        if not self._overlaps:
            assert isinstance(asks, (Grad, GradMix))
            return OwnGradient(self._flat)
        if not self._exchanged:
            if self._backwards:
                self._warn_accumulate()
            self._buckets.begin()
            self._exchange(active=True)
        return self._buckets.g

    def _coded_gradient(self, asks: GradMix, active: bool) -> Vec | None:
        assert asks.codec is not None
        ranks = asks.W.block(self.me.rank)
        if ranks is None:
            raise ValueError(f"gradients are averaged among whole groups, not along {asks.W}")
        own = OwnGradient(self._flat) if active else None
        present = torch.tensor([active and p.grad is not None for p in self._flat.params], dtype=torch.uint8)
        key = (self.me.seed, self._session.next_seq())
        mean, counts = self._transport.coded_gradients(
            own, present, self._flat.x, asks.codec, ranks, key, self.me.t if active else -1
        )
        if mean is None:
            return None
        self._buckets.g.copy_(mean)
        self._buckets.present(counts.tolist())
        return self._buckets.g

    def _update(self, g: Vec) -> None:
        """The inner optimiser's step."""
        if not isinstance(g, OwnGradient) and not (self._lazy_buckets and g is self._lazy_buckets.g):
            self._buckets.g.copy_(g)
            self._buckets.present([1.0] * len(self._flat.params))
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._flat.params, self._max_norm)
        self.inner.step()

    def _reset_step(self) -> None:
        self._in_step = self._exchanging = self._exchanged = False
        self._backwards = 0

    def _warn_accumulate(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"accumulate={self._accumulate} was declared, but another number of backward() calls came before step(); "
                "the result is right, but the exchange was not overlapped (attach(…, accumulate=N) declares it)",
                stacklevel=4,
            )

    # Without data: answering the others.

    def _idle_or_stop(self) -> None:
        done = self._board.all_done()  # before `reached`: when all are done, what they reached is final
        reached = self._board.last_reached()
        if self.me.t <= reached:
            self._session.turn(Turn.IDLE)
            self._idle_turn()
        elif done:
            self._session.turn(Turn.STOP)
        elif self._board.average_is_asked(self._averages):
            self._equalise()
        else:
            self._transport.waiter.until(self._something_to_do, "the others to finish")

    def _something_to_do(self) -> bool:
        return (
            self._board.all_done()
            or self.me.t <= self._board.last_reached()
            or self._board.average_is_asked(self._averages)
        )

    def _idle_turn(self) -> None:
        """Run one step without a gradient of our own."""
        self._session.idle = True
        while not isinstance(asks := self._session.asks, Next) and asks is not None:
            if self._overlaps:
                self._buckets.begin()
                count = self._exchange(active=False)
                self._session.answer(self._buckets.g if count else None)
            elif isinstance(asks, GradMix) and asks.codec is not None:
                self._session.answer(self._coded_gradient(asks, active=False))
            else:
                self._session.answer(None)
        self._reset_step()

    # Beginning and ending.

    def _share_beginning(self) -> None:
        """Rank 0's parameters and buffers for all, as DDP does."""
        with torch.no_grad():
            for tensor in (*self._flat.parts, *self._flat.buffers.parts, *self._flat.frozen, *self._flat.counting):
                self._transport.broadcast(tensor.data)

    def _equalise(self) -> None:
        """Replicas that are equal already stay untouched: the mean of equal numbers may round."""
        self._averages += 1
        flat = (*self._flat.parts, *self._flat.buffers.parts)
        digest = hashlib.sha256()
        for tensor in flat:
            digest.update(tensor.detach().cpu().view(torch.uint8).numpy().data)
        number = int.from_bytes(digest.digest()[:7], "big")
        both = self._transport.agree_on(torch.tensor([number, -number]), dist.ReduceOp.MAX, "the others' weights")
        with torch.no_grad():
            if int(both[0]) != -int(both[1]):
                for tensor in flat:
                    total = self._transport.agree_on(_wide(tensor), dist.ReduceOp.SUM, "the others' weights")
                    tensor.copy_(total.div_(self.me.size))
            for counter in self._flat.counting:
                counter.copy_(self._transport.agree_on(counter.long(), dist.ReduceOp.MAX, "the others' buffers"))

    def _release(self) -> None:
        self._closed = True
        atexit.unregister(self._at_exit)
        for hook in self._hooks:
            hook.remove()

    def _abandon(self, message: str) -> None:
        """Leave without waiting for anybody, and tell the others why."""
        if self._closed:
            return
        self._release()
        self._transport.park()
        if self.me.size > 1:
            try:
                self._board.fail(message)
            except RuntimeError:
                pass  # the store is gone, and with it everyone who could read the message

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self._abandon(f"{type(error).__name__}: {error}" if error else "the process ended without finish()")

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise OffbeatError(f"{what} came after the run was ended; attach the optimizer again to go on")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _facts(flat: Flat, strategy: Strategy, accumulate: int) -> dict[str, str]:
    return {
        "Offbeat version": __version__,
        "torch version": torch.__version__,
        "strategy": str(strategy),
        "accumulate": str(accumulate),
        "parameters": flat.facts(),
    }


def check_optimizer(inner: object, model: object, strategy: object) -> None:
    """Sentences for what cannot be attached."""
    if not isinstance(inner, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        raise TypeError(
            f"attach takes (optimizer, model, strategy), but got ({type(inner).__name__}, {type(model).__name__}, …)"
        )
    if isinstance(inner, Attached):
        raise ValueError(f"this optimizer is attached already, with {inner.strategy}; attach the inner one only once")
    if not isinstance(strategy, Strategy):
        raise TypeError(f"{strategy!r} is not a strategy; use one such as ob.local_sgd(period=8)")
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(inner).__name__} needs a closure: it evaluates the loss inside its step, where no exchange can happen; "
            "use an optimizer whose step() needs none, such as SGD or AdamW"
        )
