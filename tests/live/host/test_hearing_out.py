"""What a worker had said before it died is heard, though the kernel tells of its end first."""

from __future__ import annotations

import os
import selectors
import socket

import pytest

from offbeat.live.host import protocol as say
from offbeat.live.host.process import Connection, Host

KEY = "run/facts"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system tells of no ends")
def test_what_lies_in_the_line_of_a_dead_worker_is_heard_before_it_is_buried() -> None:
    listener = socket.socket(socket.AF_UNIX)
    host = Host(listener, "token")
    line, end = socket.socketpair()
    line.setblocking(False)
    worker = Connection(line, host._pages, host._arena)
    worker.is_known, worker.page, worker.pidfd = True, host._pages.pop(), os.pidfd_open(os.getpid())
    worker.inbox.longest = say.LONGEST
    host._connections.append(worker)
    for descriptor in (line, worker.pidfd):
        host._selector.register(descriptor, selectors.EVENT_READ, worker)
    plan = {"run": "run", "what": "facts", "size": 2, "homes": [], "ranks": [0, 1], "min_workers": 1}
    end.sendall(say.packed(say.OpenChannel(KEY, 0, plan, 0, False, False, 0)) + say.packed(say.Post(KEY, "late", "1")))
    host._call(host._selector.get_key(worker.pidfd), selectors.EVENT_READ)
    server = host._servers[KEY]
    assert server._facts == {"late": "1"}  # type: ignore[attr-defined]
    assert server._dead == {0}
    for one in (host._ear, host._mouth, host._selector, host._adders, end, listener):
        one.close()
