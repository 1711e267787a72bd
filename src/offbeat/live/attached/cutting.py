"""Micro-batches in the user's own loop: cut, handed out until the bell rings, carried over.

    for batch in optimizer.batches(loader):
        for x, y in optimizer.micro_batches(batch):
            loss_fn(model(x), y).backward()
        optimizer.step()

Each micro-batch's gradient (the mean over its samples, as losses are) is taken out of ``p.grad`` and added up, weighted
by its samples. When the round is over, ``p.grad`` holds the mean over this worker's finished samples, so that what is
done with gradients before a step (``GradScaler.unscale_``, a look at their norm) is done with them; ``step`` then takes
the mean over all workers' samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from offbeat.basics.warn import warn
from offbeat.live.attached.columns import columns, row, rows_of
from offbeat.live.attached.flat import Flat
from offbeat.live.attached.gradient import OwnGradient
from offbeat.live.partial.endpoints import Endpoints
from offbeat.method.effects import Batch, Done
from offbeat.rounds.micro import Supply
from offbeat.runs.order import Part, Piece
from offbeat.tensors.vector import Vec, wide


class Leftovers:
    """A batch of nothing new: what was not reached before is enough for a round."""

    def __repr__(self) -> str:
        return "the samples that were not reached before"


LEFTOVERS = Leftovers()
MANY = 16  # batches' worth of leftovers that deserve a word


class Stream:
    """A worker's micro-batches in order, and what it has done of them in this round."""

    def __init__(
        self,
        flat: Flat,
        endpoints: Endpoints,
        note: Callable[[Part], None],
    ) -> None:
        self._flat, self._endpoints, self._note = flat, endpoints, note
        self._batches: list[Any] = []
        self._supply = Supply()
        self._sums: Vec | None = None
        self._views: list[Tensor] = []
        self._began_s: float | None = None
        self._warned = False
        self._batch = 0  # the number of the one that the user has a piece of in hand
        self._anew()

    def _anew(self) -> None:
        self.samples = self.pieces = self._at_most = 0
        self.used = self._over = False
        self._out: int | None = None  # the last row of the micro-batch that the user has in hand
        self._used = set[int]()  # the parameters that a micro-batch had a gradient for
        self._whole_s: float | None = None
        self._learnt: list[Piece] = []  # the micro-batches that had a gradient

    @property
    def waiting(self) -> int:
        """Samples that were not reached yet."""
        return self._supply.left

    def enough(self, micro: int) -> bool:
        """Whether the leftovers alone make a round."""
        return self._supply.enough(micro)

    def mark(self) -> None:
        """The round begins now: what is waited for from here on, such as data, counts towards a deadline."""
        self._began_s = time.monotonic()

    def add(self, batch: Any, cost: Callable[[Any], float] | None) -> None:
        """Put a batch behind what is waiting."""
        rows = 0 if isinstance(batch, Leftovers) else rows_of(batch)
        if rows:
            costs = None if cost is None else [float(cost(row(batch, k, rows))) for k in range(rows)]
            self._supply.add(rows, costs)
            self._batches.append(batch)
        if self._supply.batches > MANY and not self._warned:
            self._warned = True
            warn(
                f"{self.waiting} samples wait on this worker, which is slower than the others; loop over "
                "optimizer.batches(loader), which fetches data only when it is needed"
            )

    def open(self, asks: Batch) -> MicroBatches:
        """This worker's part of a round; opened again before the step, it goes on."""
        self._settle(came_back=False)
        if not self.used:
            self.used, self._at_most = True, self._supply.quota(asks.micro)
            self._began_s = self._began_s if self._began_s is not None else time.monotonic()
        elif not self._over:
            self._at_most = max(self._at_most, self._supply.quota(asks.micro))
        at_most = 0 if self._over else min(self._at_most - self.pieces, self._supply.pieces(asks.micro))
        return MicroBatches(self._hand_out(asks), at_most)

    def _hand_out(self, asks: Batch) -> Iterator[Any]:
        while not self._over:
            through = self._supply.is_through(self.pieces, self._at_most)
            if through and self.pieces and asks.stop.workers is not None:
                self._endpoints.ring(asks.r, asks.stop.workers)
            rung = asks.stop.workers is not None and self._endpoints.rung >= asks.r
            if through or asks.stop.is_over(self.pieces, self._at_most, rung, self._elapsed_s):
                self._close()
                return
            self._batch, lo, hi = self._supply.first(asks.micro)
            for p in self._flat.params:
                p.grad = None
            self._out = hi
            yield columns(self._batches[0], lo, hi, self._supply.front.rows)
            self._settle(came_back=True)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s if self._began_s is not None else 0.0

    def _settle(self, came_back: bool) -> None:
        """Take in the gradient of the micro-batch that is out. Without one (an error, a break) it stays first in line,
        unless the user went on to the next: then it was skipped on purpose."""
        if self._out is None:
            return
        hi, self._out = self._out, None
        samples = hi - self._supply.front.lo
        learnt = self._add(samples)
        if learnt:
            self.samples += samples
            self._learnt.append((self._batch, hi - samples, hi))
        if learnt or came_back:
            self.pieces += 1
            if self._supply.take(hi):
                del self._batches[0]

    @torch.no_grad()
    def _add(self, samples: int) -> bool:
        """Add up the gradients that backward left, and take them away; False if there are none."""
        found = [(k, p.grad) for k, p in enumerate(self._flat.params) if p.grad is not None]
        if not found:
            return False
        if self._sums is None:
            self._sums = Vec([torch.zeros_like(part, dtype=wide(part.dtype)) for part in self._flat.parts])
            self._views = self._flat.layout.views(self._sums.parts)
        elif not self.samples:
            self._sums.zero_()
        views, grads = [self._views[k] for k, _ in found], [grad for _, grad in found]
        if any(grad.is_sparse or grad.dtype != view.dtype for view, grad in zip(views, grads, strict=True)):
            for view, grad in zip(views, grads, strict=True):
                view.add_(grad, alpha=samples)
        else:
            torch._foreach_add_(views, grads, alpha=samples)
        self._used.update(k for k, _ in found)
        for p in self._flat.params:
            p.grad = None
        return True

    @torch.no_grad()
    def _close(self) -> None:
        """The round is over for this worker: ``p.grad`` is the mean over its samples, where one had a gradient."""
        self._over = True
        if self.pieces:
            self._whole_s = self._elapsed_s * max(self._at_most, self.pieces) / self.pieces
        parts = self._flat.layout.empty()
        if self.samples and self._sums is not None:
            for part, total in zip(parts, self._sums.parts, strict=True):
                part.copy_(total / self.samples)
        for k, (view, p) in enumerate(zip(self._flat.layout.views(parts), self._flat.params, strict=True)):
            p.grad = view if k in self._used or not self.samples else None

    def forget(self) -> None:
        """``zero_grad``: after a round it throws the round's gradients away, as ``GradScaler`` does with a bad step."""
        if self._over:
            self._anew()

    def release(self) -> None:
        """The run is over: let go of its memory, and of samples that nobody reached."""
        self._batches, self._sums, self._views = [], None, []

    def end(self) -> None:
        """The round is over for this worker."""
        self._settle(came_back=False)
        if not self._over:
            self._close()

    def done(self) -> Done:
        """What was finished in this round; the next one begins anew."""
        self.end()
        samples = self.samples if any(p.grad is not None for p in self._flat.params) else 0
        own = OwnGradient(self._flat)
        total = Vec(own.parts, used=own.used).mul_(float(samples))
        done = Done(total, samples, self.pieces, max(self._at_most, self.pieces), self._whole_s)
        learnt = tuple(self._learnt) if samples else ()
        self._note(Part(learnt, done.pieces, done.of, done.whole_s, samples))
        self._anew()
        self._began_s = None
        return done


class MicroBatches:
    """What ``optimizer.micro_batches(batch)`` returns: an iterator that knows how long it can be at most."""

    def __init__(self, pieces: Iterator[Any], at_most: int) -> None:
        self._pieces, self._at_most = pieces, at_most

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._pieces)

    def __len__(self) -> int:
        return self._at_most


def batches(stream: Stream, micro: Callable[[], int], loader: Iterable[Any]) -> Iterator[Any]:
    """A loader's batches, but leftovers first: new data is fetched only when what waits does not make a round."""
    new = iter(loader)
    while True:
        stream.mark()
        if stream.enough(micro()):
            yield LEFTOVERS
            continue
        try:
            batch = next(new)
        except StopIteration:
            break
        yield batch
    while stream.waiting:
        yield LEFTOVERS
        stream.mark()
