"""Cores that stand idle lend a hand: long vectors are copied and added by several threads.

One core cannot ask for as many bytes as memory could give, and a job with one thread a rank leaves cores without work
on most hosts. So the cores of a host are divided among its ranks, and what is left beside torch's own threads takes
stretches of a long vector each. Not torch's own way of doing that: the number of its threads holds for the whole
process, also for what the worker computes meanwhile, whose sums would be cut otherwise and round otherwise.

The threads wait at one queue. What a caller hands out are calls on stretches that do not overlap, so they share
nothing; it takes one itself, and returns when all are done. Several threads of a process may call at the same time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue

import torch
from torch import Tensor

LONG = 1 << 20  # numbers, for each hand: fewer are quicker done than handed out
MOST = 4  # more of them do not get more out of memory
LEAVE_S = 5.0

Call = Callable[[], None]
Pairs = Sequence[tuple[Tensor, Tensor]]
Pieces = Callable[[Tensor], Pairs]  # given memory for a vector: where in it which tensors are to be copied


class Hands:
    """Those of one rank, of ``ranks`` on its host. Threads are started when they are first needed."""

    def __init__(self, ranks: int) -> None:
        idle = len(os.sched_getaffinity(0)) // ranks if hasattr(os, "sched_getaffinity") else 1
        self.count = max(1, min(MOST, idle // torch.get_num_threads()))
        self._calls: SimpleQueue[Stint | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()  # so that two callers do not both start the threads

    def over(self, lo: int, hi: int, work: Callable[[int, int], None]) -> None:
        """Do ``work`` on the numbers from ``lo`` to ``hi``, in stretches of whole cache lines."""
        parts = self._parts(hi - lo)
        if parts == 1:
            work(lo, hi)
            return
        ends = [lo, *(lo + (hi - lo) * k // parts // 16 * 16 for k in range(1, parts)), hi]
        self._all([lambda a=a, b=b: work(a, b) for a, b in pairwise(ends)])  # type: ignore[misc]

    def copy(self, pairs: Pairs) -> None:
        """Let the first of each pair be what the second is."""
        total = sum(into.numel() for into, _ in pairs)
        parts = self._parts(total)
        if parts == 1:
            if pairs:
                torch._foreach_copy_([into for into, _ in pairs], [what for _, what in pairs])
            return
        share = -(-total // parts)
        heaps: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(parts)]
        k = room = 0
        for into, what in pairs:
            for a, b in _pieces(into, what, share):
                if room >= share and k + 1 < parts:
                    k, room = k + 1, 0
                heaps[k][0].append(a)
                heaps[k][1].append(b)
                room += a.numel()
        # One call for many: small ones take longer to be called for than to be copied.
        self._all([lambda i=i, w=w: torch._foreach_copy_(i, w) for i, w in heaps if i])  # type: ignore[misc]

    def help_with(self, numbers: int) -> bool:
        """Whether so many are worth handing out."""
        return self._parts(numbers) > 1

    def _parts(self, numbers: int) -> int:
        return max(1, min(self.count, numbers // LONG))

    def _all(self, calls: Sequence[Call]) -> None:
        if not calls:
            return
        stints = [Stint(call) for call in calls[1:]]
        if stints:
            self._start()
        for stint in stints:
            self._calls.put(stint)
        calls[0]()
        for stint in stints:
            stint.done.acquire()
        for stint in stints:
            if stint.failure is not None:
                raise stint.failure

    def _start(self) -> None:
        with self._starting:
            for k in range(len(self._threads), self.count - 1):
                thread = threading.Thread(target=self._run, name=f"offbeat-hand-{k}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self) -> None:
        with torch.no_grad():
            while (stint := self._calls.get()) is not None:
                stint.run()
                del stint  # else it keeps its tensors until the next one comes

    def close(self) -> None:
        """Let the threads end, after what was asked of them."""
        with self._starting:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            thread.join(LEAVE_S)


class Stint:
    """A call, and whether it is done."""

    def __init__(self, call: Call) -> None:
        self._call: Call | None = call
        self.done = threading.Semaphore(0)
        self.failure: BaseException | None = None

    def run(self) -> None:
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:
            self.failure = error
        self._call = None
        self.done.release()


def _pieces(into: Tensor, what: Tensor, longest: int) -> list[tuple[Tensor, Tensor]]:
    """A pair in pieces of so many numbers, where it can be cut."""
    if into.numel() <= longest or not (into.is_contiguous() and what.is_contiguous()):
        return [(into, what)]
    return list(zip(into.view(-1).split(longest), what.view(-1).split(longest), strict=True))


ONE = Hands(1 << 30)  # the caller's own
