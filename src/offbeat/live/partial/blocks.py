"""Sums among the members of a block, for the clerks: groups of the channel's own.

The groups of the first rounds are made when the channel is opened, in the order of the rounds, so that no two workers
wait for each other; the rest when they are first needed. "Ranks" are those of nodes, for which their leaders meet.
Where some of a block's leaders are on one host, and others are not, they sum there first (`carriers/across.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.live.carriers.across import Across, Coding, across
from offbeat.live.carriers.group import Group
from offbeat.live.carriers.phases import TwoPhases
from offbeat.live.partial.buffers import RoundBuffer
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter
from offbeat.method.effects import Channel
from offbeat.tensors.codec import Codec
from offbeat.tensors.stretches import CodedShare, Stretches
from offbeat.tensors.vector import Vec
from offbeat.tensors.wire import all_reduce_bytes, two_phase_bytes
from offbeat.topology.hierarchy import Nodes

MADE_AT_ONCE = 16


class BlockSums:
    """Every block this rank sums in. ``homes`` are the hosts of all ranks."""

    def __init__(
        self, channel: Channel, nodes: Nodes, board: Board, waiter: Waiter, first_round: int, homes: Sequence[str]
    ) -> None:
        self._rank, self._nodes, self._board, self._waiter = nodes.of(board.rank), nodes, board, waiter
        self._homes = homes
        # With all workers on one host clerks are there because memory is not to be shared, or because all is coded.
        self._composes = len({homes[nodes.leader(n)] for n in range(nodes.count)}) > 1
        self._ways: dict[tuple[int, ...], Group | Across] = {}
        self.wire_bytes = 0
        if channel.rules.pool is not None:
            self._make_pools(channel.rules.pool, nodes.count)
            return
        period = getattr(channel.whom, "period", 1) or MADE_AT_ONCE
        for version in range(first_round, first_round + min(period, MADE_AT_ONCE)):
            self._way(channel.whom(version).block(self._rank) or ())
        self._way(tuple(range(nodes.count)))

    def _make_pools(self, group: int, size: int) -> None:
        """Anybody may meet anybody: all the groups I may be in, if they are few, in an order that all follow."""
        group = min(group, size)
        if math.comb(size - 1, group - 1) <= MADE_AT_ONCE:
            for ranks in itertools.combinations(range(size), group):
                if self._rank in ranks:
                    self._way(ranks)

    def _way(self, ranks: tuple[int, ...]) -> Group | Across | None:
        if len(ranks) < 2:
            return None
        if ranks not in self._ways:
            leaders, composed = tuple(self._nodes.leader(r) for r in ranks), None
            if self._composes:
                on_host, name = torch.device("cpu"), self._board.numbered("blocks", leaders)
                composed = across(name, leaders, self._homes, on_host, self._board, self._waiter, self._waiter)
            self._ways[ranks] = composed or Group("blocks", leaders, self._board, self._waiter)
        return self._ways[ranks]

    def total(self, given: RoundBuffer, ranks: tuple[int, ...], version: int) -> None:
        """The sum of what the members give, and of their records, in place."""
        way, what = self._way(ranks), f"round {version}"
        if way is not None:
            self.wire_bytes += all_reduce_bytes(len(ranks), given.nbytes) // len(ranks)
        if isinstance(way, Across):
            way.total(given.whole, what)
        elif way is not None:
            self._waiter.wait([way.all_reduce(t) for t in given.whole], what)

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
        divisor: int,
    ) -> None:
        """The same of coded vectors, of which mine is ``own``, divided. Of gradients who gives nothing adds nothing,
        whatever its codec makes of zeros; weights are there of all, also of those with nothing new to record."""
        way, what, record = self._way(ranks), f"round {version}", given.record
        assert way is not None, "what goes to nobody is not coded"
        stretches = Stretches(given, codec, len(ranks))
        if isinstance(way, Across):

            def gives(records: Tensor, leaders: tuple[int, ...]) -> bool:
                return of_weights or any(records[self._nodes.of(leader)] for leader in leaders)

            coding = Coding(codec, key, None if lost is None else lost.parts, gives, divisor)
            self.wire_bytes += two_phase_bytes(stretches.lengths) // len(ranks)
            return way.coded_total(given.parts, torch.from_numpy(record), coding, what)
        phases = TwoPhases(CodedShare(own, stretches, ranks.index(self._rank), key, lost), way)
        self.wire_bytes += phases.wire_bytes
        self._waiter.wait([way.all_reduce(torch.from_numpy(record)), phases.to_owners()], what)
        self._waiter.wait([phases.to_all([of_weights or bool(record[r]) for r in ranks])], what)
        phases.result(given, divisor)

    @property
    def carriers(self) -> set[str]:
        """The ways vectors go here."""
        return set().union(*({"gloo"} if isinstance(way, Group) else way.carriers for way in self._ways.values()))

    def give_up(self) -> None:
        """End a wait under way."""
        self._waiter.give_up()

    def groups(self) -> list[Group]:
        return [g for way in self._ways.values() for g in ([way] if isinstance(way, Group) else way.groups())]

    def let_go(self, together: bool) -> None:
        """Give the memory back that hosts share; ``together``: so do the others now."""
        for way in self._ways.values():
            if isinstance(way, Across):
                way.close(together)
