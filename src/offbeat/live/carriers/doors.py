"""Handing memory from process to process: descriptors over a Unix socket, so that no file has a name.

A socket in the abstract namespace belongs to a network namespace and vanishes with its process: nothing is left behind,
and containers that share neither do not meet by mistake. Only processes of the same user are let in.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence

from offbeat.live.transport.board import Board
from offbeat.live.transport.waiter import Waiter

SAID = "shared"  # under which name a rank publishes that it has shared its memory, or why it could not
DONE = "here"
FOLLOWS = "another rank could not share its own"
MEET_S = 20.0  # once all have said that they are there
STRANGER_S = 1.0  # for one that has come to say who it is
SLICE_S = 0.1
_HEAD = struct.Struct("<16sI")
_USER = struct.Struct("3i")
_MOST = 200  # descriptors in one message; the kernel takes 253


def exchange(name: str, ranks: tuple[int, ...], mine: int, board: Board, waiter: Waiter) -> dict[int, int]:
    """Everybody's descriptor for everybody's: rank → a descriptor of this process, one's own included."""
    look = _patience(board, [f"{SAID}/{name}/{rank}" for rank in ranks])
    if board.rank != ranks[0]:
        waiter.until(lambda: board.published(f"door/{name}") is not None, f"rank {ranks[0]} to open its door")
        return _visit(bytes.fromhex(board.published(f"door/{name}") or ""), ranks, mine, board.rank, look)
    return _receive(name, ranks, mine, board, look)


def _patience(board: Board, said: Sequence[str]) -> Callable[[], None]:
    end_s = time.monotonic() + MEET_S

    def look() -> None:
        board.check("the meeting of a host's ranks")
        if any(board.published(fact) not in (None, DONE) for fact in said):
            raise OSError(FOLLOWS)
        if time.monotonic() > end_s:
            raise OSError(f"a rank did not come to the door within {MEET_S:.0f} s")

    return look


def _receive(name: str, ranks: tuple[int, ...], mine: int, board: Board, look: Callable[[], None]) -> dict[int, int]:
    """The first rank opens a door, collects what all bring, and gives all of it to each."""
    token = secrets.token_bytes(16)
    held, guests = {board.rank: os.dup(mine)}, list[socket.socket]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(_name(token))
        door.listen(len(ranks))
        door.settimeout(SLICE_S)
        board.publish(f"door/{name}", token.hex())
        try:
            while len(held) < len(ranks):
                look()
                try:
                    guest, _ = door.accept()
                except TimeoutError:
                    continue
                guests.append(guest)
                rank, brought = _let_in(guest, token)
                if rank in ranks and rank not in held and len(brought) == 1:
                    held[rank] = brought[0]
                else:
                    guests.pop().close()
                    _close(brought)
            for guest in guests:
                for some in _shares([held[r] for r in ranks]):
                    socket.send_fds(guest, [b"+"], some)
        except BaseException:
            _close(held.values())
            raise
        finally:
            for guest in guests:
                guest.close()
    return held


def _let_in(guest: socket.socket, token: bytes) -> tuple[int, list[int]]:
    """Who it is and what it brings; −1: a stranger, who delays nobody for long. A rank of another user is refused."""
    guest.settimeout(STRANGER_S)
    try:
        said, brought, _, _ = socket.recv_fds(guest, _HEAD.size, 1)
    except OSError:
        return -1, []
    told, rank = _HEAD.unpack(said.ljust(_HEAD.size, b"\0"))
    if not hmac.compare_digest(told, token):
        return -1, list(brought)
    _, user, _ = _USER.unpack(guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))
    if user != os.getuid():
        _close(brought)
        raise OSError(f"rank {rank} runs as user {user}, this one as user {os.getuid()}")
    return rank, list(brought)


def _visit(token: bytes, ranks: tuple[int, ...], mine: int, rank: int, look: Callable[[], None]) -> dict[int, int]:
    found: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
        guest.connect(_name(token))
        socket.send_fds(guest, [_HEAD.pack(token, rank)], [mine])
        guest.settimeout(SLICE_S)
        try:
            while len(found) < len(ranks):
                look()
                try:
                    said, some, _, _ = socket.recv_fds(guest, 1, _MOST)
                except TimeoutError:
                    continue
                found += some
                if not said or not some:
                    raise OSError(f"rank {ranks[0]} closed its door, or this process may open no more descriptors")
        except BaseException:
            _close(found)
            raise
    return dict(zip(ranks, found, strict=True))


def _name(token: bytes) -> bytes:
    # Not the token itself: names of such sockets can be read by everybody on the machine.
    return b"\0offbeat-door-" + hashlib.sha256(b"name" + token).hexdigest()[:32].encode()


def _shares(held: list[int]) -> list[list[int]]:
    return [held[k : k + _MOST] for k in range(0, len(held), _MOST)]


def _close(held: Iterable[int]) -> None:
    for one in held:
        os.close(one)
