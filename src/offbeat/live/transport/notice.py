"""A notice to end: SIGTERM, in a worker whose run goes on without it.

Whoever takes a machine away says so first: a scheduler, ``kubectl delete``, ``offbeat launch`` that is ended. A worker
then leaves in good order, and its process ends with exit code 0. Where the script has a handler of its own, it is the
script's affair, and nothing here happens.

The handler only notes that the notice has come; raised in the middle of anything, an exception could leave a slot half
written, or a lock held. Whoever waits in a run looks here in every slice (``look``), and so does every call of the
script into a run (``heeding``), also one of autograd. There the run is left when what was under way has been unwound.
A second SIGTERM ends the process at once.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn, ParamSpec, TypeVar

from offbeat.live.transport.errors import PeerFailed

P = ParamSpec("P")
T = TypeVar("T")

LEFT_AFTER = "has left after SIGTERM"  # what the others are told
SOON_S = 0.5  # between the notices of the workers of a job that is ended


class _Noticed(BaseException):
    """The notice has come; what is under way is to be unwound."""


class _Here:
    """What is known of this process."""

    def __init__(self) -> None:
        self.runs: dict[str, Callable[[], None]] = {}  # a run that goes on without this worker → how it is left
        self.rank = 0
        self.came = False  # the notice, and was not obeyed yet
        self.masks: list[set[int]] = []  # of signals, while the process forks


_here = _Here()


def heed(run: str, rank: int, leave: Callable[[], None]) -> None:
    """From now on SIGTERM lets this process ``leave`` the run, and end; unless the script has said what it does."""
    if not _is_ours() and (
        threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        return
    _here.runs[run], _here.rank = leave, rank
    if not _is_ours():
        signal.signal(signal.SIGTERM, _hear)


def forget(run: str) -> None:
    """The run is over. With the last, SIGTERM does what it did before."""
    if _here.runs.pop(run, None) is not None and not _here.runs and _is_ours():
        with suppress(ValueError):  # in another thread; the handler then passes on what comes
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def has_come() -> bool:
    """The notice, in a process that has a run to leave."""
    return _here.came


def look() -> None:
    """Raise if the notice has come."""
    if _here.came:
        raise _Noticed


def expect() -> None:
    """Others have left after a notice. If all are ended together, this worker's own comes soon."""
    end_s = time.monotonic() + SOON_S
    while _here.runs and not _here.came and time.monotonic() < end_s:
        time.sleep(0.005)
    look()


def heeding(call: Callable[P, T]) -> Callable[P, T]:
    """A call of the script into a run, which ends the process if the notice has come before it or comes meanwhile."""

    @functools.wraps(call)
    def heeded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            look()
            answer = call(*args, **kwargs)
            look()
            return answer
        except _Noticed:
            pass
        except PeerFailed:  # all are ended together, and too few are left for the last
            if not _here.came:
                raise
        _obey()

    return heeded


def deliver() -> None:
    """A notice that has come while the last run was given up for another reason, and that nobody will look for."""
    if _here.came and not _here.runs:
        _here.came = False
        os.kill(os.getpid(), signal.SIGTERM)


def _obey() -> NoReturn:
    _here.came = False
    runs = list(_here.runs.values())
    for leave in runs:
        leave()
    does = "leaves after SIGTERM; what it had handed in counts" if runs else "ends after SIGTERM; its run was over"
    with suppress(OSError):  # nobody reads
        print(f"offbeat: rank {_here.rank} {does}", file=sys.stderr, flush=True)
    raise SystemExit(0) from None


def _hear(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    if _here.runs:
        _here.came = True
    else:
        os.kill(os.getpid(), number)


def _is_ours() -> bool:
    return signal.getsignal(signal.SIGTERM) is _hear


# A child has no run, and whoever ends it by SIGTERM is to succeed: also before the child can put the handler away.


def _before_fork() -> None:
    if _is_ours():
        _here.masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))


def _after_fork() -> None:
    if _here.masks:
        signal.pthread_sigmask(signal.SIG_SETMASK, _here.masks.pop())


def _after_fork_in_child() -> None:
    _here.runs.clear()
    _here.came = False
    if _is_ours():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
