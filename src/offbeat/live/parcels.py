"""The memory a round sums in: a vector with room behind it for a record of who gave what, so that both travel as one.

The record holds one small whole number for each member, which every float of 32 bits holds exactly.
"""

from __future__ import annotations

import torch

from offbeat.vector import Vec, wide


class Parcel(Vec):
    """A vector that looks like ``like``, in host memory, with a record of ``members`` numbers behind its first part."""

    __slots__ = ("record", "whole")

    def __init__(self, like: Vec, members: int) -> None:
        sizes = [p.numel() for p in like.parts]
        room = [members, *[0] * (len(sizes) - 1)]
        self.whole = [
            torch.zeros(n + more, dtype=wide(p.dtype)) for n, more, p in zip(sizes, room, like.parts, strict=True)
        ]
        super().__init__([t[:n] for t, n in zip(self.whole, sizes, strict=True)])
        self.record = self.whole[0].numpy()[sizes[0] :]  # the same memory: reading and writing it costs next to nothing

    def note(self, member: int, entry: int) -> None:
        """The record is this member's entry, and nothing yet of the others."""
        self.record.fill(0)
        self.record[member] = entry

    def entries(self) -> list[int]:
        return [int(entry) for entry in self.record]
