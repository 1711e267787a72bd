"""Who shares memory with whom, and which carrier is wanted.

Containers share names, so a host is told by what two processes must have in common to hand memory over: the boot of a
kernel, and a network namespace (in which they find each other's door). Whether it works is tried, not believed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast, get_args

Carrier = Literal["gloo", "shm", "ipc"]
VARIABLE = "OFFBEAT_CARRIER"
NAME = "OFFBEAT_HOST"


def home() -> str:
    """The same for two processes that may be able to share memory.

    Ranks whose environments give their hosts different names are on different ones: so one machine can stand for two.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.environ.get(NAME, '')}"
    except OSError:
        return f"pid {os.getpid()}"  # a system of another kind: everybody is a host of its own


def home_of(rank: int) -> str:
    """The same for two ranks that may have a host process between them: not where Gloo is wanted."""
    return f"rank {rank}" if wanted() == "gloo" else home()


def together(ranks: Sequence[int], homes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """These ranks by the hosts they are on, in the order of each host's first; ``homes`` are those of all ranks."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(homes[rank], []).append(rank)
    return tuple(map(tuple, found.values()))


def wanted() -> Carrier | None:
    """What the environment asks for; None: whatever is best."""
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if not asked:
        return None
    if asked in get_args(Carrier):
        return cast(Carrier, asked)
    raise ValueError(f"{VARIABLE}={asked!r} is no carrier; use gloo, shm or ipc, or leave it out")


def may_be_one(size: int) -> bool:
    """Whether all ranks may be on one host, as far as the launcher says, and want a host process."""
    return wanted() != "gloo" and os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size)


def restart() -> str:
    """Which start of the job this is: a host process of the one before is not to be met."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def gpu_each() -> bool:
    """Whether ranks that share a GPU are to behave as if each had one of its own."""
    return os.environ.get("OFFBEAT_GPUS", "") == "each"
