"""Memory of each rank of a host that all of them can read and write: on the host itself, or on the GPU they share.

On the host it is an anonymous file (``memfd``), made by its rank and handed to the others as a descriptor: it has no
name, no size limit of its own, and ends with the last process that holds it. It is made larger than will ever be used:
pages cost nothing until they are written.

On a GPU it is device memory, some for each vector, which the others open by its handle (CUDA IPC). The handle lies in
a file as above, and is there before anybody is told of what the memory holds. Work on a GPU ends later than the call
that asks for it: whoever tells another process of something *settles* first.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.live.carriers import doors
from offbeat.live.memory.device import HANDLE_BYTES, Allocation, StreamWords
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter

LINE = 64
CLOSE_S = 2.0  # for the others to close our memory, when all are through

Kinds = Sequence[tuple[torch.dtype, int]]


def round_up(number: int, to: int) -> int:
    return -(-number // to) * to


def vector_bytes(kinds: Kinds) -> int:
    """A vector's, each part at the beginning of a cache line."""
    return sum(round_up(n * dtype.itemsize, LINE) for dtype, n in kinds)


def nap(since_s: float) -> None:
    """Let others work: shorter at first, longer the longer it has taken."""
    elapsed = time.monotonic() - since_s
    time.sleep(0 if elapsed < 0.0002 else min(0.001, elapsed / 20))


def _file(nbytes: int) -> int:
    """A file in memory, as a descriptor."""
    own = os.memfd_create("offbeat", os.MFD_CLOEXEC)
    try:
        os.ftruncate(own, nbytes)
    except BaseException:
        os.close(own)
        raise
    return own


class HostMemory:
    """One file of each of ``ranks``, of ``nbytes`` (of addresses), in all of their processes. Made by all together."""

    carrier = "shm"

    def __init__(self, name: str, ranks: tuple[int, ...], nbytes: int, board: Board, waiter: Waiter) -> None:
        self.me, self.size = ranks.index(board.rank), len(ranks)
        held = doors.exchange(name, ranks, lambda: _file(nbytes), board, waiter)
        try:
            self._maps = [mmap.mmap(held[rank], nbytes) for rank in ranks]
        finally:
            for descriptor in held.values():
                os.close(descriptor)

    def words(self, dtype: Any, count: int, offset: int) -> list[NDArray[Any]]:
        """Everybody's numbers at this place."""
        return [np.frombuffer(m, dtype, count, offset) for m in self._maps]

    def vector(self, member: int, number: int, offset: int, kinds: Kinds, room: int = 0) -> list[Tensor]:
        """A vector that lies there, as tensors. (``number`` tells vectors apart where they have no place.)"""
        views, at = [], offset
        for dtype, n in kinds:
            here = torch.frombuffer(self._maps[member], dtype=dtype, count=n, offset=at) if n else None
            views.append(torch.empty(0, dtype=dtype) if here is None else here)
            at += round_up(n * dtype.itemsize, LINE)
        return views

    def settle(self) -> None:
        """What was written is there."""

    def write_behind(self, member: int, word: int, value: int) -> bool:
        """Let a word of a member's be ``value`` when all is there that was asked for so far. False: say it yourself."""
        return False

    def mark(self) -> Any:
        """What tells when all that was written so far is there; None: it is."""
        return None

    def aside(self) -> AbstractContextManager[Any]:
        """For a thread whose work is not to wait for what others of this process have asked for."""
        return nullcontext()

    def close(self, together: bool = True) -> None:
        """Let go of it all. A vector that somebody still reads keeps its file until it is gone."""
        for m in self._maps:
            with suppress(BufferError):
                m.close()
        self._maps = []


@contextmanager
def _in_words() -> Iterator[None]:
    """Whatever torch or the driver raise where a GPU's memory is made or opened: it is memory that cannot be had."""
    try:
        yield
    except Exception as error:
        words = next(iter(str(error).splitlines()), type(error).__name__)
        raise OSError(f"memory on its GPU cannot be shared: {words}") from error


