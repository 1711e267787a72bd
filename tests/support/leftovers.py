"""What a process holds that could outlive it: sockets with names, files with names, processes of its own.

Looked up from inside while it runs, so that what other jobs of this machine leave or make meanwhile is not counted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.live.worker import line


@dataclass(frozen=True)
class Held:
    """``sockets``: names of Unix sockets; ``files``: those in ``/dev/shm``; ``memory``: mapped files without a name;
    ``children``: processes, each with the moment of its start; ``hosts``: the same of host processes."""

    sockets: frozenset[str]
    files: frozenset[str]
    memory: frozenset[str]
    children: frozenset[tuple[int, str]]
    hosts: frozenset[tuple[int, str]]


def host_pids() -> set[int]:
    """The host processes that this process has a line to, whoever has started them."""
    return {one.host_pid for one in line._lines.values()}


def held() -> Held:
    """By this process and those it has started."""
    children = {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}
    hosts = host_pids()
    links = {link for pid in (os.getpid(), *children, *hosts) for link in _open_files(pid)}
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    mapped = {one.split(maxsplit=5)[-1].strip() for one in Path("/proc/self/maps").read_text().splitlines()}
    return Held(
        frozenset(name for inode, name in _named_sockets() if inode in inodes),
        frozenset(path for path in {*links, *mapped} if path.startswith("/dev/shm/")),
        frozenset(path for path in mapped if path.startswith("/memfd:")),
        frozenset((pid, begun) for pid in children if (begun := started(pid))),
        frozenset((pid, begun) for pid in hosts if (begun := started(pid))),
    )


def left(everyones: Iterable[Held], within_s: float = 20.0) -> list[str]:
    """What of it is still there: processes and the kernel take a moment to end."""
    everyones, end_s = list(everyones), time.monotonic() + within_s
    while (still := _left(everyones)) and time.monotonic() < end_s:
        time.sleep(0.02)
    return still


def left_of(folder: str, within_s: float = 20.0) -> list[str]:
    """Processes that still have ``folder`` in their environment, as those that a worker has started."""
    end_s = time.monotonic() + within_s
    while (still := [pid for pid, text in _environments().items() if folder in text]) and time.monotonic() < end_s:
        time.sleep(0.1)
    return [f"process {pid}" for pid in sorted(still)]


def _environments() -> dict[int, str]:
    out = {}
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            out[int(file.parent.name)] = file.read_text(errors="replace")
    return out


def _left(everyones: list[Held]) -> list[str]:
    sockets, named = {name for one in everyones for name in one.sockets}, {name for _, name in _named_sockets()}
    files = {path for one in everyones for path in one.files if Path(path).exists()}
    processes = {pid for one in everyones for pid, start in (*one.children, *one.hosts) if started(pid) == start}
    return [*sorted(sockets & named), *sorted(files), *(f"process {pid}" for pid in sorted(processes))]


def _open_files(pid: int) -> list[str]:
    out = []
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            out.append(os.readlink(link))
        except OSError:  # closed by now
            continue
    return out


def _named_sockets() -> list[tuple[str, str]]:
    """Inodes and names; those of the abstract namespace begin with "@"."""
    return re.findall(r"(\d+) ([@/].*)$", Path("/proc/net/unix").read_text(errors="replace"), re.MULTILINE)


def started(pid: int) -> str:
    """When, or nothing if it has ended."""
    try:
        state, *_, since = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:20]
    except OSError:
        return ""
    return "" if state in "ZX" else since
