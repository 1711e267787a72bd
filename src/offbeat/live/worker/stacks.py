"""The Python stacks of a worker that hangs, for somebody of the same user who looks from outside.

``faulthandler`` writes them when the worker is sent ``SIGNAL``: in C, without the interpreter's lock, so also while
somebody's C code holds it. They go to a nameless file (``memfd``) of the worker, which whoever may read the process
finds under ``/proc``. The signal is one that nothing happens by where nobody listens: sent too late, it harms nobody.

A script that has a handler for that signal keeps it: then there are no stacks to be had, and the worker's page says so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

from offbeat.live.transport.errors import OffbeatError

SIGNAL = signal.SIGURG
FILE = "offbeat-stacks"
WITHIN_S = 2.0  # for the first line to be written,
STILL_S = 0.1  # and for the next ones
LONGEST = 1 << 22  # bytes of stacks; faulthandler itself stops at a hundred threads of a hundred frames
TAKEN = f"a handler of the script's own has {SIGNAL.name}, by which they are asked for"


class Stacks:
    """In the worker: lets stacks be written for as long as one of these is open. ``words``: why they are not."""

    _users, _file, _why = 0, -1, ""

    def __init__(self) -> None:
        if not Stacks._users:
            Stacks._begin()
        Stacks._users += 1
        self.words = Stacks._why
        self._is_open = True

    def close(self) -> None:
        """No longer. A handler that the script has put in its place meanwhile stays."""
        if self._is_open:
            self._is_open = False
            Stacks._users -= 1
            if not Stacks._users:
                Stacks._end()

    @classmethod
    def _begin(cls) -> None:
        cls._why = ""
        try:
            if _is_taken():
                cls._why = TAKEN
                return
            cls._file = os.memfd_create(FILE, os.MFD_CLOEXEC)
            fcntl.fcntl(cls._file, fcntl.F_SETFL, os.O_APPEND)  # a reader empties it
            faulthandler.register(SIGNAL, file=cls._file, all_threads=True, chain=False)
        except (OSError, AttributeError, RuntimeError, KeyError, ValueError) as error:
            cls._why = f"this system has no way to write them ({error})"
            cls._end()

    @classmethod
    def _end(cls) -> None:
        if cls._file < 0:
            return
        theirs = signal.getsignal(SIGNAL)
        if theirs in (None, signal.SIG_DFL):
            faulthandler.unregister(SIGNAL)
        elif threading.current_thread() is threading.main_thread():
            faulthandler.unregister(SIGNAL)  # which puts back what was there before ours
            signal.signal(SIGNAL, theirs)
        else:
            return  # nobody but the main thread may put theirs back; the file stays open with the process
        os.close(cls._file)
        cls._file = -1


def _is_taken() -> bool:
    """Whether this process does anything on that signal. The kernel knows; Python does not know of handlers in C."""
    masks = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if line[:3] == "Sig")
    return any(int(masks[name], 16) >> (SIGNAL - 1) & 1 for name in ("SigCgt", "SigIgn"))


def stacks_of(pid: int) -> str:
    """The stacks of all threads of a worker of this user's. Raises a sentence where they cannot be had."""
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        raise OffbeatError(f"process {pid} cannot be looked at: {error.strerror}") from error
    file = -1
    try:
        if _letter(pid) in _CANNOT:
            raise OffbeatError(f"process {pid} does not tell its stacks: {_why_silent(pid)}")
        file = _file_of(pid)
        _lock(file, pid)
        os.ftruncate(file, 0)
        signal.pidfd_send_signal(process, SIGNAL)
        return _written(file, pid)
    except OSError as error:
        raise OffbeatError(f"the stacks of process {pid} cannot be read: {error.strerror}") from error
    finally:
        os.close(process)
        if file >= 0:
            os.close(file)


def _file_of(pid: int) -> int:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(link).startswith(f"/memfd:{FILE}"):
                return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    raise OffbeatError(f"process {pid} writes no stacks: {TAKEN}, or its run is over; try py-spy dump --pid {pid}")


def _written(file: int, pid: int) -> str:
    """What comes, until no more does."""
    since_s, size = time.monotonic(), 0
    while time.monotonic() - since_s < (STILL_S if size else WITHIN_S):
        time.sleep(0.01)
        now = os.fstat(file).st_size
        if now != size:
            since_s, size = time.monotonic(), now
    if not size:
        raise OffbeatError(f"process {pid} does not tell its stacks: {_why_silent(pid)}")
    text = os.pread(file, min(size, LONGEST), 0).decode(errors="replace")
    os.ftruncate(file, 0)
    return text


def _lock(file: int, pid: int) -> None:
    """One reader at a time, which has it for as long as it holds the file."""
    end_s = time.monotonic() + 2 * WITHIN_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise OffbeatError(f"somebody else is reading the stacks of process {pid}; try again") from None
        time.sleep(0.02)


_CANNOT = {
    "T": "it is stopped (SIGSTOP); kill -CONT {pid} lets it go on",
    "t": "a debugger has stopped it",
    "Z": "it has ended",
    "": "it has ended",
}
_KERNEL = "it is in a call of the kernel that nothing interrupts, as to a disk or a file server that does not answer"


def _why_silent(pid: int) -> str:
    letter = _letter(pid)
    if letter == "D":
        return _KERNEL
    return _CANNOT.get(letter, f"it blocks {SIGNAL.name}, by which they are asked for").format(pid=pid)


def _letter(pid: int) -> str:
    """For the state of a process, as the kernel names it; "" where there is none of that number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""
