"""Who shares memory with whom, and which carrier is wanted.

Containers share names, so a host is told by what two processes must have in common to hand memory over: the boot of a
kernel, and a network namespace (in which they find their host process). Whether it works is tried, not believed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast, get_args

from offbeat.live.transport.errors import OffbeatError

Carrier = Literal["shm", "ipc"]
VARIABLE = "OFFBEAT_CARRIER"
NAME = "OFFBEAT_HOST"
PORT = "OFFBEAT_PORT"
RETURNS = "OFFBEAT_RETURNS"
RESUME = "OFFBEAT_RESUME"  # the folder of a checkpoint, for the first run that a script attaches
SIOCGIFADDR = 0x8915


def home() -> str:
    """The same for two processes that may be able to share memory.

    Ranks whose environments give their hosts different names are on different ones: so one machine can stand for two.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.environ.get(NAME, '')}"
    except OSError:
        return f"pid {os.getpid()}"  # a system of another kind: everybody is a host of its own


def name() -> str:
    """Of this host, as other hosts know it."""
    return hashlib.sha256(home().encode()).hexdigest()[:16]


def wanted() -> Carrier | None:
    """What the environment asks for; None: whatever is best."""
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if not asked:
        return None
    if asked in get_args(Carrier):
        return cast(Carrier, asked)
    raise ValueError(
        f"{VARIABLE}={asked!r} is no carrier; use shm (memory of the host) or ipc (of a GPU), or leave it out"
    )


def address() -> str:
    """Where other hosts find this one: at the interface that Gloo is told to use, or that leads to the first rank.

    Nothing listens at all interfaces.
    """
    asked = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if asked:
            try:
                told = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", asked.encode()[:15]))
                return socket.inet_ntoa(told[20:24])
            except OSError as error:
                raise OffbeatError(
                    f"GLOO_SOCKET_IFNAME={asked!r}: no interface of that name has an IPv4 address here ({error}); "
                    "name one that leads to the other hosts, or none"
                ) from error
        with suppress(OSError):
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def port() -> int:
    """At which port other hosts find this one; 0: at any that is free."""
    asked = os.environ.get(PORT, "0").strip()
    if asked.isdigit() and int(asked) < 1 << 16:
        return int(asked)
    raise OffbeatError(f"{PORT}={asked!r} is no port; use a number below 65536, or leave it out")


def restart() -> str:
    """Which start of the job this is: a host process of the one before is not to be met."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def resumes() -> str | None:
    """The folder of the checkpoint that the launcher was told to begin with."""
    return os.environ.get(RESUME) or None


def returns() -> int:
    """How often this worker's process has been started again while the others went on."""
    asked = os.environ.get(RETURNS, "0").strip()
    if asked.isdigit():
        return int(asked)
    raise OffbeatError(f"{RETURNS}={asked!r} is no number; offbeat launch sets it, so leave it out")


def gpus_as_if() -> str | None:
    """How ranks behave as if each had a GPU of its own: "each", none of which reads another's memory, or "peers"."""
    asked = os.environ.get("OFFBEAT_GPUS", "").strip()
    if asked in ("", "each", "peers"):
        return asked or None
    raise OffbeatError(f"OFFBEAT_GPUS={asked!r} is no choice; use 'each' or 'peers', or leave it out")
