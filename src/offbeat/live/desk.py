"""A worker's place at a channel: opened once, by all ranks, and closed when all have finished."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import socket
import time
from collections.abc import Callable

import torch.distributed as dist

from offbeat.effects import Channel, Got, Open
from offbeat.live.board import START_S, Board
from offbeat.live.clerk import Clerk
from offbeat.live.errors import OffbeatError, PeerFailed
from offbeat.live.hub import Hub, connect
from offbeat.live.parties import Parties
from offbeat.live.waiting import Waiter
from offbeat.replica import Replica
from offbeat.rounds import Referee
from offbeat.trace import Trace
from offbeat.vector import Vec


class Desk:
    """The clerk of this process, and at rank 0 the hub; nothing of either until a strategy opens a channel."""

    def __init__(self, board: Board, patience_s: float, meanwhile: Callable[[], None]) -> None:
        self._board, self._patience_s, self._meanwhile = board, patience_s, meanwhile
        self._channel: Channel | None = None
        self._clerk: Clerk | None = None
        self._hub: Hub | None = None
        self._parties: Parties | None = None
        self.trace = Trace(keep_spans=False)

    @property
    def is_open(self) -> bool:
        return self._clerk is not None

    @property
    def clerk(self) -> Clerk:
        if self._clerk is None:
            raise OffbeatError("the strategy uses a channel that it has not opened; await Open(channel, …) first")
        return self._clerk

    @property
    def waited_s(self) -> float:
        return self._clerk.waited_s if self._clerk else 0.0

    @property
    def wire_bytes(self) -> int:
        return self._parties.wire_bytes if self._parties else 0

    def open(self, effect: Open, me: Replica) -> None:
        """Every rank comes here at its first step; rank 0 starts the hub and tells the others where it is."""
        if self._clerk is not None:
            raise OffbeatError(f"channel {effect.channel.name!r} cannot be opened: a strategy has one channel")
        channel, board = effect.channel, self._board
        if board.rank == 0:
            token = secrets.token_bytes(16)
            self._hub = Hub(Referee(channel.rules, me.size, me.seed), address := _address(), token)
            board.publish("hub", json.dumps([address, self._hub.port, token.hex()]))
        address, port, token_hex = json.loads(self._wait_for_hub())
        connection = connect(address, port, bytes.fromhex(token_hex), board.rank)
        self._channel = channel
        self._parties = Parties(channel, board.rank, board.size, Waiter(board, self._patience_s))
        self._clerk = Clerk(
            channel, effect.x, me.x, connection, self._parties, board, self.trace, me.seed, self._patience_s
        )

    def _wait_for_hub(self) -> str:
        start = time.monotonic()
        while (text := self._board.published("hub")) is None:
            self._board.check()
            if time.monotonic() - start > START_S:
                raise PeerFailed(f"rank 0 has not taken its first step within {START_S:.0f} s")
            time.sleep(0.002)
        return text

    def rest(self, x: Vec | None) -> Got | None:
        return self.clerk.rest(x, self._meanwhile)

    def align(self, agree_on_largest: Callable[[int], int]) -> None:
        """Apply every result that any rank has, so that all have applied the same ones. All ranks stand still here."""
        if self._clerk is not None and self._channel is not None:
            results = agree_on_largest(self._clerk.results)
            self._channel.apply(self._clerk.catch_up(results))

    def owed(self) -> Vec | None:
        if self._clerk is None or self._channel is None or self._channel.rules.absent == "last":
            return None
        return self._clerk.owed()

    def close(self) -> None:
        """All ranks are through: end the threads, give the groups back."""
        if self._clerk is None or self._parties is None:
            return
        self._clerk.close()
        if self._hub is not None:
            self._hub.join(self._patience_s)
        for group in self._parties.groups():
            dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Leave without waiting for anybody; the groups are never destroyed (see ``Transport.park``)."""
        if self._clerk is not None and self._parties is not None:
            self._clerk.abandon()
            for group in self._parties.groups():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _address() -> str:
    """Where rank 0 can be reached: at the address torch.distributed met at, if that is this machine's."""
    for host in (os.environ.get("MASTER_ADDR", "127.0.0.1"), socket.gethostname()):
        try:
            address = socket.gethostbyname(host)
            socket.create_server((address, 0)).close()
        except OSError:
            continue
        return address
    return "127.0.0.1"
