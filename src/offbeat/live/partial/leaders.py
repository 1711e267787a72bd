"""A node at a channel: its leader has the clerk, and passes every answer on to the ranks beside it.

All of it runs in the workers' own threads, on the way on which the node also averages its gradients. The leader
decides and the others follow: a message says what they are to do, and every rank of a node sends or receives the same
messages in the same order. So all of a node apply the same results after the same step, though which results are there
is a matter of time for the leader. The interleaving this prevents: one rank of a node takes two results after a step
and another one, and from then on they average gradients of different weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from offbeat.live.carriers.exchanges import Transport
from offbeat.live.carriers.passing import passing
from offbeat.live.partial.alone import Alone
from offbeat.live.partial.clerk import Apply, Clerk
from offbeat.live.worker.board import Board
from offbeat.live.worker.channel_client import ChannelClient
from offbeat.live.worker.waiter import Waiter
from offbeat.method.effects import Channel, Got
from offbeat.tensors.vector import Vec, wide
from offbeat.topology.hierarchy import Nodes


class Command(IntEnum):
    """What a leader tells its node."""

    RESULTS = 0  # here are some, or none
    STAND = 1  # the others ask for an average: take part
    COUNT = 2  # agree with all ranks on the number of rounds
    OVER = 3  # that was all
    GO_ON = 4  # what was handed in is not through: nothing is handed in now


class Inside:
    """Messages of a node's leader to the others in it."""

    def __init__(self, nodes: Nodes, channel: Channel, like: Vec, parameters: int, transport: Transport) -> None:
        self._nodes, self._parameters, node = nodes, parameters, nodes.of(transport.rank)
        self.channel, self._leader, self._others = channel, nodes.leader(node), nodes.per_node - 1
        self._waiter = transport.waiter
        self._way = passing(nodes.ranks(node), 6 + nodes.count + parameters, like, transport)
        self.wire_bytes = 0

    def tell(self, command: Command, results: Sequence[Got] = ()) -> None:
        """A message for each result, which says how many follow, and its numbers; without any, one all the same."""
        if not results:
            self._way.tell([command, *[0] * (5 + self._nodes.count + self._parameters)], None, self._waiter)
        for k, got in enumerate(results):
            said = [got.version, got.fresh, got.full, got.count, *self._ages(got), *self._used(got)]
            self._way.tell([command, len(results) - k, *said], got.value, self._waiter)
            self.wire_bytes += self._others * sum(p.numel() * wide(p.dtype).itemsize for p in got.value.parts)

    def _ages(self, got: Got) -> list[int]:
        """Of each node, 1 + how old its work in the result is; 0 if it gave nothing."""
        return [got.contributors.get(self._nodes.leader(node), -1) + 1 for node in range(self._nodes.count)]

    def _used(self, got: Got) -> Sequence[bool]:
        """The parameters that the result holds gradients for."""
        return got.value.used or [True] * self._parameters

    def hear(self, waiter: Waiter) -> tuple[Command, list[Got]]:
        """The leader's next message, with all results that it speaks of."""
        results: list[Got] = []
        while True:
            head, value = self._way.hear(waiter, f"rank {self._leader}, which leads this node")
            command, left, version, fresh, full, count, *rest = head
            if value is None:
                return Command(command), results
            ages, used = rest[: self._nodes.count], rest[self._nodes.count :]
            contributors = self._nodes.spread({node: age - 1 for node, age in enumerate(ages) if age})
            value.used = tuple(map(bool, used)) if used else None
            results.append(Got(version, value, bool(fresh), bool(full), count, contributors))
            if left == 1:
                return Command(command), results


