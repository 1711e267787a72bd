"""Two hosts of one machine: network namespaces with a cable of so many bits a second between them. Needs root."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
from pathlib import Path

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
NAME_SERVERS = Path("/etc/resolv.conf")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    try:
        with TwoHosts():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {error}"


class TwoHosts:
    """Gone at the end, with all that was sent in it. ``bits_s``: of the cable, each way; None: as fast as it goes."""

    def __init__(self, bits_s: int | None = None) -> None:
        self._bits_s, tag = bits_s, secrets.token_hex(3)
        self.names, self.ends = [f"ob-{tag}-{k}" for k in "ab"], [f"ob{tag}{k}" for k in "ab"]

    def __enter__(self) -> TwoHosts:
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            _run("ip", "link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
            for name, end, address in zip(self.names, self.ends, ADDRESSES, strict=True):
                _run("ip", "link", "set", end, "netns", name)
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
                for device in (end, "lo"):
                    _run("ip", "-n", name, "link", "set", device, "up")
                if self._bits_s is not None:
                    shape = ("rate", f"{self._bits_s}bit", "burst", "256kb", "latency", "50ms")
                    _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf", *shape)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.ends[0]], capture_output=True, check=False)

    def move_in(self, host: int, port: int) -> None:
        """This process, and whatever it starts, is on that host; rank 0's is the first."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(Path("/run/netns", self.names[host]), "rb") as namespace:
            failed = libc.setns(namespace.fileno(), CLONE_NEWNET)
        # No name server can be reached from there, and to ask one for the name of a peer would take ten seconds.
        failed = failed or libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        if NAME_SERVERS.exists():
            failed = failed or libc.mount(b"/dev/null", str(NAME_SERVERS).encode(), None, MS_BIND, None)
        if failed:
            raise OSError(ctypes.get_errno(), f"a process cannot move to the host {self.names[host]}")
        os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=self.ends[host])

    def sent_bytes(self, host: int) -> int:
        """What has left that host, as one of its processes sees it."""
        command = [
            "ip",
            "netns",
            "exec",
            self.names[host],
            "cat",
            f"/sys/class/net/{self.ends[host]}/statistics/tx_bytes",
        ]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
