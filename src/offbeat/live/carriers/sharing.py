"""Making something of which every rank has its part, and agreeing whether all of them have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol, TypeVar

from offbeat.live.carriers import doors
from offbeat.live.transport.board import Board
from offbeat.live.transport.waiter import Waiter

WHAT = "the ranks of this host to share memory"


class Shareable(Protocol):
    """What several ranks have together."""

    def close(self, together: bool = True) -> None: ...


T = TypeVar("T", bound=Shareable)


def shared(name: str, ranks: tuple[int, ...], make: Callable[[], T], board: Board, waiter: Waiter) -> T | None:
    """What all of these ranks ``make`` together now; None, and a sentence of why, where one of them cannot."""
    # Nobody enters before all are there: one may be without data, and come when it hears that we wait.
    waiter.until(board.meeting(name, ranks), WHAT)
    found, why = None, ""
    try:
        found = make()
    except OSError as error:
        why = str(error)
    said = _everyones(f"{doors.SAID}/{name}", ranks, why or doors.DONE, board, waiter)
    failed = {rank: why for rank, why in said.items() if why != doors.DONE}
    if not failed:
        return found
    if found is not None:
        found.close()
    if board.rank == ranks[0]:
        rank, why = min(failed.items(), key=lambda one: one[1].startswith(doors.FOLLOWS))
        words = f"memory cannot be shared on this host (rank {rank}: {why})"
        warnings.warn(f"{words}: vectors travel through Gloo, which is slower", stacklevel=2)
    return None


def all_have(name: str, ranks: tuple[int, ...], mine: bool, board: Board, waiter: Waiter) -> bool:
    """Whether all of these ranks, wherever they are, have what they wanted: all of them hear the same."""
    said = _everyones(f"all/{name}", ranks, str(mine), board, waiter)
    return set(said.values()) == {str(True)}


def _everyones(name: str, ranks: tuple[int, ...], mine: str, board: Board, waiter: Waiter) -> dict[int, str]:
    board.publish(f"{name}/{board.rank}", mine)
    waiter.until(lambda: all(board.published(f"{name}/{rank}") for rank in ranks), WHAT)
    return {rank: board.published(f"{name}/{rank}") or "" for rank in ranks}
