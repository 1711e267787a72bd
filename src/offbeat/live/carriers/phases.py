"""A coded sum in two phases among the members of a group; `offbeat.tensors.stretches` says who does what."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.live.carriers.group import Group
from offbeat.tensors.stretches import CodedShare
from offbeat.tensors.vector import Vec


class TwoPhases:
    """One sum: ``to_owners``, wait, ``to_all``, wait, ``result``. ``wire_bytes``: what this member sends in all."""

    def __init__(self, share: CodedShare, group: Group) -> None:
        self._share, self._group = share, group
        self._places, self._own = range(len(share.stretches.lengths)), share.stretches.lengths[share.place]
        self._received: list[Tensor] = []
        self._sums: list[Tensor] = []
        self.wire_bytes = sum(share.stretches.lengths) + (len(self._places) - 2) * self._own

    def to_owners(self) -> dist.Work:
        """Start the first phase: to every member its stretch, and mine from all."""
        share = self._share
        outgoing = [0 if place == share.place else n for place, n in enumerate(share.stretches.lengths)]
        incoming = [0 if place == share.place else self._own for place in self._places]
        sent = torch.zeros(sum(outgoing), dtype=torch.uint8) if share.sent is None else share.sent.cpu()
        received = share.stretches.message(sum(incoming), on_host=True)
        self._received = list(received.split(incoming))
        return self._group.all_to_all(received, sent, incoming, outgoing)

    def to_all(self, gives: Sequence[bool], memory: Tensor | None = None) -> dist.Work:
        """Start the second phase: the sum of my stretch, of those who give something, to all. ``memory``: on the host,
        for all sums: mine, then the others'."""
        place, stretches = self._share.place, self._share.stretches
        theirs = [m if there else None for m, there in zip(self._received, gives, strict=True)]
        own_sum = self._share.own_sum(theirs, None if memory is None else memory[: self._own]).cpu()
        # Not a gathering: Gloo wants all equally long there, and copies what came once more.
        outgoing = [0 if other == place else self._own for other in self._places]
        incoming = [0 if other == place else n for other, n in enumerate(stretches.lengths)]
        received = stretches.message(sum(incoming), on_host=True) if memory is None else memory[self._own :]
        self._sums = [own_sum if other == place else m for other, m in enumerate(received.split(incoming))]
        copies = own_sum if len(self._places) == 2 else own_sum.repeat(len(self._places) - 1)
        return self._group.all_to_all(received, copies, incoming, outgoing)

    def result(self, out: Vec | None = None, divisor: float = 1) -> Vec:
        """The sum of what all gave, divided. What was lost is noted now."""
        self._share.keep()  # first: the sum may be written over what was given
        return self._share.result(self._sums, out, divisor)
