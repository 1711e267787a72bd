"""How a rank comes to its place at a channel, or among shared weights: all of them open it together, once.

Which place it is follows from what all know alike: how many workers there are, and which ranks make one (a node, an
island).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from offbeat.live.carriers.exchanges import Transport
from offbeat.live.carriers.island import Island
from offbeat.live.host import protocol as say
from offbeat.live.host.channel_server import settings_of
from offbeat.live.host.host_sums import told
from offbeat.live.memory.arena import Shard
from offbeat.live.partial.alone import Alone, OwnWeights
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.worker.board import Board
from offbeat.live.worker.channel_client import ChannelClient, Rank, Twin
from offbeat.live.worker.slots import slots_for
from offbeat.live.worker.weights_client import WeightsClient
from offbeat.method.effects import Channel, Open, Share
from offbeat.method.replica import Replica
from offbeat.rounds.seat import Event
from offbeat.rounds.waiting import AtLeast, First, Majority, Wait
from offbeat.runs.trace import Trace
from offbeat.tensors.vector import Vec, wide
from offbeat.topology.hierarchy import Nodes

MOST_ROUNDS = 4096  # of a schedule that is told as a whole, since it begins again


@dataclass(frozen=True)
class OwnPlace:
    """Which rank this one is at a channel.

    ``members``: those who come there, as the script calls them, those of a worker one after the other; ``homes``: the
    names of their hosts, if there are several. ``at``: this one's number among them; ``number`` among the ``of`` that
    are its worker. ``kinds``: what a slot holds; ``shard``: what of it is this rank's; ``shards``: how many parts of it
    are each rank's. ``gpus``: where slots lie, if not on the host.
    """

    run: str
    name: str
    members: Sequence[int]
    homes: Sequence[str]
    at: int
    number: int
    of: int
    kinds: Sequence[tuple[torch.dtype, int]]
    gpus: Sequence[str]
    shard: Shard | None = None
    shards: Sequence[int] = ()
    parameters: int = 0
    membership: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.run}/{self.name}"

    @property
    def writes(self) -> bool:
        """Whether it brings something; the ranks of a node have made the same, and the first brings it."""
        return self.shard is not None or not self.number

    def plan(self) -> dict[str, Any]:
        """What the server must know."""
        return {
            "run": self.run,
            "size": len(self.members),
            "members": list(self.members),
            "homes": list(self.homes),
            "of": self.of,
            "shards": list(self.shards),
            "kinds": _named(self.kinds),
            "notes": self.parameters * (self.of if self.shard is not None else 1),
            "gpus": list(self.gpus),
            **self.membership,
        }


class Opening:
    """How this rank comes to its places."""

    def __init__(
        self,
        board: Board,
        transport: Transport,
        patience_s: float,
        log: list[Event] | None,
        island: Island | None,
        trace: Trace,
        twin: Twin | None = None,
    ) -> None:
        self._twin = twin
        self._board, self._transport, self._patience_s = board, transport, patience_s
        self._log, self._island, self._trace = log, island, trace

    def channel(self, effect: Open, me: Replica, first_round: int) -> ChannelClient | Alone:
        """This rank's place at a channel."""
        channel, x = effect.channel, effect.x
        if self._island is not None and channel.per_node != 1:
            raise ValueError(
                f"per_node is {channel.per_node}, but the model is sharded, and its island is one worker already; "
                "leave per_node out"
            )
        if self._board.min_workers and channel.per_node != 1:
            raise ValueError(
                f"min_workers={self._board.min_workers} was asked for, but going on without the dead is not built for "
                f"nodes of {channel.per_node} ranks; leave it or per_node out, or under offbeat launch say "
                f"--min-workers {me.size}"
            )
        nodes, like = Nodes(me.size, channel.per_node), channel.looks(me.x)
        if nodes.count == 1:  # all its ranks have made the same, and come to the same by themselves
            trace, log = (self._trace, self._log) if nodes.leads(me.rank) else (Trace(keep_spans=False), None)
            return Alone(channel, x, nodes, trace, me.seed, me.t, first_round, log)
        parameters = 0 if channel.rules.of_weights or channel.like is not None else me.parameters
        return self._at_host_process(channel, x, me, nodes, like, parameters, first_round)

    def _at_host_process(
        self, channel: Channel, x: Vec | None, me: Replica, nodes: Nodes, like: Vec, parameters: int, first: int
    ) -> ChannelClient:
        """The host process keeps the seats of its host's workers."""
        own = self._own_place(channel.name, nodes, like, parameters)
        twin = self._twin if channel.rules.spares and own.of == 1 else None  # else one rank's alone would do
        line = self._transport.line
        assert line is not None
        word = line.join(own.key)
        slots = slots_for(line, like, own.kinds, parameters, bool(own.gpus), word, own.shard)
        log = None if own.number else self._log
        passed_bytes = (own.of - 1) * sum(n * dtype.itemsize for dtype, n in own.kinds) if own.shard is None else 0
        client = ChannelClient(
            own.key,
            line,
            word,
            slots,
            channel,
            nodes,
            self._board,
            self._trace,
            like.nbytes,
            first,
            self._patience_s,
            log,
            twin,
            Rank(own.number, own.of, own.writes, passed_bytes if own.number == 0 else 0),
        )
        plan = {**own.plan(), **_plan_of(channel, nodes, me.seed, first)}
        client.begin(say.OpenChannel(own.key, own.at, plan, me.t, log is not None, twin is not None, word), x)
        return client

    def _own_place(self, name: str, nodes: Nodes, like: Vec, parameters: int) -> OwnPlace:
        """Which rank this one is at a channel of that name, or at shared weights."""
        kinds, gpus, board, island = _kinds(like), self._transport.gpus_of_slots(like.parts), self._board, self._island
        if island is None or island.size == 1:
            number, members = board.rank % nodes.per_node, board.members
            own = OwnPlace(board.name, name, members, board.homes, board.rank, number, nodes.per_node, kinds, gpus)
        else:
            run = f"{island.world}/shard-0{board.name.removeprefix(island.between.name)}"
            said = [json.loads(text) for text in island.told(f"{run}/{name}", json.dumps([_named(kinds), gpus]))]
            each = [[(getattr(torch, dtype), int(n)) for dtype, n in one] for one, _ in said]
            before = sum(map(len, each[: island.shard]))
            shard = Shard(before, before + len(kinds), island.shard, island.size)
            gpus = gpus if all(one == list(gpus) for _, one in said) and not island.homes else ()
            whole, at = [kind for one in each for kind in one], island.number * island.size + island.shard
            members = tuple(rank for ranks in island.islands for rank in ranks)
            homes = [island.homes[rank] for rank in members] if island.homes else []
            shards = [len(one) for one in each]
            own = OwnPlace(run, name, members, homes, at, island.shard, island.size, whole, gpus, shard, shards)
        self._transport.carriers.update({"ipc" if own.gpus else "shm", *(("tcp",) if own.homes else ())})
        return replace(own, parameters=parameters, membership=board.membership(range(len(own.members))))

    def weights(self, effect: Share, me: Replica) -> WeightsClient | OwnWeights:
        """Weights that others may average with."""
        if me.size == 1:
            return OwnWeights(effect.x, self._log)
        own, line = self._own_place("weights", Nodes(me.size), effect.x, 0), self._transport.line
        assert line is not None
        word = line.join(own.key)
        slots = slots_for(line, effect.x, own.kinds, 0, bool(own.gpus), word, own.shard)
        log = None if own.number else self._log
        client = WeightsClient(
            own.key, line, word, slots, self._board, self._trace, effect.x.nbytes, self._patience_s, log
        )
        plan = {**own.plan(), "what": "weights"}
        client.begin(say.OpenChannel(own.key, own.at, plan, me.t, log is not None, False, word), effect.x)
        return client


