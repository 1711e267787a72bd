"""Who shares memory with whom, and which carrier is wanted.

Containers share names, so a host is told by what two processes must have in common to hand memory over: the boot of a
kernel, and a network namespace (in which they find each other's door). Whether it works is tried, not believed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, cast, get_args

Carrier = Literal["gloo", "shm", "ipc"]
VARIABLE = "OFFBEAT_CARRIER"


def home() -> str:
    """The same for two processes that may be able to share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"pid {os.getpid()}"  # a system of another kind: everybody is a host of its own


def wanted() -> Carrier | None:
    """What the environment asks for; None: whatever is best."""
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if not asked:
        return None
    if asked in get_args(Carrier):
        return cast(Carrier, asked)
    raise ValueError(f"{VARIABLE}={asked!r} is no carrier; use gloo, shm or ipc, or leave it out")
