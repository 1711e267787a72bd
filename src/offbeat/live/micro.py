"""Micro-batches in the user's own loop: cut, handed out until the bell rings, carried over.

    for batch in optimizer.batches(loader):
        for x, y in optimizer.micro_batches(batch):
            loss_fn(model(x), y).backward()
        optimizer.step()

Each micro-batch's gradient (the mean over its samples, as losses are) is taken out of ``p.grad`` and added up, weighted
by its samples, so that the step equals the large-batch step on the samples really used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from offbeat.effects import Batch, Done
from offbeat.live.errors import OffbeatError
from offbeat.live.flat import Flat
from offbeat.stopping import cuts, cuts_by_cost
from offbeat.vector import Vec


class Leftovers:
    """A batch of nothing new: what was not reached before is enough for a round."""

    def __repr__(self) -> str:
        return "the samples that were not reached before"


LEFTOVERS = Leftovers()


class Stream:
    """A worker's micro-batches in order, and what it has done of them in this round."""

    def __init__(self, flat: Flat, ring: Callable[[int, int], None], rung: Callable[[], int]) -> None:
        self._flat, self._ring, self._rung = flat, ring, rung
        self._queue: list[tuple[Any, int]] = []
        self.total: Vec | None = None
        self.samples = self.pieces = 0
        self.whole_s: float | None = None
        self.used = False

    @property
    def waiting(self) -> int:
        """Samples that were not reached yet."""
        return sum(rows for _, rows in self._queue)

    @property
    def pieces_waiting(self) -> int:
        return len(self._queue)

    def enough(self, micro: int) -> bool:
        """Whether the leftovers alone make a round."""
        return len(self._queue) >= micro

    def add(self, batch: Any, micro: int, cost: Callable[[Any], float] | None) -> None:
        """Cut a batch and put it behind what is waiting."""
        if isinstance(batch, Leftovers):
            return
        rows = _rows(batch)
        if rows == 0:
            return
        bounds = cuts(rows, micro)
        if cost is not None:
            bounds = cuts_by_cost([float(cost(_slice(batch, k, k + 1))) for k in range(rows)], micro)
        self._queue += [(_slice(batch, lo, hi), hi - lo) for lo, hi in bounds]

    def hand_out(self, asks: Batch) -> Iterator[Any]:
        """The micro-batches of one round."""
        start = time.monotonic()
        self.total, self.samples, self.pieces, self.whole_s, self.used = None, 0, 0, None, True
        while self._queue:
            piece, rows = self._queue.pop(0)
            for p in self._flat.params:
                p.grad = None
            yield piece
            self._collect(rows)
            through = self.pieces >= asks.micro or not self._queue
            if through:
                self.whole_s = time.monotonic() - start
                if asks.stop.workers is not None:
                    self._ring(asks.r, asks.stop.workers)
            rung = asks.stop.workers is not None and self._rung() >= asks.r
            if through or asks.stop.is_over(self.pieces, asks.micro, rung, time.monotonic() - start):
                return

    def _collect(self, rows: int) -> None:
        with torch.no_grad():
            if self.total is None:
                self.total = Vec(self._flat.layout.empty())
            for view, p in zip(self._flat.layout.views(self.total.parts), self._flat.params, strict=True):
                if p.grad is not None:
                    view.add_(p.grad, alpha=rows)
                    p.grad = None
        self.samples += rows
        self.pieces += 1

    def done(self) -> Done:
        """What was finished in this round; the next one begins anew."""
        total = self.total if self.total is not None else Vec(self._flat.layout.empty())
        done = Done(total, self.samples, self.pieces, self.whole_s)
        self.total, self.samples, self.pieces, self.whole_s, self.used = None, 0, 0, None, False
        return done


class MicroBatches:
    """What ``optimizer.micro_batches(batch)`` returns: an iterator that knows how long it can be at most."""

    def __init__(self, pieces: Iterator[Any], most: int) -> None:
        self._pieces, self._most = pieces, most

    def __iter__(self) -> Iterator[Any]:
        return self._pieces

    def __len__(self) -> int:
        return self._most


def batches(stream: Stream, micro: Callable[[], int], loader: Iterable[Any]) -> Iterator[Any]:
    """A loader's batches, but leftovers first: new data is fetched only when what waits does not make a round."""
    for batch in loader:
        while stream.enough(micro()):
            yield LEFTOVERS
        yield batch
    while stream.waiting:
        yield LEFTOVERS


def _rows(batch: Any) -> int:
    sizes = {int(t.shape[0]) if t.dim() else -1 for t in _tensors(batch)}
    if not sizes:
        raise OffbeatError(f"a batch of type {type(batch).__name__} holds no tensors; use tensors, tuples, lists or dicts")
    if len(sizes) > 1 or -1 in sizes:
        raise OffbeatError(
            f"the tensors of a batch have first dimensions {sorted(sizes)}; they must be equal, one row a sample"
        )
    return sizes.pop()


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _tensors(value)


def _slice(batch: Any, lo: int, hi: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[lo:hi]
    if isinstance(batch, dict):
        return {name: _slice(value, lo, hi) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_slice(value, lo, hi) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
