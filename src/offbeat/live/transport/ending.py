"""The end of a process: no thread of Gloo's may be asking for the interpreter when it goes down.

A Gloo thread lets go of an operation's tensors only after it has told the waiting worker that the operation is done,
and to let go of a tensor that Python knows it needs the interpreter lock. The interleaving that kills:

- Gloo's thread wakes the main thread, and is about to let go;
- the main thread returns from ``dist.all_reduce()``, the last line of the script, and ends; it holds the lock;
- Gloo's thread finds an interpreter that is still there, and waits for the lock;
- the interpreter begins to go down: who waits for its lock is ended by ``pthread_exit``, here in the middle of C++ that
  must not be unwound. "terminate called without an active exception", SIGABRT.

One that comes later finds no interpreter and leaves its tensors be. So it is enough that all are at rest once, after
the last operation. Groups that are destroyed have no threads left; this is for those that are not: a group that the
user's script forgets. Destroying them here would block where an operation is pending, would miss
a group of which a variable is left, and would pull it away from whoever ends after us.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Iterator
from pathlib import Path

THREADS = "pt_gloo_runloop"  # what torch calls the threads that run a group's operations
GRACE_S = 5.0
TASKS = Path("/proc/self/task")

_watched = False


def watch() -> None:
    """Let this process end only with Gloo's threads at rest. Calls after the first do nothing."""
    global _watched
    if not _watched:
        _watched = True
        atexit.register(settle)


def settle() -> None:
    """Wait until no Gloo thread has run for a while in which it could have had the interpreter lock.

    Who waits for the lock wakes up once in a switch interval to ask for it, whoever holds it, so a thread that has not
    run in two of them waits for something else: for work, or for a peer. One that waits for a processor, on a busy
    machine, does not sleep.
    """
    deadline = time.monotonic() + GRACE_S
    before = dict(_threads())
    while before and time.monotonic() < deadline:
        time.sleep(2 * sys.getswitchinterval())  # gives up the lock
        now = dict(_threads())
        if now == before and all(sleeps for sleeps, _ in now.values()):
            return
        before = now


def _threads() -> Iterator[tuple[str, tuple[bool, str]]]:
    """Each Gloo thread: whether it sleeps, and how often it has left a processor. Nothing where there is no /proc."""
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        facts = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if facts.get("Name") == THREADS:
            switches = f"{facts['voluntary_ctxt_switches']}+{facts['nonvoluntary_ctxt_switches']}"
            yield task.name, (facts["State"].startswith("S"), switches)
