"""Sums among the members of a block, for the clerks: groups of the channel's own.

The groups of the first rounds are made when the channel is opened, in the order of the rounds, so that no two workers
wait for each other; the rest when they are first needed. "Ranks" are those of nodes, for which their leaders meet.
"""

from __future__ import annotations

import itertools
import math

import torch

from offbeat.live.carriers.phases import TwoPhases
from offbeat.live.partial.buffers import RoundBuffer
from offbeat.live.transport.board import Board
from offbeat.live.transport.group import Group
from offbeat.live.transport.waiter import Waiter
from offbeat.method.effects import Channel
from offbeat.tensors.codec import Codec
from offbeat.tensors.stretches import CodedShare, Stretches
from offbeat.tensors.vector import Vec
from offbeat.tensors.wire import all_reduce_bytes
from offbeat.topology.hierarchy import Nodes

MADE_AT_ONCE = 16


class BlockSums:
    """Every block this rank sums in."""

    def __init__(self, channel: Channel, nodes: Nodes, board: Board, waiter: Waiter, first_round: int) -> None:
        self._rank, self._nodes, self._board, self._waiter = nodes.of(board.rank), nodes, board, waiter
        self._groups: dict[tuple[int, ...], Group] = {}
        self.wire_bytes = 0
        if channel.rules.pool is not None:
            self._make_pools(channel.rules.pool, nodes.count)
            return
        period = getattr(channel.whom, "period", 1) or MADE_AT_ONCE
        for version in range(first_round, first_round + min(period, MADE_AT_ONCE)):
            self._group(channel.whom(version).block(self._rank) or ())
        self._group(tuple(range(nodes.count)))

    def _make_pools(self, group: int, size: int) -> None:
        """Anybody may meet anybody: all the groups I may be in, if they are few, in an order that all follow."""
        group = min(group, size)
        if math.comb(size - 1, group - 1) <= MADE_AT_ONCE:
            for ranks in itertools.combinations(range(size), group):
                if self._rank in ranks:
                    self._group(ranks)

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
        self,
        given: RoundBuffer,
        own: RoundBuffer | None,
        ranks: tuple[int, ...],
        version: int,
        codec: Codec,
        key: tuple[int, int, int],
        lost: Vec | None,
        of_weights: bool,
    ) -> None:
        """The same of coded vectors, of which mine is ``own``. Of gradients who gives nothing adds nothing, whatever
        its codec makes of zeros; weights are there of all, also of those with nothing new in them to record."""
        group, what, record = self._group(ranks), f"round {version}", given.record
        assert group is not None, "what goes to nobody is not coded"
        stretches = Stretches(given, codec, len(ranks))
        phases = TwoPhases(CodedShare(own, stretches, ranks.index(self._rank), key, lost), group)
        self.wire_bytes += phases.wire_bytes
        self._waiter.wait([group.all_reduce(torch.from_numpy(record)), phases.to_owners()], what)
        self._waiter.wait([phases.to_all([of_weights or bool(record[r]) for r in ranks])], what)
        phases.result(given)

    def give_up(self) -> None:
        """End a wait under way."""
        self._waiter.give_up()

    def groups(self) -> list[Group]:
        return list(self._groups.values())
