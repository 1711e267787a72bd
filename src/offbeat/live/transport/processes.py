"""Whether a process of this machine is still there, and which process a rank is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist


def this_process() -> list[str]:
    """Whose /proc, the number there, and the time of its start, as numbers are used again; empty without a /proc."""
    try:
        boot, space = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
        pid = os.readlink("/proc/self")
        return [f"{boot} {space}", pid, _state_and_start(pid)[1]]
    except OSError:
        return []


def make_known() -> None:
    """Post this rank's process in the job's store: whoever waits for it can then see that it has ended."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"offbeat/process/{dist.get_rank()}", json.dumps(this_process()))


def rank_has_ended(rank: int) -> bool:
    """Whether that rank's process is known to have ended; False if it has not made itself known."""
    store, key = dist.distributed_c10d._get_default_store(), f"offbeat/process/{rank}"
    return bool(store.check([key])) and has_ended(json.loads(store.get(key)), this_process())


def has_ended(process: list[str], here: list[str]) -> bool:
    """Whether that process is known to have ended; False if it is on another machine."""
    if not process or not here or process[0] != here[0]:
        return False
    try:
        state, start = _state_and_start(process[1])
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return state in "ZX" or start != process[2]  # a zombie: nobody has asked for its exit status yet


def _state_and_start(pid: str) -> tuple[str, str]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()  # behind the name, which may hold any
    return fields[0], fields[19]
