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
    first part."""

    __slots__ = ("_counts", "_entries", "record", "whole")

    def __init__(self, like: Vec, members: int, parameters: int = 0) -> None:
        sizes = [p.numel() for p in like.parts]
        room = [members + parameters, *[0] * (len(sizes) - 1)]
        self.whole = [
            torch.zeros(n + more, dtype=wide(p.dtype)) for n, more, p in zip(sizes, room, like.parts, strict=True)
        ]
        self.record = self.whole[0].numpy()[sizes[0] :]  # the same memory: reading and writing it costs next to nothing
        self._entries, self._counts = self.record[:members], self.record[members:]
        super().__init__([t[:n] for t, n in zip(self.whole, sizes, strict=True)])

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
