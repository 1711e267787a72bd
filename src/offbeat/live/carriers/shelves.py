"""Shelves: memory of each rank that all of them see, cut into slots of one vector each.

Nothing here decides who may write where. Every slot has *flags*, one for each adder of a sum that lies in it, and room
for a note which parameters were *used*; a flag is written by one process, after the numbers it speaks of, and only ever
grows. On a GPU a stream writes it, behind its work. (On x86 stores become visible in their order; on other machines the
store of a flag follows a lock operation of the interpreter's, which orders them.)
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offbeat.live.carriers.adding import lay
from offbeat.live.carriers.hands import Hands
from offbeat.live.carriers.kernels import prepare
from offbeat.live.carriers.memory import round_up, shared_memory, vector_bytes
from offbeat.live.transport.board import Board
from offbeat.live.transport.waiter import Waiter
from offbeat.tensors.vector import Used, Vec, wide

FEWEST, MOST = 64, 1 << 16  # slots
BYTES = 1 << 44  # of addresses, for the slots of all ranks; memory is what is written to, and no more
ON_DEVICE = 1 << 12  # slots, where each is asked for when it is first used


class Shelves:
    """The shelves of ``ranks``, as this process sees them. Made by all of them together."""

    def __init__(
        self, name: str, ranks: tuple[int, ...], like: Vec, parameters: int, board: Board, waiter: Waiter, hands: Hands
    ) -> None:
        self._parameters, self.hands = parameters, hands
        self._kinds = [(wide(p.dtype), p.numel()) for p in like.parts]
        self.vector_bytes = vector_bytes(self._kinds)
        self._slot_bytes = round_up(max(self.vector_bytes, 1), mmap.PAGESIZE)
        device = like.parts[0].device
        self.on_device = device.type == "cuda"
        if self.on_device:
            prepare(device, (kind for kind, _ in self._kinds))
        self.slots = ON_DEVICE if self.on_device else max(FEWEST, min(MOST, BYTES // len(ranks) // self._slot_bytes))
        flag_bytes = round_up(self.slots * len(ranks) * 8, mmap.PAGESIZE)
        self._head_bytes = flag_bytes + round_up(self.slots * parameters, mmap.PAGESIZE)
        nbytes = self._head_bytes + self.slots * self._slot_bytes
        self._memory = shared_memory(name, ranks, device, self._head_bytes, nbytes, self.slots, board, waiter)
        self.carrier = self._memory.carrier
        self._vecs: dict[tuple[int, int], Vec] = {}
        self._noted: dict[tuple[int, int], Used] = {}
        flags = self._memory.words(np.int64, self.slots * len(ranks), 0)
        self._flags: list[NDArray[np.int64]] = [f.reshape(self.slots, len(ranks)) for f in flags]
        used = self._memory.words(np.uint8, self.slots * parameters, flag_bytes) if parameters else []
        self._used: list[NDArray[np.uint8]] = [u.reshape(self.slots, parameters) for u in used]
        self.settle, self.mark, self.aside = self._memory.settle, self._memory.mark, self._memory.aside

    def vec(self, member: int, slot: int) -> Vec:
        """A slot as a vector; ``member`` counts the ranks that share."""
        found = self._vecs.get((member, slot))
        if found is None:
            place = self._head_bytes + slot * self._slot_bytes
            found = self._vecs[member, slot] = Vec(self._memory.vector(member, slot, place, self._kinds))
        return found

    def lay(self, x: Vec, member: int, slot: int, mine: bool) -> None:
        """Let a slot hold ``x``. ``mine``: this process alone ever writes there, and notes anything of it."""
        lay(x, self.vec(member, slot), self.hands)
        if not mine or self._noted.get((member, slot), ()) != x.used:
            self.note_used(member, slot, x.used)

    # Flags.

    def raise_flag(self, member: int, slot: int, part: int, number: int, waits: bool = False) -> None:
        """What this part of the slot should hold in sum ``number`` is there, or will be when the flag goes up.

        ``waits``: it is up, and all that was asked for before is done, when this returns.
        """
        row = self._flags[member]
        if waits or not self._memory.write_behind(member, slot * row.shape[1] + part, number + 1):
            self.settle()
            row[slot, part] = number + 1

    def raised(self, member: int, slot: int, parts: Sequence[int] | range, number: int) -> bool:
        """Whether all these parts are there."""
        row = self._flags[member][slot]
        return all(row[part] > number for part in parts)

    # Which parameters a gradient used.

    def note_used(self, member: int, slot: int, used: Used) -> None:
        self._noted[member, slot] = used
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

    def close(self, together: bool = True) -> None:
        """Let go of all memory; ``together``: so do the others now."""
        self._vecs, self._flags, self._used = {}, [], []
        self._memory.close(together)