class DeviceMemory:
    """The same for vectors on one GPU, with a file beside it for words; ``vectors``: how many each rank may have."""

    carrier = "ipc"

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        nbytes: int,
        vectors: int,
        device: torch.device,
        board: Board,
        waiter: Waiter,
    ) -> None:
        self._device, self._vectors = device, vectors
        start = round_up(nbytes, mmap.PAGESIZE)
        # One vector more, to try whether the others can read it, and a word: "I have closed what is yours".
        self._file = HostMemory(name, ranks, start + (vectors + 2) * HANDLE_BYTES, board, waiter)
        self.me, self.size, self.words = self._file.me, self._file.size, self._file.words
        handles = self._file.words(np.uint8, (vectors + 1) * HANDLE_BYTES, start)
        self._handles = [h.reshape(vectors + 1, HANDLE_BYTES) for h in handles]
        self._closed = self._file.words(np.int64, 1, start + (vectors + 1) * HANDLE_BYTES)
        self._regions: dict[tuple[int, int], Allocation] = {}
        self._by_streams: StreamWords | None = None
        try:
            with doors.telling(name, board):
                self._try(name, ranks, board, waiter)
        except Exception:
            self.close()
            raise
        with suppress(OSError), _in_words():  # then whoever writes a word waits for its work first
            self._by_streams = self._for_streams(start) if start else None

    def _try(self, name: str, ranks: tuple[int, ...], board: Board, waiter: Waiter) -> None:
        """One number each, read by all."""
        kinds = [(torch.float64, 1)]
        with _in_words():
            self.vector(self.me, self._vectors, 0, kinds)[0].fill_(self.me + 1)
            self.settle()
        met = board.meeting(f"{name}/tried", ranks)
        waiter.until(lambda: met() or bool(doors.failed(name, ranks, board)), "the ranks of this GPU to meet")
        doors.check(name, ranks, board)
        with _in_words():
            found = [float(self.vector(m, self._vectors, 0, kinds)[0].item()) for m in range(self.size)]
            if found != [m + 1.0 for m in range(self.size)]:
                raise OSError(f"the others' numbers read {found}")

    def _for_streams(self, nbytes: int) -> StreamWords:
        found = StreamWords([words.ctypes.data for words in self.words(np.uint8, nbytes, 0)], nbytes, self._device)
        try:
            found.write(self.me, 0, 0)  # what is there: nobody has come so far that it could be something else
            self.settle()
        except Exception:
            found.close()
            raise
        return found

    def vector(self, member: int, number: int, offset: int, kinds: Kinds, room: int = 0) -> list[Tensor]:
        """Vector ``number`` of a member: one's own is made when it is first asked for, others' are opened.

        ``room``: bytes, where longer ones may lie there later.
        """
        region = self._regions.get((member, number))
        if region is None:
            if member == self.me:
                region = Allocation.make(max(room, vector_bytes(kinds)), self._device)
                self._handles[member][number] = np.frombuffer(region.handle, np.uint8)
            else:
                region = Allocation.open(self._handles[member][number].tobytes(), self._device)
            self._regions[member, number] = region
        views, at = [], 0
        for dtype, n in kinds:
            views.append(region.tensor(dtype, n, at))
            at += round_up(n * dtype.itemsize, LINE)
        return views

    def settle(self) -> None:
        """All that this process has asked of the GPU has been done."""
        torch.cuda.current_stream(self._device).synchronize()

    def write_behind(self, member: int, word: int, value: int) -> bool:
        """By the stream itself: nobody waits for it here."""
        if self._by_streams is None:
            return False
        self._by_streams.write(member, word, value)
        return True

    def mark(self) -> Any:
        """What tells when all that was asked for so far has been done."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def aside(self) -> AbstractContextManager[Any]:
        """A stream of its own, so that a thread waits for its own work alone."""
        return torch.cuda.stream(torch.cuda.Stream(self._device))

    def close(self, together: bool = True) -> None:
        """Close what is others', and give one's own back when they have closed it (else it ends with this process)."""
        with suppress(RuntimeError, OSError):  # where the GPU itself has failed, nothing can be given back
            torch.cuda.synchronize(self._device)
            if self._by_streams is not None:
                self._by_streams.close()
            for (member, _), region in self._regions.items():
                if member != self.me:
                    region.free()
            if self._closed:
                self._closed[self.me][0] = 1
                deadline = time.monotonic() + CLOSE_S * together
                while not all(word[0] for word in self._closed) and time.monotonic() < deadline:
                    time.sleep(0.001)
                if all(word[0] for word in self._closed):
                    for region in self._regions.values():
                        region.free()
        self._regions, self._handles, self._closed, self._by_streams = {}, [], [], None
        self._file.close()


Memory = HostMemory | DeviceMemory


def shared_memory(
    name: str,
    ranks: tuple[int, ...],
    device: torch.device,
    words_bytes: int,
    nbytes: int,
    vectors: int,
    board: Board,
    waiter: Waiter,
) -> Memory:
    """For vectors on ``device``, with so many bytes of words in front; ``nbytes`` in all, or so many ``vectors``."""
    if device.type == "cuda":
        return DeviceMemory(name, ranks, words_bytes, vectors, device, board, waiter)
    return HostMemory(name, ranks, nbytes, board, waiter)
