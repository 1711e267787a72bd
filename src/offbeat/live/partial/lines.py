"""This process's lines to the hub of a channel, of shared weights or of the bell; and at rank 0 the hub itself."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable

from offbeat.live.transport.hub import Entrance, Handler, Hub, connect, own_address
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter
from offbeat.topology.hierarchy import Nodes

# Threads answer for workers. They need the interpreter a few times a round, from a worker that
# may be deep in Python code: every time they would wait for the default of 5 ms.
SWITCH_S = 0.0005


class Lines:
    """Nothing until somebody meets at the hub."""

    def __init__(self, board: Board, waiter: Waiter) -> None:
        self._board, self._waiter = board, waiter
        self.hub: Hub | None = None
        self._lines: list[socket.socket] = []  # their owners close them; without one, as where groups fail, we do
        self._switch_s: float | None = None

    def meet(self, handler: Callable[[], Handler], nodes: Nodes) -> socket.socket:
        """This worker's line to the hub, which rank 0 starts, telling the others where it is."""
        if self._board.rank == 0:
            entrance = Entrance(own_address(), secrets.token_bytes(16))
            self.hub = Hub(handler(), nodes.count, entrance)
            self._board.publish("hub", entrance.told)
        self._waiter.until(lambda: self._board.published("hub") is not None, "rank 0 to take its first step")
        try:
            line = connect(self._board.published("hub") or "", nodes.of(self._board.rank))
        except OSError as error:
            raise self._board.lost("the way to rank 0") from error
        self._lines.append(line)
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_S, self._switch_s))
        return line

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
