"""The gradients of a step in the user's own loop: gathered as backward makes them, exchanged, and handed on.

Where the strategy asks for the mean of all gradients (``GradMix``), the exchange overlaps with the last backward before
the step: see ``Buckets``. With a codec, which needs whole gradients, it waits for ``step()``. Other strategies get this
worker's own gradient, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from offbeat.basics.warn import warn
from offbeat.live.attached.buckets import STEP_MODULUS, Buckets, Start
from offbeat.live.attached.driver import Driver
from offbeat.live.attached.flat import Flat
from offbeat.live.attached.gradient import FlatGradient, InPlace, OwnGradient, land, views_for
from offbeat.live.carriers.exchanges import Transport
from offbeat.live.transport import notice
from offbeat.live.work import share
from offbeat.method.effects import Batch, Done, Grad, GradMix
from offbeat.tensors.vector import Vec


class Gradients:
    """Answers what one strategy asks about gradients, one step after the other.

    It listens to backward, ``accumulate`` of them a step. ``begin`` is called before a gradient is looked at: it begins
    the step, unless that was done, and with it the strategy says what it asks for.
    """

    def __init__(
        self, flat: Flat, driver: Driver, transport: Transport, accumulate: int, begin: Callable[[], None]
    ) -> None:
        self._flat, self._driver, self._transport = flat, driver, transport
        self.me = driver.me
        self._accumulate, self._begin = accumulate, begin
        self._lazy_buckets: Buckets | None = None
        self._lazy_memory: FlatGradient | None = None
        self._exchanging = self._exchanged = self._callback_waits = self._warned = False
        self._counts: int | None = None  # whose gradient counts the backward passes of this step: the first to come
        self._only_begins: int | None = None  # whose gradient began the step, where none goes to anybody before step()
        self._backwards = self._exchanges = 0
        # The gradients of a sharded model appear in FSDP's own memory: there a step begins with step().
        self._heard = range(len(flat.params)) if flat.island is None else range(0)
        self._hooks: dict[int, RemovableHandle] = {}
        self._listen(self._heard)

    # What the optimiser calls.

    def gradient(self) -> Vec | None:
        """What the strategy asks for, at the user's ``step()``."""
        asks = self._driver.asks
        if isinstance(asks, GradMix) and asks.codec is not None:
            return self._coded_gradient(asks, active=True)
        if not self.overlaps:
            assert isinstance(asks, (Grad, GradMix))
            return OwnGradient(self._flat)
        if not self._exchanged:
            if self._backwards:
                self._warn_accumulate()
            self._buckets.begin()
            self._exchange(active=True)
        return self._buckets.g

    def whole_batch(self, asks: Batch) -> Done:
        """A step of ``nonblocking`` whose batch was not cut: all of it is one micro-batch."""
        if not self._warned:
            self._warned = True
            warn(
                "nonblocking got a whole batch as one micro-batch, so nobody can stop early; "
                "write: for micro in optimizer.micro_batches(batch): loss_fn(model(micro)).backward()"
            )
        return Done(OwnGradient(self._flat), 1, asks.micro, asks.micro)

    def without_own(self) -> Vec | None:
        """The same in a step that this worker has no data for: the mean of the others, or None."""
        asks = self._driver.asks
        if self.overlaps:
            self._buckets.begin()
            return self._buckets.g if self._exchange(active=False) else None
        if isinstance(asks, GradMix) and asks.codec is not None:
            return self._coded_gradient(asks, active=False)
        return None

    def shown(self, g: Vec, step: Callable[[], object]) -> None:
        """While ``step`` is called ``p.grad`` is ``g``, for an inner optimiser that only reads it; then what it was.

        Nothing is copied where ``g`` lies as the model does. It may lie where others read it, too: hence "only".
        """
        views = None if isinstance(g, InPlace) else views_for(self._flat, g)
        if views is None:
            self.put(g)
            step()
            return
        own = [p.grad for p in self._flat.params]
        try:
            for p, view in zip(self._flat.params, views, strict=True):
                p.grad = view
            step()
        finally:
            for p, grad in zip(self._flat.params, own, strict=True):
                p.grad = grad

    def put(self, g: Vec) -> None:
        """``p.grad`` is ``g`` now, if it was not before: the inner optimiser reads it there."""
        if not isinstance(g, InPlace) and (self._lazy_memory is not None or not land(self._flat, g)):
            self._memory.land(g)

    @property
    def was_made(self) -> bool:
        """Whether the gradients of this step have been exchanged with the others, once or more."""
        return self._exchanges > 0

    def reset(self) -> None:
        """The step is over."""
        if self._hooks:
            self._listen(self._heard if self._only_begins is None else (self._only_begins,))
        self._exchanging, self._exchanged, self._only_begins, self._counts = False, False, None, None
        self._backwards = self._exchanges = 0

    def forget_backwards(self) -> None:
        """The gradients of this step are thrown away and will be made anew; the step itself stays begun."""
        if not self._exchanging:
            self._exchanged, self._backwards = False, 0

    def release(self) -> None:
        """Listen to backward no longer."""
        self._listen(())

    def forget(self) -> None:
        """The run is over: let go of its memory. (The optimiser holds this, and this must not hold the optimiser.)"""
        self._lazy_buckets = self._lazy_memory = None
        self._begin = lambda: None

    # During backward.

    def _listen(self, slots: Collection[int]) -> None:
        """To the gradients of these parameters, between two steps.

        Where gradients go to nobody before ``step()``, one is enough to know that a step begins, and backward is spared
        a call for each of the others. (If that one does not come the next time, the step begins with ``step()``.)
        """
        if len(slots) != len(self._hooks):
            for hook in self._hooks.values():
                hook.remove()
            params = self._flat.params
            self._hooks = {k: params[k].register_post_accumulate_grad_hook(self._hook(k)) for k in slots}

    def _hook(self, slot: int) -> Callable[[Tensor], None]:
        @notice.heeding
        def arrived(_: Tensor) -> None:
            self._counts = slot if self._counts is None else self._counts
            if self._counts == slot:
                share.backward()
            if self._only_begins is not None:
                return
            self._begin()
            if self.overlaps:
                self._collect(slot)
            else:
                self._only_begins = slot

        return arrived

    def _collect(self, slot: int) -> None:
        if self._exchanged and not self._callback_waits and not self._buckets.g.holds(slot):
            self.forget_backwards()  # model.zero_grad(): the backward before was given up, as GradScaler does
        if self._backwards >= self._accumulate - 1:
            if not self._exchanging:
                self._exchanging = True
                self._buckets.begin()
            self._buckets.arrived(slot, self._start)
        else:
            self._buckets.g.collect(slot)
        if not self._callback_waits:
            self._after_backward()

    def _after_backward(self) -> None:
        self._callback_waits = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    @notice.heeding
    def _backward_over(self) -> None:
        self._callback_waits = False
        self._backwards += 1
        if self._exchanging:
            if self._exchanged:
                self._warn_accumulate()
            with torch.no_grad():
                self._exchange(active=True)

    # With the others.

    @property
    def overlaps(self) -> bool:
        """Whether what the strategy asks for is made while backward runs."""
        asks = self._driver.asks
        return self.me.size > 1 and isinstance(asks, GradMix) and asks.codec is None

    @property
    def _buckets(self) -> Buckets:
        if self._lazy_buckets is None:
            self._lazy_buckets = Buckets(self._flat)
        return self._lazy_buckets

    @property
    def _memory(self) -> FlatGradient:
        """Where a gradient lands that was made elsewhere. Where there are buckets, it is theirs."""
        if self._lazy_memory is None:
            self._lazy_memory = self._lazy_buckets.g if self._lazy_buckets is not None else FlatGradient(self._flat)
        return self._lazy_memory

    @property
    def _start(self) -> Start:
        """Starts the sum of a bucket among those whom the strategy asks for."""
        asks = self._driver.asks
        assert isinstance(asks, GradMix)
        return partial(self._transport.part_of_mean, ranks=self._block(asks))

    def _block(self, asks: GradMix) -> tuple[int, ...]:
        ranks = asks.W.block(self.me.rank)
        if ranks is None:
            raise ValueError(f"gradients are averaged among whole groups, not along {asks.W}")
        return ranks

    def _exchange(self, active: bool) -> int:
        """Sum what backward left, and divide. What was averaged before stays so: the mean of equal numbers."""
        t = self.me.t
        works = self._buckets.finish(self._start, t, active, lambda: self._hands_over(active))
        self._transport.waiter.wait(works, f"the gradients of step {t}")
        count, step = self._buckets.settle(t, active)
        self._driver.next_seq()
        self._exchanging, self._exchanged = False, True
        self._exchanges += 1
        if not active and count and step == (t - 1) % STEP_MODULUS:
            self._buckets.begin()  # the others exchanged the step before once more (see accumulate)
            return self._exchange(active)
        return count

    def _coded_gradient(self, asks: GradMix, active: bool) -> Vec | None:
        assert asks.codec is not None
        own = OwnGradient(self._flat) if active else None
        present = torch.tensor([active and p.grad is not None for p in self._flat.params], dtype=torch.uint8)
        key = (self.me.seed, self._driver.seq)
        self._hands_over(active)
        mean, counts = self._transport.coded.gradients(
            own, present, self._flat.x, asks.codec, self._block(asks), key, asks.gathers
        )
        self._driver.next_seq()
        if mean is None:
            return None
        self._memory.copy_(mean)
        self._memory.present(counts.tolist())
        return self._memory

    def _hands_over(self, active: bool) -> None:
        if active:
            self._transport.handing_over(with_gradient=True)

    def _warn_accumulate(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"accumulate={self._accumulate} was declared, but another number of backward() calls came before step: "
                "the result is right, but the exchange was not overlapped (attach(…, accumulate=N) declares it)"
            )
