"""How a rank comes to its place at a channel, or among shared weights: all of them open it together, once.

Which place it is follows from what all know alike: how many workers there are, which ranks make one (a node, an
island), whether they share memory, whether messages are coded.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from offbeat.live.carriers.exchanges import Transport
from offbeat.live.carriers.shelves import Shelves
from offbeat.live.partial.alone import Alone
from offbeat.live.partial.apart import plan_of_channel
from offbeat.live.partial.blocks import BlockSums
from offbeat.live.partial.clerk import Clerk
from offbeat.live.partial.coordinator import Coordinator
from offbeat.live.partial.desk import Desk
from offbeat.live.partial.following import FollowingClerk, FollowingWeights
from offbeat.live.partial.leaders import Follower, Inside, Leader
from offbeat.live.partial.lines import Lines
from offbeat.live.partial.meetings import Meetings
from offbeat.live.partial.pairs import SharedWeights, Visits
from offbeat.live.partial.stacks import Slots
from offbeat.live.partial.summing import DEVICE_BYTES_S, GRACE_S, SLOW_BYTES_S
from offbeat.live.partial.taker import Taker, Twin
from offbeat.live.partial.telling import Telling, ToTheOthers
from offbeat.live.partial.visitor import Visitor
from offbeat.live.transport.board import Board
from offbeat.live.transport.hub import Handler
from offbeat.live.transport.island import Island
from offbeat.live.transport.waiter import Waiter
from offbeat.method.effects import Channel, Open, Share
from offbeat.method.replica import Replica
from offbeat.rounds.referee import Referee
from offbeat.rounds.seat import Event
from offbeat.runs.trace import Trace
from offbeat.tensors.vector import Vec
from offbeat.topology.hierarchy import Nodes

LONG_BYTES = 1 << 24  # of a vector: from here on memory counts more than a question to the hub
SMALL = 1 << 16  # numbers: so few that each worker adds them up itself, instead of waiting for another's part

AtChannel = Clerk | Taker | Alone | Leader | Follower


class Opening:
    """A process's lines to the hub, and inside its island. Rank 0 starts the hub and tells the others where it is.

    ``section``: of the boards, for a channel beside another.
    """

    def __init__(
        self,
        board: Board,
        transport: Transport,
        patience_s: float,
        log: list[Event] | None,
        island: Island | None,
        trace: Trace,
        twin: Twin | None = None,
        section: str = "",
    ) -> None:
        self._twin = twin
        self._board, self._transport, self._patience_s = board, transport, patience_s
        self._log, self._island, self._trace = log, island, trace
        self.lines = Lines(board, transport.waiter)
        inside = None if island is None else island.inside.section(section) if section else island.inside
        self._inside = None if island is None or inside is None else Lines(inside, island.waiter)

    def channel(self, effect: Open, me: Replica, first_round: int) -> tuple[AtChannel, BlockSums | None]:
        """This rank's place at a channel, and, where vectors go from clerk to clerk, what takes them there."""
        channel, x = effect.channel, effect.x
        if self._island is not None and channel.per_node != 1:
            raise ValueError(
                f"per_node is {channel.per_node}, but the model is sharded, and its island is one worker already; "
                "leave per_node out"
            )
        nodes, like = Nodes(me.size, channel.per_node), channel.looks(me.x)
        parameters = 0 if channel.rules.of_weights or channel.like is not None else me.parameters
        # The node's group is made first: once a clerk's thread is there, two threads could make groups at once.
        inside = Inside(nodes, channel, like, parameters, self._transport) if nodes.per_node > 1 else None
        if inside is not None and not nodes.leads(me.rank):
            return Follower(inside, self._board, first_round, self._patience_s), None
        if nodes.count == 1:
            alone = Alone(channel, x, nodes, self._trace, me.seed, me.t, first_round, self._log)
            return Leader(alone, inside) if inside is not None else alone, None
        leaders = tuple(nodes.leader(n) for n in range(nodes.count))
        shelves = None
        if channel.codec is None and self._island is None:
            shelves = self._transport.shelves(f"rounds/{channel.name}", leaders, like, parameters)
        if shelves is not None:
            taker = self._take_seat(channel, x, me, nodes, shelves, first_round)
            return Leader(taker, inside) if inside is not None else taker, None
        referee = Referee(channel.rules, nodes.count, me.seed, first_round)
        connection, telling = self._meet_as_island(lambda: Coordinator(referee), nodes)
        waiter = Waiter(self._board, self._patience_s)
        sums = BlockSums(channel, nodes, self._board, waiter, first_round, self._transport.homes)
        clerk = (Clerk if self._leads else FollowingClerk)(
            channel,
            x,
            like,
            parameters,
            connection,
            sums,
            nodes,
            self._board,
            self._trace,
            me.seed,
            me.t,
            first_round,
            self._patience_s,
            self._log,
            telling,
            None if self._island is None else self._island.worker_of,
        )
        return Leader(clerk, inside) if inside is not None else clerk, sums

    @property
    def _leads(self) -> bool:
        return self._island is None or self._island.leads

    def _meet_as_island(self, handler: Callable[[], Handler], nodes: Nodes) -> tuple[socket.socket, Telling | None]:
        """This rank's line to the hub, where its leader says what to do; the leader has one to the others' leaders."""
        if self._island is None or self._inside is None or self._island.inside.size == 1:
            return self.lines.meet(handler, nodes, 1, None)[0], None
        board = self._island.inside
        (inside,) = self._inside.meet(lambda: ToTheOthers(board.size), Nodes(board.size), 1, None)
        if not self._island.leads:
            return inside, None
        telling = Telling(inside, board, self._patience_s, self._log)
        return self.lines.meet(handler, nodes, 1, None)[0], telling

    def _take_seat(
        self, channel: Channel, x: Vec | None, me: Replica, nodes: Nodes, shelves: Shelves, first_round: int
    ) -> Taker:
        """Where vectors lie in memory that all can read, the seats are kept at the hub."""
        like = channel.looks(me.x)
        # Of a gradient that is dropped its worker hears later: until then it would count a slot as its own that
        # another writes to.
        pooled = like.nbytes >= LONG_BYTES and channel.rules.absent in ("carry", "last", "shared")
        rate = DEVICE_BYTES_S if shelves.on_device else SLOW_BYTES_S
        slots = {**self._slots(nodes.count, like, shelves), "pooled": pooled, "grace_s": GRACE_S + like.nbytes / rate}
        plan = plan_of_channel(channel, nodes.count, nodes.per_node, me.seed, first_round)
        line, questions = self.lines.meet(
            lambda: Desk(channel.rules, channel.whom, nodes, me.seed, first_round, Slots(**slots)),
            nodes,
            2,
            None if plan is None else {**plan, "slots": slots},
        )
        return Taker(
            channel,
            x,
            shelves,
            (line, questions),
            nodes,
            self._board,
            self._trace,
            like.nbytes,
            me.t,
            first_round,
            self._patience_s,
            self._log,
            # In a node the leader's alone would be taken over.
            self._twin if channel.rules.spares and nodes.per_node == 1 else None,
            pooled,
        )

    def _slots(self, size: int, x: Vec, shelves: Shelves) -> dict[str, Any]:
        on_device = shelves.on_device
        return {"size": size, "slots": shelves.slots, "small": x.numel <= SMALL, "shares": not on_device}

    def weights(self, effect: Share, me: Replica) -> SharedWeights | Visitor:
        """Weights that others may average with; the hub only passes visits on."""
        everyone = Nodes(me.size)
        shelves = None
        if self._island is None:
            shelves = self._transport.shelves("pairs", tuple(range(me.size)), effect.x, 0)
        if shelves is not None:
            slots = self._slots(me.size, effect.x, shelves)
            plan = {"what": "meetings", "size": me.size, "slots": slots}
            (line,) = self.lines.meet(lambda: Meetings(me.size, Slots(**slots)), everyone, 1, plan)
            return Visitor(effect.x, shelves, line, self._board, self._trace, self._patience_s, self._log)
        connection, telling = self._meet_as_island(lambda: Visits(me.size), everyone)
        return (SharedWeights if self._leads else FollowingWeights)(
            effect.x,
            effect.peers,
            connection,
            self._board,
            self._transport.homes,
            self._trace,
            self._patience_s,
            self._log,
            telling,
        )

    def close(self) -> None:
        """All ranks are through, and those who had a line have closed it."""
        for lines in self._all_lines:
            lines.close(self._patience_s)

    def abandon(self) -> None:
        """Leave without waiting for anybody."""
        for lines in self._all_lines:
            lines.abandon()

    def release(self) -> None:
        """The run is over."""
        for lines in self._all_lines:
            lines.release()

    @property
    def _all_lines(self) -> list[Lines]:
        return [self.lines] if self._inside is None else [self.lines, self._inside]
