"""Partial rounds between nodes, in virtual time: a node has one seat, and its ranks hear together."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import simpy

from offbeat.method.effects import Channel, Got
from offbeat.method.replica import Replica
from offbeat.sim.clock import ChannelOfAll
from offbeat.sim.network import Network
from offbeat.tensors.vector import Vec
from offbeat.tensors.wire import message_bytes


class NodesPartial:
    """A channel as the ranks of all nodes see it. The n-th answer of a node's seat is that of all its ranks."""

    def __init__(self, leaders: ChannelOfAll, network: Network, env: simpy.Environment) -> None:
        self._leaders, self._nodes, self._network, self._env = leaders, leaders.nodes, network, env
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._heard: dict[int, deque[list[Got] | Got | bool | None]] = defaultdict(deque)
        self._told_bytes = 0

    @property
    def bytes_sent(self) -> int:
        return self._leaders.bytes_sent + self._told_bytes

    @property
    def parts(self) -> list[object]:
        return [*self._leaders.parts, self]

    @property
    def lost(self) -> list[tuple[int, int]]:
        return self._leaders.lost

    def open(self, me: Replica, channel: Channel, x: Vec | None) -> None:
        if self._nodes.leads(me.rank):
            self._leaders.open(me, channel, x)

    def offer(self, rank: int, x: Vec, step: int, answer: Callable[[list[Got]], None]) -> None:
        if self._nodes.leads(rank):
            node = self._nodes.of(rank)
            self._leaders.offer(node, x, step, lambda got: self._tell(node, got, x))
        self._hear(rank, answer)

    def through(self, rank: int, step: int, answer: Callable[[bool], None]) -> None:
        if self._nodes.leads(rank):
            node = self._nodes.of(rank)
            self._leaders.through(node, step, lambda found: self._tell(node, found, None))
        self._hear(rank, answer)

    def rest(self, rank: int, x: Vec | None, answer: Callable[[Got | None], None]) -> None:
        if self._nodes.leads(rank):
            node = self._nodes.of(rank)
            self._leaders.rest(node, x, lambda got: self._tell(node, got, got.value if got else None))
        self._hear(rank, answer)

    def finished(self, rank: int) -> None:
        if self._nodes.leads(rank):
            self._leaders.finished(self._nodes.of(rank))

    def who_waits(self) -> dict[int, str]:
        """For each waiting worker, what it waits for."""
        followers = {r: f"for what rank {self._leader(r)} hears" for r in self._waiting if r != self._leader(r)}
        return {**followers, **self._leaders.who_waits()}

    def _leader(self, rank: int) -> int:
        return self._nodes.leader(self._nodes.of(rank))

    def _tell(self, node: int, heard: list[Got] | Got | bool | None, like: Vec | None) -> None:
        """All of the node go on when the last of them has heard."""
        results = len(heard) if isinstance(heard, list) else heard is not None
        nbytes = results * message_bytes(like, None) if like is not None else 0
        ranks = self._nodes.ranks(node)
        self._told_bytes += (len(ranks) - 1) * nbytes

        def arrive(_: object) -> None:
            for rank in ranks:
                self._heard[rank].append(heard)
            for rank in ranks:
                self._hear(rank, self._waiting.pop(rank, None))

        self._env.timeout(self._network.broadcast_s(ranks, nbytes)).callbacks.append(arrive)

    def _hear(self, rank: int, answer: Callable[[Any], None] | None) -> None:
        if answer is None:
            return
        if self._heard[rank]:
            answer(self._heard[rank].popleft())
        else:
            self._waiting[rank] = answer
