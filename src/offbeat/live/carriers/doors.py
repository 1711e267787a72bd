"""Handing memory from process to process: descriptors over a Unix socket, so that no file has a name.

A socket in the abstract namespace belongs to a network namespace and vanishes with its process: nothing is left behind,
and containers that share neither do not meet by mistake. Only processes of the same user are let in.

Whoever fails says so on the board, and nobody waits for anything else without looking there. One failure makes others:
the door that a rank leaves closes on those who stand in it, who lose a connection, of which a third one hears. So each
says beside what it saw how far that is from a cause, and the nearest is the one to tell of.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from offbeat.live.transport.errors import OffbeatError
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter

SAID = "shared"  # under which name a rank publishes that it has shared its memory, or why it could not
DONE = "here"
MEET_S = 20.0  # once all have said that they are there
STRANGER_S = 1.0  # for one that has come to say who it is
SLICE_S = 0.1
_HEAD = struct.Struct("<16sI")
_USER = struct.Struct("3i")
_MOST = 200  # descriptors in one message; the kernel takes 253


class _Lost(OSError):
    """What is seen here of another rank's failure: to be told only where no rank has a cause of its own."""


class _Follows(_Lost):
    """Nothing has failed here; another rank has said that it could not."""


class Why(NamedTuple):
    """What a rank has said of its failure. ``distance``: 0 is a cause, 1 a connection lost, 2 hearsay."""

    distance: int
    words: str


def said(error: Exception) -> str:
    """An error as it is published: a line, whatever it says, since an empty one would not be heard."""
    distance = 2 if isinstance(error, _Follows) else 1 if isinstance(error, _Lost) else 0
    line = next(iter(str(error).splitlines()), "")
    return f"{distance}{line}" if isinstance(error, OSError) and line else f"{distance}{type(error).__name__}: {line}"


def failed(name: str, ranks: Iterable[int], board: Board) -> dict[int, Why]:
    """Who of these has said by now that it cannot share, and why."""
    heard = {rank: board.published(f"{SAID}/{name}/{rank}") for rank in ranks}
    return {rank: Why(int(text[0]), text[1:]) for rank, text in heard.items() if text not in (None, DONE)}


@contextmanager
def telling(name: str, board: Board) -> Iterator[None]:
    """Who fails in here says so at once, as others wait for it."""
    try:
        yield
    except OffbeatError:
        raise  # the run has failed, which all hear anyway
    except Exception as error:
        board.publish(f"{SAID}/{name}/{board.rank}", said(error))
        raise


def check(name: str, ranks: Iterable[int], board: Board) -> None:
    """Raise if one of these has said that it cannot share."""
    if failed(name, ranks, board):
        raise _Follows("another rank could not share its own")


def exchange(
    name: str, ranks: tuple[int, ...], make: Callable[[], int], board: Board, waiter: Waiter
) -> dict[int, int]:
    """A descriptor that each of them makes for everybody's: rank → a descriptor of this process, one's own included."""
    with telling(name, board):
        mine = make()
        try:
            if board.rank == ranks[0]:
                return _receive(name, ranks, mine, board)
            door, first = f"door/{name}", board.members[ranks[0]]
            waiter.until(
                lambda: board.published(door) is not None or bool(failed(name, ranks, board)),
                f"rank {first} to open its door",
            )
            check(name, ranks, board)
            return _visit(bytes.fromhex(board.published(door) or ""), name, ranks, mine, board)
        finally:
            os.close(mine)


def _patience(name: str, ranks: tuple[int, ...], board: Board) -> Callable[[], None]:
    end_s = time.monotonic() + MEET_S

    def look() -> None:
        board.check("the meeting of a host's ranks")
        check(name, ranks, board)
        if time.monotonic() > end_s:
            raise OSError(f"a rank did not come to the door within {MEET_S:.0f} s")

    return look


def _receive(name: str, ranks: tuple[int, ...], mine: int, board: Board) -> dict[int, int]:
    """The first rank opens a door, collects what all bring, and gives all of it to each."""
    token, look = secrets.token_bytes(16), _patience(name, ranks, board)
    guests = list[socket.socket]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(_name(token))
        door.listen(len(ranks))
        door.settimeout(SLICE_S)
        held = {board.rank: os.dup(mine)}
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
        except ConnectionError as error:
            _close(held.values())
            raise _Lost(f"a rank left while memory was handed out: {error}") from error
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
        head, brought, flags, _ = socket.recv_fds(guest, _HEAD.size, 1)
    except OSError:
        return -1, []
    told, rank = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
    if not hmac.compare_digest(told, token):
        return -1, list(brought)
    _, user, _ = _USER.unpack(guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))
    if user != os.getuid():
        _close(brought)
        raise OSError(f"it runs as user {os.getuid()}, and another of this host's ranks as user {user}")
    _check_room(flags, brought)
    return rank, list(brought)


def _check_room(flags: int, came: Iterable[int]) -> None:
    """The kernel drops descriptors for which a process has no room, and only a flag says so."""
    if flags & socket.MSG_CTRUNC:
        _close(came)
        raise OSError("Too many open files: raise its limit (ulimit -n)")


def _visit(token: bytes, name: str, ranks: tuple[int, ...], mine: int, board: Board) -> dict[int, int]:
    found, look = list[int](), _patience(name, ranks, board)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
        try:
            guest.connect(_name(token))
            socket.send_fds(guest, [_HEAD.pack(token, board.rank)], [mine])
            guest.settimeout(SLICE_S)
            while len(found) < len(ranks):
                look()
                try:
                    word, some, flags, _ = socket.recv_fds(guest, 1, _MOST)
                except TimeoutError:
                    continue
                _check_room(flags, some)
                found += some
                if not word or not some:
                    raise ConnectionError("it was closed")
        except ConnectionError as error:
            _close(found)
            raise _Lost(f"at the door of rank {board.members[ranks[0]]}: {error}") from error
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
