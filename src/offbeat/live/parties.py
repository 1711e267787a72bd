"""Sums among the members of a block, for the clerks: groups of the channel's own.

The groups of the first rounds are made when the channel is opened, in the order of the rounds, so that no two workers
wait for each other; the rest when they are first needed. "Ranks" are those of nodes, for which their leaders meet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.codec import Codec
from offbeat.effects import Channel
from offbeat.live.board import Board
from offbeat.live.group import Group
from offbeat.live.waiting import Waiter
from offbeat.nodes import Nodes
from offbeat.vector import Vec, wide

MADE_AT_ONCE = 16
SMALL = 2**16  # numbers


class Parties:
    """Every block this rank sums in."""

    def __init__(self, channel: Channel, nodes: Nodes, board: Board, waiter: Waiter) -> None:
        self._rank, self._nodes, self._board, self._waiter = nodes.of(board.rank), nodes, board, waiter
        self._groups: dict[tuple[int, ...], Group] = {}
        self.wire_bytes = 0
        period = getattr(channel.whom, "period", 1) or MADE_AT_ONCE
        for version in range(min(period, MADE_AT_ONCE)):
            self._group(channel.whom(version).block(self._rank) or ())
        self._group(tuple(range(nodes.count)))

    def _group(self, ranks: tuple[int, ...]) -> Group | None:
        if len(ranks) < 2:
            return None
        if ranks not in self._groups:
            name, leaders = "party-" + "-".join(map(str, ranks)), tuple(self._nodes.leader(r) for r in ranks)
            self._groups[ranks] = Group(name, leaders, self._board, self._waiter)
        return self._groups[ranks]

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
        """The sum of the members' ``parts`` (None: nothing to give) in memory of its own; of ``record`` in place."""
        if codec is not None:
            return self._coded(parts, like, record, ranks, version, codec, key)
        mine = parts if parts is not None else _zeros(like)
        group = self._group(ranks)
        if group is None:
            return mine
        self.wire_bytes += sum(2 * (len(ranks) - 1) * t.numel() * t.element_size() // len(ranks) for t in mine)
        first = mine[0].numel()
        if first > SMALL:
            self._waiter.wait([group.all_reduce(t) for t in (record, *mine)], f"round {version}")
            return mine
        # A small sum costs latency only: the record rides along. (Its numbers are small: exact in any float.)
        fused = torch.cat([mine[0], record.to(mine[0].dtype)])
        self._waiter.wait([group.all_reduce(t) for t in (fused, *mine[1:])], f"round {version}")
        record.copy_(fused[first:].round())
        return [fused[:first], *mine[1:]]

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
        gathered = [message]
        given = bool(record[self._rank])
        group = self._group(ranks)
        if group is not None:
            gathered = [torch.empty_like(message) for _ in ranks]
            self.wire_bytes += (len(ranks) - 1) * message.numel()
            self._waiter.wait([group.all_reduce(record), group.all_gather(gathered, message)], f"round {version}")
        total = [torch.zeros_like(p) for p in mine]
        for r, theirs in zip(ranks, gathered, strict=True):
            start = 0
            for t, p in zip(total, mine, strict=True):
                length = codec.message_bytes(p.numel(), p.element_size())
                if bool(record[r]) or (given and r == self._rank):
                    t += codec.decode(theirs[start : start + length], p)
                start += length
        return total

    def give_up(self) -> None:
        """End a wait under way."""
        self._waiter.give_up()

    def groups(self) -> list[Group]:
        return list(self._groups.values())


def _zeros(like: Vec) -> list[Tensor]:
    return [torch.zeros(p.numel(), dtype=wide(p.dtype)) for p in like.parts]
