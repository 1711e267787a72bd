"""The arena: memory of a host that its host process owns, and that every worker of the host has mapped.

It is one anonymous file (``memfd``), handed over as a descriptor: it has no name, no size limit of its own, and ends
with the last process that holds it. It is made larger than will ever be used: pages cost nothing until they are
written. In front lie *pages*, one for each worker, in which it shows what it is doing; behind them *slots*, each for
one vector and a note which parameters were used to make it.

Where all vectors lie on one GPU, or on several that read each other's memory, a slot's numbers are there, and what is
behind them here is the note alone. Memory on a GPU is the host process's, too: workers open it by its handle.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.live.memory.device import Allocation
from offbeat.tensors.vector import Used, Vec

ARENA_BYTES = 1 << 42  # of addresses
PAGES = 1024  # workers of one host
PAGE_BYTES = 1 << 16
WORDS_AT, WORDS = 3 << 14, 1 << 11  # in a page: numbers that streams of a worker's GPU write
LINE = 64
PUNCH_HOLE = 0x1 | 0x2  # and keep the file's length

Kinds = Sequence[tuple[torch.dtype, int]]


def round_up(number: int, to: int) -> int:
    return -(-number // to) * to


def vector_bytes(kinds: Kinds) -> int:
    """A vector's, each part at the beginning of a cache line."""
    return sum(round_up(n * dtype.itemsize, LINE) for dtype, n in kinds)


class Mapping:
    """The arena as one process sees it."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, nbytes)

    def tensor(self, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def vector(self, offset: int, kinds: Kinds) -> list[Tensor]:
        """A vector that begins there."""
        views, at = [], offset
        for dtype, n in kinds:
            views.append(self.tensor(at, dtype, n))
            at += round_up(n * dtype.itemsize, LINE)
        return views

    def bytes_at(self, offset: int, count: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._map, np.uint8, count, offset)

    def words_of(self, page: int) -> NDArray[np.uint64]:
        """The words in a worker's page."""
        return np.frombuffer(self._map, np.uint64, WORDS, page + WORDS_AT)

    def close(self) -> None:
        """A tensor that somebody still reads keeps the mapping until it is gone."""
        with suppress(BufferError):
            self._map.close()


class Arena(Mapping):
    """The host process's own."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("offbeat", os.MFD_CLOEXEC)
        self.nbytes = ARENA_BYTES
        while True:  # where addresses are scarce (a limit on them, a small machine), fewer will do
            try:
                os.ftruncate(self.descriptor, self.nbytes)
                super().__init__(self.descriptor, self.nbytes)
                break
            except (OSError, ValueError):
                if self.nbytes <= 1 << 32:
                    raise
                self.nbytes >>= 1
        self._end = PAGES * PAGE_BYTES
        self._free: dict[int, list[int]] = {}

    def take(self, nbytes: int) -> int:
        """So many bytes, a whole number of pages of the kernel's, that are nobody's."""
        nbytes = round_up(max(nbytes, 1), mmap.PAGESIZE)
        if self._free.get(nbytes):
            return self._free[nbytes].pop()
        if self._end + nbytes > self.nbytes:
            raise MemoryError(f"the arena's {self.nbytes} bytes of addresses are used up")
        self._end += nbytes
        return self._end - nbytes

    def give_back(self, offset: int, nbytes: int) -> None:
        """Nobody reads or writes there any more: the memory goes back to the system, the addresses to the arena."""
        nbytes = round_up(max(nbytes, 1), mmap.PAGESIZE)
        _punch(self.descriptor, offset, nbytes)
        self._free.setdefault(nbytes, []).append(offset)


def _punch(descriptor: int, offset: int, nbytes: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate(descriptor, PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(nbytes))


class Shard(NamedTuple):
    """Which part of a slot is a rank's: the parts ``first`` to ``last``, and the notes of ``number`` ``of`` so many."""

    first: int
    last: int
    number: int
    of: int


