"""Jobs of several processes for the live tests.

Importing torch takes seconds, so one process does it for a whole session of pytest, and then forks the workers of one
job after the other. Each worker is a whole process, down to the end of its interpreter, and meets the others as under
torchrun: at a store that none of them hosts (or that rank 0 hosts, where a job says so).
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OF_TORCH = ("-W", "ignore:Implicitly cleaning up:ResourceWarning")  # torch 2.6 has a folder it never closes
TRIES, IN_USE = 3, "address already in use"
OUTLIVES_S = 60.0  # a worker that is still there so long after another one has failed hangs


@dataclass(frozen=True)
class Job:
    """``function(rank, *args)`` on ``size`` processes; a function of a module, as it is found there by its name."""

    function: Callable[..., Any]
    size: int
    args: tuple[Any, ...] = ()
    timeout_s: float = 300.0  # bounds a hang: from the start, or from the last note of a worker
    rank_0_hosts: bool = False
    # Let the interpreter end by itself: the rule for scripts, but it takes a second. Else one that has raised says so
    # and runs its exit handlers, one that has returned does not even that; then the process is gone.
    whole_end: bool = False
    left_behind: int | None = None  # a rank that will never end by itself; it is killed when the others have ended
    outlives_s: float = OUTLIVES_S


@dataclass
class Outcome:
    """How one worker ended."""

    value: Any = None
    returned: bool = False
    error: str = ""
    exit_code: int | None = None
    ended_s: float = 0.0
    hung: bool = False
    noted: list[Any] = field(default_factory=list, repr=False)
    stderr: str = field(default="", repr=False)


def run(jobs: list[Job], at_once: int = 1) -> list[list[Outcome]]:
    """The outcomes of all workers of all jobs, of which so many run at once.

    Where rank 0 hosts the store, its port is held for it until it listens there; seen once in 20,000 jobs, another
    socket of a busy machine had it all the same. What came of such a job tells nothing: it runs again.
    """
    outcomes: dict[int, list[Outcome]] = {}
    for _ in range(TRIES):
        left = [number for number in range(len(jobs)) if number not in outcomes]
        with tempfile.TemporaryDirectory() as folder:
            found = _the_forge().ask(([jobs[number] for number in left], at_once, folder))
        for number, some in zip(left, found, strict=True):
            if not jobs[number].rank_0_hosts or not any(IN_USE in one.stderr for one in some):
                outcomes[number] = some
        if len(outcomes) == len(jobs):
            break
    else:
        outcomes |= {number: some for number, some in zip(left, found, strict=True) if number not in outcomes}
    return [outcomes[number] for number in range(len(jobs))]


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the workers returned, if all did, and ended well; else how the first one ended: the others may follow it."""
    for rank, outcome in sorted(enumerate(outcomes), key=lambda one: one[1].ended_s):
        assert (outcome.returned, outcome.exit_code) == (True, 0), f"rank {rank}: {outcome}\n{outcome.stderr[-3000:]}"
    return [outcome.value for outcome in outcomes]


_INSIDE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support import forking
forking.main(*map(int, sys.argv[1:]))
"""


class _Forge:
    """The process that forks workers, as the tests see it."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", *OF_TORCH, "-c", _INSIDE, str(os.getpid()), str(there.fileno())],
                env=environment,
                pass_fds=[there.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=self._said,
            )
        self._connection = Connection(here.detach())
        atexit.register(self.close)

    def ask(self, request: tuple[list[Job], int, str]) -> list[list[Outcome]]:
        try:
            self._connection.send_bytes(pickle.dumps(request))
            answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self._said.seek(0)
            raise AssertionError(f"the forge has ended: {self._said.read()[-4000:].decode()}") from error
        if isinstance(answer, str):
            raise AssertionError(answer)
        outcomes: list[list[Outcome]] = answer
        return outcomes

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._said.close()


_started: list[_Forge] = []


def _the_forge() -> _Forge:
    if not _started:
        _started.append(_Forge())
    return _started[0]


# For the jobs.


def note(value: Any) -> None:
    """Leave something with the forge that stays, whatever becomes of this worker."""
    with Path(os.environ["JOB_FOLDER"], f"{os.environ['RANK']}.notes").open("ab") as file:
        file.write(pickle.dumps(value))


def say(event: str) -> None:
    """Let every worker of this job know that something has happened."""
    Path(os.environ["JOB_FOLDER"], event).touch()


def said(event: str) -> bool:
    return Path(os.environ["JOB_FOLDER"], event).exists()


def hear(event: str, timeout_s: float = 240.0) -> None:
    """Wait until a worker of this job says so: an order of events, whatever the machine does."""
    start = time.monotonic()
    while not said(event):
        if time.monotonic() - start > timeout_s:
            raise TimeoutError(f"nobody said {event!r} within {timeout_s:.0f} s")
        time.sleep(0.002)


def attempt(action: Callable[[], Any]) -> str:
    """The error of ``action`` as text, or "" if there was none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
