"""How a worker finds its host process, or starts it.

The ranks of a host agree on a token in the job's store. The host process listens at a Unix socket without a file, whose
name follows from the token: it belongs to a network namespace, vanishes with its process, and cannot be guessed. To
bind that name is the lock: whoever can, starts the process and hands the socket over; the others connect, and wait in
its queue while it imports torch. One that was just ending, and does not answer, is not waited for: they try again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import Store

from offbeat.live.host import process
from offbeat.live.host.protocol import Hello, Inbox, Welcome, packed
from offbeat.live.transport import hosts
from offbeat.live.transport.errors import OffbeatError

QUEUE = 1024  # connections that wait to be let in
AGAIN_S = 0.01
TRIES = 3  # a host process that ends before it answers does so for a reason
SLICE_S = 0.1


def token_of(store: Store) -> str:
    """The same on all ranks of this host, in this start of the job."""
    name = f"offbeat/host/{hosts.restart()}/{hosts.home()}"
    return bytes(store.compare_set(name, "", secrets.token_hex(16))).decode()


def secret_of(store: Store) -> str:
    """What all host processes of this start of the job know, and nobody else."""
    return bytes(store.compare_set(f"offbeat/secret/{hosts.restart()}", "", secrets.token_hex(32))).decode()


def connect(token: str, rank: int, patience_s: float, starts: bool = True) -> tuple[socket.socket, Welcome, int]:
    """A line to the host process, what it said, and the arena's descriptor."""
    if sys.platform != "linux":
        raise OffbeatError(
            f"several workers train together on Linux, and this is {sys.platform}; one worker trains alone"
        )
    end_s, name, tries = time.monotonic() + patience_s, _name(token), 0
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(name)
            line.sendall(packed(Hello(token, rank)))
            welcome = _welcome(line, end_s)
            if welcome is not None:
                reap()
                return (line, *welcome)
        except (ConnectionError, FileNotFoundError):
            if not starts:
                line.close()
                raise OffbeatError(f"rank {rank} cannot come back: the others have ended; start a new job") from None
            if tries == TRIES:
                line.close()
                raise OffbeatError(
                    f"the host process has ended {TRIES} times before it answered; its errors are on stderr"
                ) from None
            tries += _start(name, token)
        except BaseException:
            line.close()
            raise
        line.close()
        if time.monotonic() > end_s:
            raise OffbeatError(f"the host process did not answer within {patience_s:g} s; its errors are on stderr")
        time.sleep(AGAIN_S)


def prepare(store: Store) -> None:
    """Start the host process, unless another worker has, or is about to."""
    if sys.platform != "linux":
        return  # whoever joins will say so
    token = token_of(store)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(_name(token))  # it hears a stranger that says nothing, and leaves
        except OSError:
            with suppress(OSError):  # whoever joins will find out
                _start(_name(token), token)


def _name(token: str) -> bytes:
    # Not the token itself: names of such sockets can be read by everybody on the machine.
    return b"\0offbeat-" + hashlib.sha256(b"name" + token.encode()).hexdigest()[:32].encode()


def _welcome(line: socket.socket, end_s: float) -> tuple[Welcome, int] | None:
    """None: it has closed the line without a word."""
    inbox, held = Inbox(), list[int]()
    line.settimeout(SLICE_S)
    while time.monotonic() < end_s:
        try:
            data, some, _, _ = socket.recv_fds(line, 4096, 4)
        except TimeoutError:  # a signal is heard in between
            continue
        held += some
        if not data:
            return None
        for message in inbox.feed(data):
            assert isinstance(message, Welcome)
            if not held:
                raise OffbeatError(_NO_ROOM)
            line.settimeout(None)
            return message, held[0]
    return None


_NO_ROOM = (
    "the host process hands its memory over as a file, and too many files are open; raise their limit (ulimit -n)"
)


def _start(name: bytes, token: str) -> bool:
    """Unless another worker is about to. Whether this one has."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(name)
        except OSError:
            return False
        listener.listen(QUEUE)
        spawn(listener, token)
        return True


def spawn_python(listener: socket.socket, token: str) -> None:
    """A process of its own: in a session of its own, so that what ends the workers' group does not end it.

    It is no child of this one, which may end or live on when it likes: the child that starts it has ended by then.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", _STARTS, process.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    assert child.stdin is not None
    with child.stdin as told:
        told.write(json.dumps({"listener": listener.fileno(), "token": token, "path": sys.path}).encode() + b"\n")
    children.append(child)


# The package's own faces import everything: this process needs torch and a few files. It is found where it lies.
_STARTS = """
import os, sys, types
if os.fork():
    os._exit(0)
package = os.path.abspath(os.path.join(os.path.dirname(sys.argv[1]), "..", ".."))
for name in ("", ".live"):
    module = types.ModuleType("offbeat" + name)
    module.__path__ = [os.path.join(package, *name.split("."))]
    sys.modules["offbeat" + name] = module
from offbeat.live.host.process import main
main()
"""

children: list[subprocess.Popen[bytes]] = []  # that started one, and that nobody has asked for how they ended
spawn: Callable[[socket.socket, str], None] = spawn_python


def reap() -> None:
    """Those that have ended are no zombies."""
    for child in list(children):
        if child.poll() is not None:
            children.remove(child)