class SlotMemory:
    """Slots for vectors of one kind, in a process that has mapped the arena; a slot is where it begins in there.

    ``parameters``: of how many a slot notes whether they were used. ``shard``: what this process sees of each slot,
    where the ranks of a worker have a part each; ``kinds`` are those of all of them.
    """

    def __init__(self, mapping: Mapping, kinds: Kinds, parameters: int, shard: Shard | None = None) -> None:
        shard = shard or Shard(0, len(kinds), 0, 1)
        self._mapping, self.kinds, self.parameters = mapping, list(kinds[shard.first : shard.last]), parameters
        self.vector_bytes, self._begins = vector_bytes(self.kinds), vector_bytes(kinds[: shard.first])
        self.whole_bytes = vector_bytes(kinds)
        self.slot_bytes = self.whole_bytes + parameters * shard.of
        self._notes_at = self.whole_bytes + parameters * shard.number
        self._vecs: dict[int, Vec] = {}
        self._notes: dict[int, NDArray[np.uint8]] = {}

    def vec(self, slot: int, beside: int | None = None) -> Vec:
        """What a slot holds; ``beside``: as it is seen from where that other slot lies."""
        found = self._vecs.get(slot)
        if found is None:
            found = self._vecs[slot] = Vec(self._mapping.vector(slot + self._begins, self.kinds))
        return found

    def address(self, slot: int) -> int:
        """Where in this process the vector begins."""
        return int(self._mapping.bytes_at(slot + self._begins, 1).ctypes.data)

    def bytes_of(self, slot: int) -> memoryview:
        """All of it: the vector, and the note."""
        return memoryview(self._mapping.bytes_at(slot, self.slot_bytes).data)

    def of_shard(self, shard: Shard) -> SlotMemory:
        """What one rank of a worker sees of these."""
        return SlotMemory(self._mapping, self.kinds, self.parameters // shard.of, shard)

    def views(self, slot: int) -> list[memoryview]:
        """What of it is this rank's: the numbers, and the note."""
        parts = (slot + self._begins, self.vector_bytes), (slot + self._notes_at, self.parameters)
        return [memoryview(self._mapping.bytes_at(*part).data) for part in parts]

    def note(self, slot: int) -> NDArray[np.uint8]:
        """Of which parameters were used."""
        found = self._notes.get(slot)
        if found is None:
            found = self._notes[slot] = self._mapping.bytes_at(slot + self._notes_at, self.parameters)
        return found

    def note_used(self, slot: int, used: Used) -> None:
        """Which parameters were used to make what lies there."""
        if self.parameters:
            self.note(slot)[:] = 1 if used is None else used

    def note_all(self, slot: int, made_of: Sequence[int]) -> None:
        """Those that at least one of these slots used."""
        if self.parameters:
            note = self.note(slot)
            note[:] = 0
            for one in made_of:
                note |= self.note(one)

    def used(self, slots: Sequence[int]) -> Used:
        """Those that at least one of these slots used."""
        if not self.parameters:
            return None
        found = np.zeros(self.parameters, np.uint8)
        for slot in slots:
            found |= self.note(slot)
        return tuple(map(bool, found.tolist()))

    def forget(self) -> None:
        """Let go of all views."""
        self._vecs, self._notes = {}, {}


class DeviceSlots(SlotMemory):
    """Slots whose numbers lie on GPUs, by allocations that the host process has made, on one after the other.

    ``devices``: those GPUs; in a worker, its own, from which it sees them all.
    """

    def __init__(
        self,
        mapping: Mapping,
        kinds: Kinds,
        parameters: int,
        devices: Sequence[torch.device],
        shard: Shard | None = None,
    ) -> None:
        super().__init__(mapping, kinds, parameters, shard)
        self.slot_bytes = max(self.slot_bytes - self.whole_bytes, 1)
        self._notes_at -= self.whole_bytes
        self.devices = list(devices)
        self._allocations: dict[int, Allocation] = {}
        self._seen: dict[tuple[int, torch.device], Vec] = {}

    def make(self, slot: int) -> None:
        """In the host process: the memory of a slot."""
        device = self.devices[len(self._allocations) % len(self.devices)]
        self._allocations[slot] = Allocation.make(self.whole_bytes, device)

    def device_of(self, slot: int) -> torch.device:
        return self._allocations[slot].device

    def handle(self, slot: int) -> str:
        return self._allocations[slot].handle.hex()

    def open(self, slot: int, handle: str) -> None:
        """In a worker."""
        self._allocations[slot] = Allocation.open(bytes.fromhex(handle), self.devices[0])

    def vec(self, slot: int, beside: int | None = None) -> Vec:
        device = self.device_of(slot if beside is None else beside)
        found = self._seen.get((slot, device))
        if found is None:
            parts, at = [], self._begins
            for dtype, n in self.kinds:
                parts.append(self._allocations[slot].tensor(dtype, n, at, device))
                at += round_up(n * dtype.itemsize, LINE)
            found = self._seen[slot, device] = Vec(parts)
        return found

    def forget(self) -> None:
        super().forget()
        self._seen = {}
        with suppress(RuntimeError, OSError):  # where the GPU itself has failed, nothing can be given back
            for device in dict.fromkeys(self.devices):
                torch.cuda.synchronize(device)
            for one in self._allocations.values():
                one.free()
        self._allocations = {}
