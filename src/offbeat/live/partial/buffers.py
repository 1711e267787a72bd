"""The memory a round sums in: a vector with room behind it for a record of who gave what, so that both travel as one.

The record holds small whole numbers, which every float of 32 bits holds exactly: an entry for each member and, of
gradients, how many members had one for each of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offbeat.rounds.seat import Freshness
from offbeat.tensors.vector import Used, Vec, wide


class RoundBuffer(Vec):
    """A vector that looks like ``like``, in host memory, with a record of ``members`` and of ``parameters`` behind its
    first memory."""

    __slots__ = ("_counts", "_entries", "record", "whole")

    def __init__(self, like: Vec, members: int, parameters: int = 0) -> None:
        ends: dict[torch.dtype, int] = {}
        places = []
        for p in like.parts:  # what is summed alike lies side by side
            start = ends.get(dtype := wide(p.dtype), 0)
            ends[dtype] = start + p.numel()
            places.append((dtype, start, ends[dtype]))
        room = [members + parameters, *[0] * (len(ends) - 1)]
        whole = {d: torch.zeros(n + more, dtype=d) for (d, n), more in zip(ends.items(), room, strict=True)}
        self.whole = list(whole.values())
        # The same memory: reading and writing it costs next to nothing.
        self.record = self.whole[0].numpy()[next(iter(ends.values())) :]
        self._entries, self._counts = self.record[:members], self.record[members:]
        super().__init__([whole[d][a:b] for d, a, b in places])

    @property
    def used(self) -> Used:
        """The parameters that at least one member had a gradient for."""
        return tuple(count > 0 for count in self._counts.tolist()) if len(self._counts) else None

    @used.setter
    def used(self, used: Used) -> None:
        if len(self._counts):
            self._counts[:] = 1 if used is None else used

    def note(self, member: int, share: Freshness | None) -> None:
        """The record is this member's share, and nothing yet of the others. Who gives nothing has entry 0."""
        self._entries.fill(0)
        if share is not None:
            self._entries[member] = 2 * (share.age + 1) + share.fresh
        else:
            self._counts.fill(0)

    def shares(self, members: Iterable[int]) -> dict[int, Freshness]:
        """Those of all who gave something."""
        entries = [int(entry) for entry in self._entries]
        return {r: Freshness(entries[r] // 2 - 1, bool(entries[r] % 2)) for r in members if entries[r]}
