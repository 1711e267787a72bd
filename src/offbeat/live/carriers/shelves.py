"""Shelves: memory of each rank of a host that all of them see, cut into slots of one vector each.

A shelf is an anonymous file in memory (``memfd``), made by its rank and handed to the others as a descriptor: it has no
name, no size limit of its own, and ends with the last process that holds it. It is made larger than will ever be used:
pages cost nothing until they are written.

Nothing here decides who may write where. Every slot has *flags*, one for each adder of a sum that lies in it, and room
for a note which parameters were *used*; a flag is written by one process, after the numbers it speaks of, and only ever
grows. (On x86 stores become visible in their order; on other machines the store of a flag follows a lock operation of
the interpreter's, which orders them.)
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.live.carriers import doors
from offbeat.live.transport.board import Board
from offbeat.live.transport.waiter import Waiter
from offbeat.tensors.vector import Used, Vec, wide

LINE = 64
MOST_BYTES = 1 << 40  # of addresses, for all of a shelf
FEWEST, MOST = 64, 1 << 16  # slots


class Shelves:
    """The shelves of ``ranks``, as this process sees them. Made by all of them together."""

    def __init__(
        self, name: str, ranks: tuple[int, ...], like: Vec, parameters: int, board: Board, waiter: Waiter
    ) -> None:
        self.ranks, self._me = ranks, ranks.index(board.rank)
        self._parameters = parameters
        self._kinds = [(wide(p.dtype), p.numel()) for p in like.parts]
        sizes = [_round_up(n * dtype.itemsize, LINE) for dtype, n in self._kinds]
        self._offsets = [sum(sizes[:k]) for k in range(len(sizes))]
        self._slot_bytes = _round_up(max(sum(sizes), 1), mmap.PAGESIZE)
        self.slots = max(FEWEST, min(MOST, (1 << 32) // self._slot_bytes))
        self._flag_bytes = _round_up(self.slots * len(ranks) * 8, mmap.PAGESIZE)
        self._head_bytes = self._flag_bytes + _round_up(self.slots * parameters, mmap.PAGESIZE)
        self._length = self._head_bytes + self.slots * self._slot_bytes
        self._maps = self._exchange(name, board, waiter)
        self._vecs: dict[tuple[int, int], Vec] = {}
        shape = (self.slots, len(ranks))
        self._flags: list[NDArray[np.int64]] = [
            np.frombuffer(m, np.int64, self.slots * len(ranks)).reshape(shape) for m in self._maps
        ]
        self._used: list[NDArray[np.uint8]] = [
            np.frombuffer(m, np.uint8, self.slots * parameters, self._flag_bytes).reshape(self.slots, parameters)
            for m in self._maps
        ]

    def _exchange(self, name: str, board: Board, waiter: Waiter) -> list[mmap.mmap]:
        own = os.memfd_create("offbeat", os.MFD_CLOEXEC)
        try:
            os.ftruncate(own, self._length)
            held = doors.exchange(name, self.ranks, own, board, waiter)
            try:
                return [mmap.mmap(held[rank], self._length) for rank in self.ranks]
            finally:
                for descriptor in held.values():
                    os.close(descriptor)
        finally:
            os.close(own)

    def vec(self, member: int, slot: int) -> Vec:
        """A slot as a vector; ``member`` counts the ranks that share."""
        found = self._vecs.get((member, slot))
        if found is None:
            start = self._head_bytes + slot * self._slot_bytes
            found = self._vecs[member, slot] = Vec(
                [
                    torch.frombuffer(self._maps[member], dtype=dtype, count=n, offset=start + offset)
                    if n
                    else torch.empty(0, dtype=dtype)
                    for (dtype, n), offset in zip(self._kinds, self._offsets, strict=True)
                ]
            )
        return found

    # Flags.

    def raise_flag(self, member: int, slot: int, part: int, number: int) -> None:
        """What this part of the slot should hold in round ``number`` is there."""
        self._flags[member][slot, part] = number + 1

    def raised(self, member: int, slot: int, parts: Sequence[int] | range, number: int) -> bool:
        """Whether all these parts are there."""
        row = self._flags[member][slot]
        return all(row[part] > number for part in parts)

    # Which parameters a gradient used.

    def note_used(self, member: int, slot: int, used: Used) -> None:
        if self._parameters:
            self._used[member][slot] = 1 if used is None else used

    def used(self, places: Sequence[tuple[int, int]]) -> Used:
        """Those that at least one of these slots used."""
        if not self._parameters:
            return None
        found = np.zeros(self._parameters, np.uint8)
        for member, slot in places:
            found |= self._used[member][slot]
        return tuple(bool(one) for one in found.tolist())

    def close(self) -> None:
        """Let go of all memory. A vector that somebody still reads keeps its shelf until it is gone."""
        self._vecs, self._flags, self._used = {}, [], []
        for m in self._maps:
            with suppress(BufferError):
                m.close()
        self._maps = []


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to
