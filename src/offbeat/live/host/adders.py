"""The adders: threads of the host process that make sums, each a stretch of whole cache lines.

Sums that stand on others wait for them; sums that do not are made side by side. Short ones are made at once, by whoever
asks: to wake a thread would take longer. Each number comes from the same operations in the same order, wherever a
stretch ends, so who makes it changes no bit.

On a GPU a stream of the host process makes them, and they are there when it has come so far, which is looked up.

What threads share is the queue, and for each sum how many of its stretches are left, under ``_lock``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from offbeat.live.host.ledger import Expression, Total
from offbeat.live.memory.adding import CHUNK, add_up
from offbeat.live.memory.arena import DeviceSlots, SlotMemory

SHORT = 1 << 16  # numbers read, in a sum that is made at once
STRETCH = 4 * CHUNK  # numbers that a thread adds before it takes the next stretch
LEAVE_S = 5.0


class Making:
    """A sum in the making."""

    def __init__(self, total: Total, memory: SlotMemory) -> None:
        assert total.slot is not None
        self.total, self.memory = total, memory
        self.left = 0  # stretches
        self.mark: Any = None  # of a stream
        self._out = memory.vec(total.slot)
        self._terms = [[(memory.vec(slot), f) for slot, f in term.slots] for term in total.terms]
        memory.note_all(total.slot, [slot for term in total.terms for slot, _ in term.slots])

    @property
    def numbers(self) -> int:
        return self._out.numel * sum(len(term) for term in self._terms)

    @property
    def stretches(self) -> list[tuple[int, int, int]]:
        return [
            (p, lo, min(lo + STRETCH, part.numel()))
            for p, part in enumerate(self._out.parts)
            for lo in range(0, part.numel(), STRETCH)
        ]

    def add(self, part: int, lo: int, hi: int) -> None:
        terms = [[(vec.parts[part], f) for vec, f in term] for term in self._terms]
        add_up(self._out.parts[part], terms, self.total.divisor, lo, hi)

    def add_all(self) -> None:
        for p, part in enumerate(self._out.parts):
            self.add(p, 0, part.numel())


class _Stretch(NamedTuple):
    making: Making
    part: int
    lo: int
    hi: int


class Adders:
    """``wake`` is called by a thread when a sum is there: then the loop asks ``made``."""

    def __init__(self, wake: Callable[[], None]) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.count = max(1, min(16, cores if cores < 4 else cores // 2))
        self._wake = wake
        self._queue: SimpleQueue[_Stretch | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._made: list[Making] = []
        self._waiting: list[tuple[Total, SlotMemory]] = []
        self._at_work: list[Making] = []
        self._on_gpu: list[Making] = []
        self._streams: dict[torch.device, Any] = {}
        self._failed: BaseException | None = None

    def make(self, total: Total, memory: SlotMemory) -> None:
        """Make a sum that has a slot. All that it stands on has been asked for before."""
        self._waiting.append((total, memory))
        self._start_those_that_can()

    def _start_those_that_can(self) -> None:
        again = True
        while again:
            again, waiting, self._waiting = False, self._waiting, []
            for total, memory in waiting:
                if all(inner.is_made for term in total.terms for inner in term.totals):
                    again = self._start(Making(total, memory)) or again
                else:
                    self._waiting.append((total, memory))

    def _start(self, making: Making) -> bool:
        """Whether it is there already."""
        if isinstance(making.memory, DeviceSlots):
            with torch.cuda.stream(self._stream(making.memory.device)):
                making.add_all()
                making.mark = torch.cuda.Event()
                making.mark.record()
            self._on_gpu.append(making)
            return False
        stretches = making.stretches
        if making.numbers <= SHORT or not stretches:
            making.add_all()
            making.total.made()
            return True
        making.left = len(stretches)
        self._at_work.append(making)
        while len(self._threads) < min(self.count, len(stretches)):
            self._threads.append(threading.Thread(target=self._run, name="offbeat-adder", daemon=True))
            self._threads[-1].start()
        for part, lo, hi in stretches:
            self._queue.put(_Stretch(making, part, lo, hi))
        return False

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while (one := self._queue.get()) is not None:
            making = one.making
            try:
                making.add(one.part, one.lo, one.hi)
            except BaseException as error:
                self._failed = error
            with self._lock:
                making.left -= 1
                is_there = making.left == 0
                if is_there:
                    self._made.append(making)
            if is_there:
                self._wake()
            del one, making

    def made(self) -> None:
        """Called by the loop: some sums are there, and others can begin."""
        if self._failed is not None:
            raise self._failed
        with self._lock:
            made, self._made = self._made, []
        made += [one for one in self._on_gpu if one.mark.query()]
        if not made:
            return
        self._on_gpu = [one for one in self._on_gpu if one not in made]
        self._at_work = [one for one in self._at_work if one not in made]
        for making in made:
            making.total.made()
        self._start_those_that_can()

    @property
    def looks(self) -> bool:
        """Whether a GPU has to be looked at."""
        return bool(self._on_gpu)

    def roots(self) -> list[Expression]:
        """What is being read and written here."""
        totals = [*(total for total, _ in self._waiting), *(one.total for one in (*self._at_work, *self._on_gpu))]
        return [Expression((total, 1.0) for total in totals)]

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(LEAVE_S)
