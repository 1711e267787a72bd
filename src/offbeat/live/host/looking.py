"""From outside: which jobs of this user run on this host, and what their host processes say of them.

A host process is found among the processes of this user, by a nameless file that it holds: see
`offbeat.live.host.onlookers`. Whoever may read that file may look. Every question has a connection of its own, and an
end in time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from offbeat.live.host.onlookers import FILE, PROCESS, state_of
from offbeat.live.host.protocol import LONGEST, Inbox, Look, Seen, packed
from offbeat.live.host.status import JobStatus, State, of_one, rebuilt
from offbeat.live.transport import elsewhere
from offbeat.live.transport.errors import OffbeatError

WITHIN_S = 5.0  # for a host process to answer
AGAIN_S, HOSTS_S = 0.2, 1.0  # for the other hosts to have told this one
_USER = struct.Struct("3i")


@dataclass(frozen=True)
class RunningJob:
    """A host process of this user on this host. ``since_s``: seconds since this machine was booted."""

    pid: int
    socket: bytes
    token: str
    since_s: float

    def look(self, whole: bool = False) -> JobStatus:
        """What it knows; ``whole``: also, if it comes soon, what other hosts say."""
        status = ask(self.socket, self.token, self.pid)
        end_s = time.monotonic() + HOSTS_S
        while (
            whole and time.monotonic() < end_s and any(o.answers and o.told_ago_s is None for o in status.other_hosts)
        ):
            time.sleep(AGAIN_S)
            status = ask(self.socket, self.token, self.pid)
        return status


def jobs() -> list[RunningJob]:
    """Those that run, the oldest first."""
    own = [pid for pid in map(int, filter(str.isdigit, _listed("/proc"))) if _is_own(pid)]
    named = [pid for pid in own if _called(pid) == PROCESS]
    found = [job for pid in named or own if (job := _job(pid)) is not None]
    return sorted(found, key=lambda job: (job.since_s, job.pid))


def ask(name: bytes, token: str, pid: int, within_s: float = WITHIN_S) -> JobStatus:
    """One question to the host process ``pid``, which listens at ``name``."""
    inbox, end_s = Inbox(LONGEST), time.monotonic() + within_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.settimeout(within_s)
            line.connect(name)
            _, user, _ = _USER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))
            if user != os.getuid():
                raise OffbeatError(
                    f"the socket of host process {pid} is user {user}'s, and not yours; "
                    "run offbeat status as the user of the job"
                )
            line.sendall(packed(Look(token)))
            while (left_s := end_s - time.monotonic()) > 0:
                line.settimeout(left_s)
                data = line.recv(1 << 18)
                if not data:
                    raise ConnectionError("it hung up")
                for message in inbox.feed(data):
                    assert isinstance(message, Seen)
                    return rebuilt(JobStatus, message.status)
        except TimeoutError:
            pass
        except (OSError, ValueError) as error:
            raise OffbeatError(_silent(pid, str(error))) from error
    raise OffbeatError(_silent(pid, f"no answer within {within_s:g} s"))


def _silent(pid: int, words: str) -> str:
    letter = state_of(pid)
    if letter == "T":
        return (
            f"the host process {pid} is stopped (SIGSTOP), and all workers wait for it; kill -CONT {pid} lets it go on"
        )
    if letter in ("X", "Z"):
        return f"the host process {pid} has ended, and its job on this host with it"
    if "refused" in words or "No such file" in words:
        words += "; it may run in a container, with a network of its own: look from inside"
    return f"the host process {pid} does not answer: {words}"


def of_this_process(rank: int, size: int, steps: int, why: str) -> JobStatus:
    """What this worker knows by itself."""
    words = elsewhere.in_words()
    state: State = "waits" if words.startswith("waits") else "elsewhere" if elsewhere.inside() else "busy"
    name = Path(sys.argv[0]).name if sys.argv else ""
    return of_one(rank, size, os.getpid(), socket.gethostname(), name, steps, (state, words, ""), why)


def _job(pid: int) -> RunningJob | None:
    """What a process says of how to look, if it is a host process."""
    for descriptor in _listed(f"/proc/{pid}/fd"):
        place = f"/proc/{pid}/fd/{descriptor}"
        with contextlib.suppress(OSError, ValueError, KeyError):
            if os.readlink(place).startswith(f"/memfd:{FILE} "):
                told = json.loads(Path(place).read_text(encoding="utf-8"))
                return RunningJob(pid, str(told["socket"]).encode("latin-1"), str(told["token"]), _since_s(pid))
    return None


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # it has ended, or is not to be looked at
        return []


def _is_own(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def _called(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _since_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