class Leader:
    """The first rank of a node: a clerk's worker, who tells the others."""

    def __init__(self, clerk: Clerk | ChannelClient | Alone, inside: Inside) -> None:
        self._clerk, self._inside = clerk, inside

    def offer(self, x: Vec, step: int) -> list[Got]:
        results = self._clerk.offer(x, step)
        self._inside.tell(Command.RESULTS, results)
        return results

    @property
    def step_over(self) -> Callable[[], None] | None:
        """What is to be called when its worker goes back to its own loop. (What the others were told, they have.)"""
        return self._clerk.step_over if isinstance(self._clerk, ChannelClient) else None

    def through(self, step: int) -> bool:
        found = self._clerk.through(step)
        self._inside.tell(Command.RESULTS if found else Command.GO_ON)
        return found

    def rest(self, x: Vec | None, asked: Callable[[], bool], take_part: Callable[[], None]) -> Got | None:
        def take_part_together() -> None:
            self._inside.tell(Command.STAND)
            take_part()

        got = self._clerk.rest(x, asked, take_part_together)
        self._inside.tell(Command.RESULTS if got is not None else Command.OVER, [got] if got is not None else ())
        return got

    def stand(self, all_there: Callable[[], bool], agree_on_largest: Callable[[int], int], apply: Apply) -> None:
        def apply_together(results: list[Got]) -> None:
            self._inside.tell(Command.RESULTS, results)
            apply(results)

        def agree_together(number: int) -> int:
            self._inside.tell(Command.COUNT)
            return agree_on_largest(number)

        self._clerk.stand(all_there, agree_together, apply_together)
        self._inside.tell(Command.OVER)

    def finished(self, x: Vec | None) -> None:
        self._clerk.finished(x)

    def renew(self, x: Vec | None) -> None:
        self._clerk.renew(x)

    def owed(self) -> Vec | None:
        return self._clerk.owed()

    def fetch_lost(self) -> None:
        if isinstance(self._clerk, ChannelClient):
            self._clerk.fetch_lost()

    @property
    def rounds(self) -> int:
        return self._clerk.rounds

    @property
    def lost(self) -> list[int]:
        return self._clerk.lost

    @property
    def waited_s(self) -> float:
        return self._clerk.waited_s

    @property
    def wire_bytes(self) -> int:
        return self._clerk.wire_bytes + self._inside.wire_bytes

    def close(self) -> None:
        self._clerk.close()

    def release(self) -> None:
        self._clerk.release()

    def abandon(self) -> None:
        self._clerk.abandon()


class Follower:
    """Any other rank of a node: it has no clerk, and does what its leader says."""

    wire_bytes = 0
    lost: Sequence[int] = ()

    def __init__(self, inside: Inside, board: Board, first_round: int, patience_s: float) -> None:
        # The leader may rest for hours while others train.
        self._inside, self._waiter = inside, Waiter(board, patience_s, bears=True)
        self.rounds = first_round

    def _hear(self) -> tuple[Command, list[Got]]:
        command, results = self._inside.hear(self._waiter)
        self.rounds = max([self.rounds, *(got.version + 1 for got in results)])
        return command, results

    @property
    def waited_s(self) -> float:
        return self._waiter.waited_s

    def offer(self, x: Vec, step: int) -> list[Got]:
        return self._hear()[1]

    def through(self, step: int) -> bool:
        """As the leader finds it."""
        return self._hear()[0] is not Command.GO_ON

    def rest(self, x: Vec | None, asked: Callable[[], bool], take_part: Callable[[], None]) -> Got | None:
        while True:
            command, results = self._hear()
            if command is not Command.STAND:
                return results[0] if results else None
            take_part()

    def stand(self, all_there: Callable[[], bool], agree_on_largest: Callable[[int], int], apply: Apply) -> None:
        self._inside.channel.holds()  # as the leader's worker: what it gives away there, all of the node have given
        while True:
            command, results = self._hear()
            if command is Command.OVER:
                return
            if command is Command.COUNT:
                agree_on_largest(0)
            else:
                apply(results)

    def finished(self, x: Vec | None) -> None:
        """The leader says so for all."""

    def renew(self, x: Vec | None) -> None:
        """The leader's answers for all."""

    def owed(self) -> None:
        """What the node owes is the leader's to keep."""

    def close(self) -> None:
        """Nothing was opened."""

    def release(self) -> None:
        """Nothing was heard but by the worker itself."""

    def abandon(self) -> None:
        self._waiter.give_up()
