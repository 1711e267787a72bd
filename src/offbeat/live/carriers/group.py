"""A Gloo group of our own, of all workers or of a few.

Not ``dist.new_group``: that names a group after the number of groups this process has made, which differs between
workers as soon as some of them are made in pairs, and it would show up among the user's groups. Only collectives are
used, also between two: a wait for ``isend`` or ``irecv`` that runs out closes Gloo's connections for good, while a wait
for a collective may be cut into slices.

Two threads of one process that make groups at the same time can lock both sides, each waiting in the other's meeting.
So groups that threads will use are made beforehand, by one thread, in one order.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import re
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from offbeat.live.transport.errors import PeerFailed
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter

CONNECT = timedelta(seconds=20)  # for the other members, once all have said that they are there
LONG = timedelta(days=7)  # Gloo's own timeout kills a group for good; our patience is kept by the waiter
GRACE_S = 5.0
PARKING_S = 0.05  # much longer than a thread needs that has ended an operation
UNUSED_TAG = 1  # of messages that nobody sends
_ENFORCED = re.compile(r"^\[enforce fail at [^]]*\] .*? vs [^.]*\. ")  # where in Gloo, before what the system said


class Group:
    """The collectives among ``ranks``. Every member makes them in the same order."""

    def __init__(self, name: str, ranks: tuple[int, ...], board: Board, waiter: Waiter) -> None:
        _look_at_the_parked()
        name = board.numbered(name, ranks)
        # Gloo's own meeting is deaf to signals and to failures, so nobody enters it before all are there.
        waiter.until(board.meeting(name, ranks), f"ranks {', '.join(map(str, ranks))} to make a group")
        board.check()  # one that came, and left again since somebody had failed, will not be met
        self.ranks = ranks
        connect = min(CONNECT, timedelta(seconds=waiter.patience_s))  # Gloo may take five times as long
        place = ranks.index(board.rank)
        try:
            self._gloo: Any = dist.ProcessGroupGloo(board.store(name), place, len(ranks), connect)
        except RuntimeError as error:
            raise _not_met(ranks, error, board) from error
        self._travelling: list[weakref.ref[Tensor]] = []

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> dist.Work:
        """Start an in-place reduction."""
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = op, LONG
        return self._gloo.allreduce([self._alias(tensor)], options)  # type: ignore[no-any-return]

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        """Start giving rank ``source``'s tensor to all."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = self.ranks.index(source), LONG
        return self._gloo.broadcast([self._alias(tensor)], options)  # type: ignore[no-any-return]

    def all_gather(self, everyones: list[Tensor], tensor: Tensor) -> dist.Work:
        """Start collecting everybody's tensor, in the order of the ranks."""
        options = AllgatherOptions()
        options.timeout = LONG
        outputs, inputs = [[self._alias(t) for t in everyones]], [self._alias(tensor)]
        return self._gloo.allgather(outputs, inputs, options)  # type: ignore[no-any-return]

    def all_to_all(self, received: Tensor, sent: Tensor, incoming: list[int], outgoing: list[int]) -> dist.Work:
        """Start giving each member its stretch of ``sent``: ``outgoing`` elements of its first dimension for each, in
        the order of the ranks, and ``incoming`` from each."""
        options = AllToAllOptions()
        options.timeout = LONG
        return self._gloo.alltoall_base(  # type: ignore[no-any-return]
            self._alias(received), self._alias(sent), incoming, outgoing, options
        )

    def _alias(self, tensor: Tensor) -> Tensor:
        """The same memory under another name, which lives exactly as long as Gloo's threads hold it."""
        alias = tensor.detach()
        self._travelling = [ref for ref in self._travelling if ref() is not None]
        self._travelling.append(weakref.ref(alias))
        return alias

    def close(self) -> None:
        """Give the group back; all members are through with it.

        Destroying it joins its threads while this thread holds the interpreter lock. A thread that has just ended its
        last operation and is about to let go of the tensors would want that lock: wait until it has let go.
        """
        if not self._have_arrived(GRACE_S):
            return self.park()
        self._gloo = None

    def _have_arrived(self, within_s: float) -> bool:
        """Whether Gloo's threads have let go of all tensors, or do so soon."""
        deadline = time.monotonic() + within_s
        while any(ref() is not None for ref in self._travelling):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
        return True

    def park(self) -> None:
        """Leave the group, whatever the others do. One without an operation under way is given back now.

        Destroying one with an operation pending blocks until its timeout, so its connections are closed first: then
        the operation fails. A thread that still adds something up may take a while; then the group waits, and is given
        back when another one is made or left after that. Where the process ends before, it is never destroyed, and the
        operating system closes the sockets.
        """
        _look_at_the_parked()
        if not self._have_arrived(PARKING_S):
            self._close_connections()
            if not self._have_arrived(PARKING_S):
                with _looking:
                    _parked.append((self._gloo, self._travelling))
        self._gloo = None

    def _close_connections(self) -> None:
        """By a wait that runs out, which does that to all of them; one that is closed already refuses at once.

        That the others leave does not do: where one of two operations has failed, what was sent to it stays unread in
        its connection, and the other one waits behind that for ever (seen with gdb, with a sum of two dtypes). Nor does
        ``ProcessGroupGloo.abort``, which leaves a pending operation pending (torch 2.13).
        """
        for peer in set(range(len(self.ranks))) - {self._gloo.rank()}:
            with suppress(RuntimeError):
                self._gloo.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))


def _not_met(ranks: tuple[int, ...], error: RuntimeError, board: Board) -> PeerFailed:
    """A group that could not be made, with Gloo's own words: the reason may lie in this process, and not in a peer."""
    met = ", ".join(str(board.members[rank]) for rank in ranks)
    words = _ENFORCED.sub("", next(iter(str(error).splitlines()), ""))
    if os.strerror(errno.EMFILE) not in words:
        return board.lost(f"the meeting of ranks {met} ({words})")
    limit = f"this process may have {os.sysconf('SC_OPEN_MAX')} files and sockets open"
    return PeerFailed(f"ranks {met} could not be met ({words}): {limit}; let it have more (ulimit -n)")


_parked: list[tuple[Any, list[weakref.ref[Tensor]]]] = []  # groups with operations under way, and their tensors
_looking = threading.Lock()  # one thread may leave a run while another begins one: a group is given back once


def _look_at_the_parked() -> None:
    with _looking:
        _parked[:] = [(gloo, refs) for gloo, refs in _parked if any(ref() is not None for ref in refs)]


@atexit.register
def _keep_the_parked() -> None:
    """For ever: a Gloo thread that lets go of the last reference would ask for an interpreter that is gone."""
    for gloo, refs in _parked:
        for kept in (gloo, *(ref() for ref in refs)):
            if kept is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
