"""The adders: a thread of the host process that makes sums, with as many of torch's own threads as memory is worth.

One thread of Python's asks for them, one after the other: several would spend their time on waiting for the interpreter
(8 of them added 53 GB/s on 16 cores, torch's own threads 94).

Sums are made in the order in which they were asked for: what a sum stands on has been asked for before it. Short ones
are made at once, by whoever asks: to wake a thread would take longer. Other work on vectors that lie here, such as
coding, stands in the same row. On GPUs a stream of the host process makes them, where the sum is to lie, one after the
other; they are there when it has come so far, which is looked up.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from offbeat.live.host.ledger import Decoded, Expression, Sum
from offbeat.live.memory.adding import add_up
from offbeat.live.memory.arena import DeviceSlots, SlotMemory

SHORT, SHORT_READ = 1 << 15, 1 << 18  # numbers of a sum that is made at once, and that are read for it
MOST = 16  # threads; more of them do not get more out of memory
NICE = 5
LEAVE_S = 5.0


def threads() -> int:
    """How many add. More would be quicker, and would hold up workers that compute.

    On 16 cores a step of a small GPT took 1.6 of its own time beside 12 of them, and 1.1 beside 8.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, cores if cores < 4 else cores // 2))


class Making:
    """A sum in the making."""

    def __init__(self, total: Sum, memory: SlotMemory) -> None:
        self.total, self.memory = total, memory
        self.mark: Any = None  # of a stream

    @property
    def is_short(self) -> bool:
        """And stands on nothing that is still to be made."""
        refs = sum(len(term.refs) for term in self.total.terms)
        inner = (one for term in self.total.terms for one in term.totals)
        return is_short(self.memory, refs) and all(one.is_made for one in inner)

    def add(self) -> None:
        total, memory = self.total, self.memory
        assert total.slot is not None
        if isinstance(total, Decoded):
            total.put(total.slot)
            return
        terms = [[(memory.vec(slot, total.slot), f) for slot, f in term.slots] for term in total.terms]
        for p, part in enumerate(memory.vec(total.slot).parts):
            add_up(part, [[(vec.parts[p], f) for vec, f in term] for term in terms], total.divisor)
        memory.note_all(total.slot, [slot for term in total.terms for slot, _ in term.slots])

    def made(self) -> None:
        """It is there."""
        self.total.made()

    @property
    def root(self) -> Expression:
        """What is being read and written."""
        return Expression([(self.total, 1.0)])


class Errand:
    """Something else to be done with vectors that lie here. ``reads``: one of them, which is made by then."""

    def __init__(
        self, do: Callable[[], None], then: Callable[[], None], reads: Expression | None, memory: SlotMemory
    ) -> None:
        self.add, self.made, self.memory = do, then, memory
        self.root = Expression() if reads is None else reads

    @property
    def is_short(self) -> bool:
        return is_short(self.memory, 1) and all(one.is_made for one in self.root.totals)


def is_short(memory: SlotMemory, refs: int) -> bool:
    """Whether so many vectors are read quickly."""
    numbers = sum(n for _, n in memory.kinds)
    return numbers <= SHORT and numbers * refs <= SHORT_READ


class Adders:
    """``wake`` is called by the thread when a sum is there: then the loop asks ``made``."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._queue: SimpleQueue[Making | Errand | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._there: SimpleQueue[Making | Errand | BaseException] = SimpleQueue()
        self._at_work: deque[Making | Errand] = deque()  # in the order in which they will be there
        self._streams: dict[torch.device, Any] = {}
        self._on_gpu: deque[Making] = deque()

    def make(self, total: Sum, memory: SlotMemory) -> None:
        """Make a sum that has a slot. All that it stands on has been asked for before."""
        making = Making(total, memory)
        if isinstance(memory, DeviceSlots):
            assert total.slot is not None
            stream = self._stream(memory.device_of(total.slot))
            if self._on_gpu:  # another GPU may be making what this stands on
                stream.wait_event(self._on_gpu[-1].mark)
            with torch.cuda.stream(stream):
                making.add()
                making.mark = torch.cuda.Event()
                making.mark.record()
            self._on_gpu.append(making)
        elif making.is_short:
            making.add()
            making.made()
        else:
            self._put(making)

    def do(self, work: Errand) -> None:
        """Do it, behind everything that was asked for."""
        if work.is_short:
            work.add()
            work.made()
        else:
            self._put(work)

    def _put(self, one: Making | Errand) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="offbeat-adder", daemon=True)
            self._thread.start()
        self._at_work.append(one)
        self._queue.put(one)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        if hasattr(os, "setpriority"):  # what workers compute goes before; those who wait for a sum leave their cores
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (making := self._queue.get()) is not None:
            try:
                making.add()
                self._there.put(making)
            except BaseException as error:
                self._there.put(error)
            self._wake()
            del making

    def made(self) -> None:
        """Called by the loop: some sums are there."""
        while not self._there.empty():
            self._one_is_made()
        while self._on_gpu and self._on_gpu[0].mark.query():
            self._on_gpu.popleft().made()

    def _one_is_made(self) -> None:
        found = self._there.get()
        if isinstance(found, BaseException):
            raise found
        self._at_work.remove(found)
        found.made()

    def through_with(self, memory: SlotMemory) -> None:
        """Wait until nothing is written there any more: the memory goes back, and may be another channel's at once.

        Sums are left over where workers have gone without waiting for them.
        """
        while any(one.memory is memory for one in self._at_work):
            self._one_is_made()

    @property
    def looks(self) -> bool:
        """Whether a GPU has to be looked at."""
        return bool(self._on_gpu)

    @property
    def under_way(self) -> int:
        """Sums that are still to be made."""
        return len(self._at_work) + len(self._on_gpu)

    def roots(self) -> list[Expression]:
        """What is being read and written here."""
        return [one.root for one in (*self._at_work, *self._on_gpu)]

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(LEAVE_S)
