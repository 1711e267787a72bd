"""Making something of which every rank has its part, and agreeing whether all of them have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol, TypeVar

from offbeat.live.carriers import doors
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter

WHAT = "the ranks of this host to share memory"


class Shareable(Protocol):
    """What several ranks have together."""

    def close(self, together: bool = True) -> None: ...


T = TypeVar("T", bound=Shareable)


def shared(name: str, ranks: tuple[int, ...], make: Callable[[], T], board: Board, waiter: Waiter) -> T | None:
    """What all of these ranks ``make`` together now; None, and a sentence of why, where one of them cannot."""
    # Nobody enters before all are there: one may be without data, and come when it hears that we wait.
    waiter.until(board.meeting(name, ranks), WHAT)
    found, mine = None, doors.DONE
    try:
        found = make()
    except OffbeatError:
        raise  # the run has failed, and not the memory
    except Exception as error:  # whatever it was: the others wait for what this rank says, and Gloo can do without
        mine = doors.said(error)
    _everyones(f"{doors.SAID}/{name}", ranks, mine, board, waiter)
    failed = doors.failed(name, ranks, board)
    if not failed:
        return found
    if found is not None:
        found.close()
    _tell(name, ranks, failed, board)
    return None


def _tell(name: str, ranks: tuple[int, ...], failed: dict[int, doors.Why], board: Board) -> None:
    """The first of these ranks warns, of what is nearest to a cause.

    A rank that cannot share fails in every pair and group that it comes to. So it notes on the board where it did so
    first, and elsewhere nobody warns of it again: before it comes to another group, its note is there.
    """
    rank, why = min(failed.items(), key=lambda one: (one[1].distance, one[0]))
    mine = _first(board.rank, why)
    if failed.get(board.rank) == why and board.published(mine) is None:
        board.publish(mine, name)
    if board.rank == ranks[0] and board.published(_first(rank, why)) in (None, name):
        words = f"memory cannot be shared on this host (rank {board.members[rank]}: {why.words})"
        warnings.warn(f"{words}: vectors travel through Gloo, which is slower", stacklevel=3)


def _first(rank: int, why: doors.Why) -> str:
    return f"unshared/{rank}/{why.words}"


def all_have(name: str, ranks: tuple[int, ...], mine: bool, board: Board, waiter: Waiter) -> bool:
    """Whether all of these ranks, wherever they are, have what they wanted: all of them hear the same."""
    said = _everyones(f"all/{name}", ranks, str(mine), board, waiter)
    return set(said.values()) == {str(True)}


def _everyones(name: str, ranks: tuple[int, ...], mine: str, board: Board, waiter: Waiter) -> dict[int, str]:
    board.publish(f"{name}/{board.rank}", mine)
    waiter.until(lambda: all(board.published(f"{name}/{rank}") for rank in ranks), WHAT)
    return {rank: board.published(f"{name}/{rank}") or "" for rank in ranks}