def _named(kinds: Sequence[tuple[torch.dtype, int]]) -> list[tuple[str, int]]:
    return [(str(dtype).removeprefix("torch."), n) for dtype, n in kinds]


def _kinds(like: Vec) -> list[tuple[torch.dtype, int]]:
    return [(wide(p.dtype), p.numel()) for p in like.parts]


def _plan_of(channel: Channel, nodes: Nodes, seed: int, first_round: int) -> dict[str, Any]:
    """How the rounds of a channel go, in plain values."""
    period: int | None = getattr(channel.whom, "period", None)
    period = None if period is None or period > MOST_ROUNDS else period
    workers, rounds = range(nodes.count), [channel.whom(version) for version in range(period or 0)]
    return {
        "what": "channel",
        "rules": [_said(channel.rules.wait), *settings_of(channel.rules)],
        "nodes": [nodes.size, nodes.per_node],
        "seed": seed,
        "first_round": first_round,
        "period": period,
        "codec": told(channel.codec),
        "rounds": [[None if (b := one.block(w)) is None else list(b) for w in workers] for one in rounds],
    }


def _said(wait: Wait) -> Any:
    """A rule as it is told to the host process: by its name, or where it can be imported from."""
    if type(wait) is AtLeast:
        return wait.quorum
    if type(wait) in (First, Majority):
        return wait.name
    kind = type(wait)
    settings = {one.name: getattr(wait, one.name) for one in fields(wait)} if is_dataclass(wait) else vars(wait)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise OffbeatError(
            f"the host process decides when a round starts, and cannot import {kind.__qualname__} from "
            f"{kind.__module__}; put the class into a module of its own"
        )
    return {"module": kind.__module__, "name": kind.__qualname__, "settings": settings}
