"""Memory of each rank of a host that all of them can read and write: on the host itself, or on the GPU they share.

On the host it is an anonymous file (``memfd``), made by its rank and handed to the others as a descriptor: it has no
name, no size limit of its own, and ends with the last process that holds it. It is made larger than will ever be used:
pages cost nothing until they are written.

On a GPU it is ordinary device memory, one tensor for each vector, which the others open through CUDA's own handles
(CUDA IPC). The handle lies in the file beside it, and is there before anybody is told of what the tensor holds. Work on
a GPU ends later than the call that asks for it: whoever tells another process of something *settles* first.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from offbeat.live.carriers import doors
from offbeat.live.transport.board import Board
from offbeat.live.transport.waiter import Waiter

LINE = 64
HANDLE = 4096  # bytes for the handles of one vector

Kinds = Sequence[tuple[torch.dtype, int]]


def round_up(number: int, to: int) -> int:
    return -(-number // to) * to


def vector_bytes(kinds: Kinds) -> int:
    """A vector's, each part at the beginning of a cache line."""
    return sum(round_up(n * dtype.itemsize, LINE) for dtype, n in kinds)


class HostMemory:
    """One file of each of ``ranks``, of ``nbytes`` (of addresses), in all of their processes. Made by all together."""

    def __init__(self, name: str, ranks: tuple[int, ...], nbytes: int, board: Board, waiter: Waiter) -> None:
        self.me, self.size = ranks.index(board.rank), len(ranks)
        own = os.memfd_create("offbeat", os.MFD_CLOEXEC)
        try:
            os.ftruncate(own, nbytes)
            held = doors.exchange(name, ranks, own, board, waiter)
        finally:
            os.close(own)
        try:
            self._maps = [mmap.mmap(held[rank], nbytes) for rank in ranks]
        finally:
            for descriptor in held.values():
                os.close(descriptor)

    def words(self, dtype: Any, count: int, offset: int) -> list[NDArray[Any]]:
        """Everybody's numbers at this place."""
        return [np.frombuffer(m, dtype, count, offset) for m in self._maps]

    def vector(self, member: int, number: int, offset: int, kinds: Kinds) -> list[Tensor]:
        """A vector that lies there, as tensors. (``number`` tells vectors apart where they have no place.)"""
        views, at = [], offset
        for dtype, n in kinds:
            here = torch.frombuffer(self._maps[member], dtype=dtype, count=n, offset=at) if n else None
            views.append(torch.empty(0, dtype=dtype) if here is None else here)
            at += round_up(n * dtype.itemsize, LINE)
        return views

    def settle(self) -> None:
        """What was written is there."""

    def close(self) -> None:
        """Let go of it all. A vector that somebody still reads keeps its file until it is gone."""
        for m in self._maps:
            with suppress(BufferError):
                m.close()
        self._maps = []


class DeviceMemory:
    """The same for vectors on one GPU, with a file beside it for words; ``vectors``: how many each rank may have."""

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
        self._device, self._vectors, self._start = device, vectors, round_up(nbytes, mmap.PAGESIZE)
        # One vector more, to try whether the others can read it.
        file_bytes = self._start + (vectors + 1) * HANDLE
        self._file = HostMemory(name, ranks, file_bytes, board, waiter)
        self.me, self.size, self.words = self._file.me, self._file.size, self._file.words
        self._handles = self._file.words(np.uint8, (vectors + 1) * HANDLE, self._start)
        self._held: dict[tuple[int, int], list[Tensor]] = {}
        try:
            self._try(f"{name}/tried", ranks, board, waiter)
        except (RuntimeError, OSError) as error:
            self.close()
            raise OSError(f"its GPU memory cannot be read by others: {str(error).splitlines()[0]}") from error

    def _try(self, name: str, ranks: tuple[int, ...], board: Board, waiter: Waiter) -> None:
        """One number each, read by all."""
        kinds = [(torch.float64, 1)]
        self.vector(self.me, self._vectors, 0, kinds)[0].fill_(self.me + 1)
        self.settle()
        waiter.until(board.meeting(name, ranks), "the ranks of this GPU to meet")
        found = [float(self.vector(m, self._vectors, 0, kinds)[0].item()) for m in range(self.size)]
        waiter.until(board.meeting(f"{name}/read", ranks), "the ranks of this GPU to meet")
        if found != [m + 1.0 for m in range(self.size)]:
            raise OSError(f"the others' numbers read {found}")

    def vector(self, member: int, number: int, offset: int, kinds: Kinds) -> list[Tensor]:
        """Vector ``number`` of a member: one's own is made when it is first asked for, others' are opened."""
        if (member, number) not in self._held:
            place = self._handles[member][number * HANDLE : (number + 1) * HANDLE]
            if member == self.me:
                made = [torch.empty(n, dtype=dtype, device=self._device) for dtype, n in kinds]
                data = pickle.dumps([reduce_tensor(t)[1] if t.numel() else None for t in made])
                if len(data) > HANDLE - 8:
                    raise OSError(
                        f"a handle for {len(made)} tensors takes {len(data)} bytes and {HANDLE - 8} have room"
                    )
                place[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
                place[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
            else:
                length = int.from_bytes(place[:8].tobytes(), "little")
                handles = pickle.loads(place[8 : 8 + length].tobytes())
                made = [
                    torch.empty(0, dtype=dtype, device=self._device) if h is None else rebuild_cuda_tensor(*h)
                    for h, (dtype, _) in zip(handles, kinds, strict=True)
                ]
            self._held[member, number] = made
        # A region may have been made larger than what lies in it now.
        return [t[:n] for t, (_, n) in zip(self._held[member, number], kinds, strict=True)]

    def settle(self) -> None:
        """All that this process has asked of the GPU has been done."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self.settle()
        self._held, self._handles, self.words = {}, [], self._file.words
        self._file.close()


Memory = HostMemory | DeviceMemory
