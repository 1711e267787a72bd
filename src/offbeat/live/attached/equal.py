"""Replicas made equal: at the beginning, in the middle, and at the end of a run."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from offbeat.live.attached.flat import Flat
from offbeat.live.carriers.exchanges import Transport
from offbeat.live.carriers.island import Island
from offbeat.tensors.vector import wide


def share_beginning(flat: Flat, transport: Transport, island: Island | None = None) -> None:
    """Rank 0's parameters and buffers for all, as DDP does; of a sharded model, the shards of the first island."""
    with torch.no_grad():
        if island is not None:
            for tensor in (*flat.buffers.parts, *flat.held_whole, *flat.other_buffers):
                island.take_over(tensor.data)
        for tensor in (*flat.parts, *flat.buffers.parts, *flat.frozen, *flat.other_buffers):
            transport.broadcast(tensor.data)


def equalise(flat: Flat, transport: Transport, island: Island | None = None) -> None:
    """The mean of weights and floating buffers, the maximum of integer ones.

    Replicas that are equal already stay untouched: the mean of equal numbers may round. Buffers are not sharded, and
    the ranks of an island have seen different data: their mean first.
    """
    if island is not None:
        _equal_inside(flat, island)
    transport.handing_over()
    parts = (*flat.parts, *flat.buffers.parts)
    digest = hashlib.sha256()
    for tensor in parts:
        digest.update(tensor.detach().cpu().view(torch.uint8).numpy().data)
    number = int.from_bytes(digest.digest()[:7], "big")
    both = transport.agree_on(torch.tensor([number, -number]), dist.ReduceOp.MAX, "the others' weights")
    with torch.no_grad():
        if int(both[0]) != -int(both[1]):
            for tensor in parts:
                mean = transport.agree_on(tensor.to(wide(tensor.dtype)), dist.ReduceOp.AVG, "the others' weights")
                tensor.copy_(mean)
        for counter in flat.other_buffers:
            if not counter.is_complex():  # those are tables, such as rotary embeddings'
                counter.copy_(transport.agree_on(counter.long(), dist.ReduceOp.MAX, "the others' buffers"))


def _equal_inside(flat: Flat, island: Island) -> None:
    with torch.no_grad():
        for part in flat.buffers.parts:
            part.copy_(island.agree_on(part.to(wide(part.dtype))).div_(island.size))
        for counter in flat.other_buffers:
            if not counter.is_complex():
                counter.copy_(island.agree_on(counter.long(), dist.ReduceOp.MAX))
