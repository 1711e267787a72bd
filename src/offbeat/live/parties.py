"""Sums among the members of a block, for the clerks: process groups of the channel's own.

Groups are made when the channel is opened, by all ranks in the same order. Blocks of two, and blocks of schedules with
very many different ones, exchange point to point instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.codec import Codec
from offbeat.effects import Channel
from offbeat.live.transport import LONG
from offbeat.live.waiting import Waiter
from offbeat.vector import Vec, wide

MOST_GROUPS = 64


class Parties:
    """Every block this rank sums in."""

    def __init__(self, channel: Channel, rank: int, size: int, waiter: Waiter) -> None:
        self._rank, self._waiter = rank, waiter
        self._world: Any = dist.new_group(backend="gloo", timeout=LONG) if size > 1 else None
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(size)): self._world}
        self.wire_bytes = 0
        for block in self._blocks(channel, size):
            group = dist.new_group(list(block), backend="gloo", timeout=LONG)
            if rank in block:
                self._groups[block] = group

    @staticmethod
    def _blocks(channel: Channel, size: int) -> list[tuple[int, ...]]:
        """The different blocks of three or more over one period, in an order that is the same on all ranks."""
        period = getattr(channel.whom, "period", 1) or 1
        found: dict[tuple[int, ...], None] = {}
        for version in range(period):
            W = channel.whom(version)
            for rank in range(size):
                block = W.block(rank)
                if block is not None and 2 < len(block) < size:
                    found[block] = None
        return list(found) if len(found) <= MOST_GROUPS else []

    def total(
        self,
        parts: list[Tensor] | None,
        like: Vec,
        record: Tensor,
        ranks: tuple[int, ...],
        version: int,
        codec: Codec | None,
        key: tuple[int, int, int],
    ) -> list[Tensor]:
        """The sum of the members' ``parts`` (None: nothing to give), in memory of its own; ``record`` is summed in place."""
        if codec is not None:
            return self._coded(parts, like, record, ranks, version, codec, key)
        mine = parts if parts is not None else _zeros(like)
        if len(ranks) == 1:
            return mine
        group = self._groups.get(ranks)
        if group is None:
            return self._swap(mine, record, ranks, version)
        works = [dist.all_reduce(t, group=group, async_op=True) for t in (record, *mine)]
        self.wire_bytes += sum(2 * (len(ranks) - 1) * t.numel() * t.element_size() // len(ranks) for t in mine)
        self._waiter.wait([w for w in works if w is not None], f"round {version}")
        return mine

    def _swap(self, mine: list[Tensor], record: Tensor, ranks: tuple[int, ...], version: int) -> list[Tensor]:
        theirs = self._exchange([record, *mine], ranks, version)
        theirs[self._rank] = [record.clone(), *mine]
        ordered = [theirs[r] for r in ranks]  # summed in rank order, so that all members get the same bits
        record.copy_(torch.stack([t[0] for t in ordered]).sum(dim=0))
        total = [t.clone() for t in ordered[0][1:]]
        for other in ordered[1:]:
            for t, o in zip(total, other[1:], strict=True):
                t += o
        return total

    def _exchange(self, mine: list[Tensor], ranks: tuple[int, ...], version: int) -> dict[int, list[Tensor]]:
        others = [r for r in ranks if r != self._rank]
        theirs = {r: [torch.empty_like(t) for t in mine] for r in others}
        works: list[dist.Work | None] = []
        for k, t in enumerate(mine):
            tag = (version * 16 + k) % 2**30
            works += [dist.irecv(theirs[r][k], src=r, group=self._world, tag=tag) for r in others]
            works += [dist.isend(t, dst=r, group=self._world, tag=tag) for r in others]
            self.wire_bytes += len(others) * t.numel() * t.element_size()
        self._waiter.wait([w for w in works if w is not None], f"round {version}")
        return theirs

    def _coded(
        self,
        parts: list[Tensor] | None,
        like: Vec,
        record: Tensor,
        ranks: tuple[int, ...],
        version: int,
        codec: Codec,
        key: tuple[int, int, int],
    ) -> list[Tensor]:
        mine = parts if parts is not None else _zeros(like)
        message = torch.cat([codec.encode(p, (*key, k)) for k, p in enumerate(mine)])
        theirs = {self._rank: [record.clone(), message]}
        if len(ranks) > 1:
            theirs |= self._exchange([record, message], ranks, version)
        record.copy_(torch.stack([theirs[r][0] for r in ranks]).sum(dim=0))
        total = [torch.zeros_like(p) for p in mine]
        for r in ranks:
            start = 0
            for t, p in zip(total, mine, strict=True):
                length = codec.message_bytes(p.numel(), p.element_size())
                if bool(theirs[r][0][r]):
                    t += codec.decode(theirs[r][1][start : start + length], p)
                start += length
        return total

    def groups(self) -> list[Any]:
        return [g for g in self._groups.values() if g is not None]


def _zeros(like: Vec) -> list[Tensor]:
    return [torch.zeros(p.numel(), dtype=wide(p.dtype)) for p in like.parts]
