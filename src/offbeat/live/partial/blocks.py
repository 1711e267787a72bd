"""Sums among the members of a block, for the clerks: groups of the channel's own.

The groups of the first rounds are made when the channel is opened, in the order of the rounds, so that no two workers
wait for each other; the rest when they are first needed. "Ranks" are those of nodes, for which their leaders meet.
"""

from __future__ import annotations

import torch

from offbeat.live.partial.buffers import RoundBuffer
from offbeat.live.transport.board import Board
from offbeat.live.transport.group import Group
from offbeat.live.transport.waiter import Waiter
from offbeat.method.effects import Channel
from offbeat.tensors.codec import Codec
from offbeat.tensors.wire import all_gather_bytes, all_reduce_bytes, decode, encode
from offbeat.topology.hierarchy import Nodes

MADE_AT_ONCE = 16


class BlockSums:
    """Every block this rank sums in."""

    def __init__(self, channel: Channel, nodes: Nodes, board: Board, waiter: Waiter, first_round: int) -> None:
        self._rank, self._nodes, self._board, self._waiter = nodes.of(board.rank), nodes, board, waiter
        self._groups: dict[tuple[int, ...], Group] = {}
        self.wire_bytes = 0
        period = getattr(channel.whom, "period", 1) or MADE_AT_ONCE
        for version in range(first_round, first_round + min(period, MADE_AT_ONCE)):
            self._group(channel.whom(version).block(self._rank) or ())
        self._group(tuple(range(nodes.count)))

    def _group(self, ranks: tuple[int, ...]) -> Group | None:
        if len(ranks) < 2:
            return None
        if ranks not in self._groups:
            name, leaders = "block-" + "-".join(map(str, ranks)), tuple(self._nodes.leader(r) for r in ranks)
            self._groups[ranks] = Group(name, leaders, self._board, self._waiter)
        return self._groups[ranks]

    def total(self, given: RoundBuffer, ranks: tuple[int, ...], version: int) -> None:
        """The sum of what the members give, and of their records, in place."""
        group = self._group(ranks)
        if group is not None:
            self.wire_bytes += all_reduce_bytes(len(ranks), given.nbytes) // len(ranks)
            self._waiter.wait([group.all_reduce(t) for t in given.whole], f"round {version}")

    def coded_total(
        self, given: RoundBuffer, ranks: tuple[int, ...], version: int, codec: Codec, key: tuple[int, int, int]
    ) -> None:
        """The same of coded vectors. Who gives nothing adds nothing, whatever its codec makes of zeros."""
        message = encode(given, codec, key)
        gathered, record = [torch.empty_like(message) for _ in ranks], torch.from_numpy(given.record)
        group = self._group(ranks)
        assert group is not None, "what goes to nobody is not coded"
        self.wire_bytes += all_gather_bytes(len(ranks), message.numel()) // len(ranks)
        self._waiter.wait([group.all_reduce(record), group.all_gather(gathered, message)], f"round {version}")
        given.zero_()
        for r, theirs in zip(ranks, gathered, strict=True):
            if given.record[r]:
                given.add_(decode(theirs, given, codec))

    def give_up(self) -> None:
        """End a wait under way."""
        self._waiter.give_up()

    def groups(self) -> list[Group]:
        return list(self._groups.values())
