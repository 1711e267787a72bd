"""A rank's process that dies and comes back, as ``offbeat launch --restarts`` lets it: with the same rank, told so."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lives_twice(first: Callable[[], object]) -> None:
    """This process forks its first life, which is killed in ``first``; what follows is the second.

    It must not have attached before.
    """
    if (child := os.fork()) == 0:
        try:
            first()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"the first life ended with {status}"
    os.environ["OFFBEAT_RETURNS"] = str(int(os.environ.get("OFFBEAT_RETURNS", "0")) + 1)
