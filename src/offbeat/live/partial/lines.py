"""This process's lines to the hub of a channel, of shared weights or of the bell; and at rank 0 the hub itself."""

from __future__ import annotations

import secrets
import socket
import sys
import warnings
from collections.abc import Callable

from offbeat.live.partial.apart import HubApart, Plan
from offbeat.live.transport.board import Board
from offbeat.live.transport.hub import Entrance, Handler, Hub, connect, own_address
from offbeat.live.transport.waiter import Waiter
from offbeat.topology.hierarchy import Nodes

# Where there is no plan, threads answer for workers. They need the interpreter a few times a round, from a worker that
# may be deep in Python code: every time they would wait for the default of 5 ms.
SWITCH_S = 0.0005


class Lines:
    """Nothing until somebody meets at the hub."""

    def __init__(self, board: Board, waiter: Waiter) -> None:
        self._board, self._waiter = board, waiter
        self.hub: Hub | HubApart | None = None
        self._lines: list[socket.socket] = []  # their owners close them; without one, as where groups fail, we do
        self._switch_s: float | None = None

    def meet(self, handler: Callable[[], Handler], nodes: Nodes, lines: int, plan: Plan | None) -> list[socket.socket]:
        """So many lines of this worker to the hub, which rank 0 starts, telling the others where it is.

        With a ``plan`` the hub is a process of its own, which no worker's interpreter holds up.
        """
        if self._board.rank == 0:
            entrance, size = Entrance(own_address(), secrets.token_bytes(16)), lines * nodes.count
            self.hub = _apart(plan, size, entrance) or Hub(handler(), size, entrance)
            self._board.publish("hub", entrance.told)
        self._waiter.until(lambda: self._board.published("hub") is not None, "rank 0 to take its first step")
        told, rank = self._board.published("hub") or "", nodes.of(self._board.rank)
        try:
            for line in range(lines):
                self._lines.append(connect(told, line * nodes.count + rank))
        except OSError as error:
            raise self._board.lost("the way to rank 0") from error
        if plan is None:
            self._switch_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_S, self._switch_s))
        return self._lines

    def close(self, patience_s: float) -> None:
        """All ranks are through, and those who had a line have closed it."""
        self._let_go_of_interpreter()
        if self.hub is not None:
            self.hub.join(patience_s)

    def abandon(self) -> None:
        """Leave without waiting for anybody."""
        self._let_go_of_interpreter()
        for line in self._lines:
            line.close()
        if self.hub is not None:
            self.hub.abandon()

    def release(self) -> None:
        """The run is over."""
        self.hub, self._lines = None, []

    def _let_go_of_interpreter(self) -> None:
        if self._switch_s is not None:
            sys.setswitchinterval(self._switch_s)
            self._switch_s = None


def _apart(plan: Plan | None, size: int, entrance: Entrance) -> HubApart | None:
    if plan is None or not sys.executable:
        return None
    try:
        return HubApart(plan, size, entrance)
    except OSError as error:
        warnings.warn(f"no process could be started for the hub ({error}): it shares rank 0's", stacklevel=2)
        return None
