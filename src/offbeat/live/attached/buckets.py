"""The synchronous gradient exchange, overlapped with backward.

Gradients lie in flat memory, cut into buckets in the order in which backward produces them (the last layers first).
A bucket is summed as soon as all its gradients are there and all buckets before it have been started: the same order
on every rank. In front of the memory that travels last lies a short *tail*: how many workers contribute, which step
they are in, and which parameters each of them has a gradient for. So no extra message is needed to divide by those who
have data, to notice workers in different steps, and to leave alone what nobody used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offbeat.live.attached.flat import Flat
from offbeat.live.attached.gradient import FlatGradient
from offbeat.live.carriers.exchanges import Landing
from offbeat.live.memory.adding import Pairs, Pieces, copy
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.worker.waiter import Work
from offbeat.tensors.vector import wide

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
STEP_MODULUS = 128  # small enough to be exact in bfloat16

# Of the sum of what everybody has in pieces, or there already; and what it will be divided by, a power of two.
Start = Callable[[Tensor, Pieces | None], tuple[Work | None, int]]


def _absent(work: Work | None) -> int:
    return work.absent if isinstance(work, Landing) else 0


@dataclass
class _Bucket:
    part: int
    lo: int
    hi: int
    slots: frozenset[int]


class Buckets:
    """Flat gradients of one model and the exchange of them, one backward at a time."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._tail_length = 2 + len(flat.layout.slots)
        self.g = FlatGradient(flat, room=self._tail_length)
        self._storage = self.g.whole
        self._buckets = self._cut()
        self._home = {slot: b for b, bucket in enumerate(self._buckets) for slot in bucket.slots}
        self._ready: set[int] = set()
        self._missing: list[int] = []
        self._started = 0
        self._under_way: list[tuple[Work | None, int, _Bucket, Tensor]] = []

    def _cut(self) -> list[_Bucket]:
        """Contiguous stretches from the end of the model to its beginning; part 0, with the tail, last."""
        slots, out = self._flat.layout.slots, list[_Bucket]()
        for part in reversed(range(len(self._storage))):
            limit = FIRST_BUCKET_BYTES if not out else BUCKET_BYTES
            mine = [k for k, s in enumerate(slots) if s.part == part]
            size, hi, held = self._storage[part].element_size(), self._flat.layout.lengths[part], set[int]()
            for k in reversed(mine):
                held.add(k)
                if (hi - slots[k].offset) * size >= limit:
                    out.append(_Bucket(part, slots[k].offset, hi, frozenset(held)))
                    hi, held, limit = slots[k].offset, set(), BUCKET_BYTES
            if held or part == 0:
                out.append(_Bucket(part, 0, hi, frozenset(held)))
        return out

    # One backward.

    def begin(self) -> None:
        """Gradients will arrive from now on, and be exchanged as they do."""
        self._ready.clear()
        self._missing = [len(bucket.slots) for bucket in self._buckets]
        self._started = 0
        self._under_way = []

    def arrived(self, slot: int, start: Start) -> None:
        """Mark ``slot`` and start every bucket that is complete and whose turn it is."""
        if slot in self._ready:
            return
        self._ready.add(slot)
        self._missing[self._home[slot]] -= 1
        # The last bucket carries the tail, which is known only when backward is over.
        while self._started < len(self._buckets) - 1 and self._missing[self._started] == 0:
            self._launch(start)

    def finish(self, start: Start, t: int, active: bool, last: Callable[[], None] = lambda: None) -> list[Work]:
        """Backward is over: start what is left. Gradients that did not come count as zeros. ``last`` is called before
        the last bucket.
        """
        for slot, view in enumerate(self.g.views):
            if slot in self._ready:
                continue
            if active and self._flat.params[slot].grad is not None:  # from an earlier backward of this step
                self._ready.add(slot)
            else:
                view.zero_()
        tail = torch.zeros(self._tail_length)
        if active:
            tail[0], tail[1] = 1.0, float(t % STEP_MODULUS)
            tail[2:][list(self._ready)] = 1.0
        self._storage[0][: self._tail_length].copy_(tail)
        while self._started < len(self._buckets):
            if self._started == len(self._buckets) - 1:
                last()
            self._launch(start)
        return [work for work, *_ in self._under_way if work is not None]

    def _launch(self, start: Start) -> None:
        bucket = self._buckets[self._started]
        last = self._started == len(self._buckets) - 1
        self._started += 1
        storage, shift = self._storage[bucket.part], self._tail_length if bucket.part == 0 else 0
        stretch = storage[0 if last else bucket.lo + shift : bucket.hi + shift]
        pieces = partial(self._pieces, bucket, last)
        if stretch.dtype == wide(stretch.dtype):
            begun, travels = start(stretch, pieces), stretch
        else:
            copy(pieces(stretch))
            travels = stretch.to(wide(stretch.dtype))
            begun = start(travels, None)
        self._under_way.append((*begun, bucket, travels))
        for slot in bucket.slots & self._ready:  # from here on nobody needs it where backward has made it
            self._flat.params[slot].grad = self.g.views[slot]

    def _pieces(self, bucket: _Bucket, last: bool, room: Tensor) -> Pairs:
        """Where in ``room``, memory for this bucket, its gradients and its tail are to lie, and where they do."""
        shift = self._tail_length if last else -bucket.lo
        pairs = [(room[:shift], self._storage[0][:shift])] if last else []
        for slot in bucket.slots:
            into = self._flat.layout.slots[slot]
            place = room.as_strided(into.shape, into.stride, room.storage_offset() + into.offset + shift)
            pairs.append((place, self.g.dense(slot) if slot in self._ready else self.g.views[slot]))
        return [(into, what) for into, what in pairs if into.data_ptr() != what.data_ptr()]

    def settle(self, t: int, active: bool) -> tuple[int, int]:
        """All sums are there: divide by those who contributed. Answers (how many, their step)."""
        last_sum, divisor, _, last = self._under_way[-1]
        head = (last[: self._tail_length] * divisor).tolist()
        count, steps = round(head[0]), head[1]
        if count == 0:
            self._under_way = []
            return 0, t
        step = steps / count
        if active and step != t % STEP_MODULUS:
            raise OffbeatError(
                f"the workers are in different steps: this one is in step {t}, the others are not; "
                "every rank must call backward() equally often between two step()s"
            )
        died = _absent(last_sum)
        for work, divisor, bucket, travelled in self._under_way:
            of = count + died - _absent(work)  # one that has died in the middle of a step is in its first buckets
            shift = self._tail_length if bucket.part == 0 else 0
            home = self._storage[bucket.part][bucket.lo + shift : bucket.hi + shift]
            there = travelled[travelled.numel() - home.numel() :]
            if of != divisor:
                torch.div(there.mul_(divisor) if divisor != 1 else there, of, out=home)
            elif there.data_ptr() != home.data_ptr():
                home.copy_(there)
        self._under_way = []
        self.g.present(head[2:])
        return count, round(step)
