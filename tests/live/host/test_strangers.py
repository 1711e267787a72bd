"""Who talks to a host process without belonging to its job, or talks nonsense, disturbs no step of anybody.

Every round of these runs needs both workers, and the stranger is there while they take place: if the host process
listened to it, or fell over what it says, no round would.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.live.host.process import MOST_STRANGERS
from offbeat.live.host.protocol import (
    HEAD,
    KINDS,
    LONGEST_HELLO,
    AddStep,
    Close,
    Hello,
    OpenChannel,
    Release,
    Submit,
    Welcome,
    packed,
)
from offbeat.live.worker import line as lines
from offbeat.live.worker import start
from tests.support.nets import PATIENCE_S
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

SIZE, STEPS, MANY = 2, 3, 1000
CLOSED, STAYS = "closed", "stays"


def message(body: bytes, kind: type[Any] = Hello, length: int | None = None) -> bytes:
    return HEAD.pack(len(body) if length is None else length, KINDS.index(kind)) + body


def as_json(*values: Any) -> bytes:
    return json.dumps(values).encode()


WRONG = "0" * 32
# What is said without the job's token, and whether the connection is closed then.
STRANGERS: dict[str, tuple[bytes, str]] = {
    "silence": (b"", STAYS),
    "one byte": (b"\x20", STAYS),
    "half a message": (packed(Hello(WRONG, 0))[:-3], STAYS),
    "a wrong token": (packed(Hello(WRONG, 0)), CLOSED),
    "no token": (packed(Hello("", 0)), CLOSED),
    "a token in other letters": (packed(Hello("é" * 32, 0)), CLOSED),
    "a token that is half a letter": (message(b'["\\ud800",0]'), CLOSED),
    "a token that is no text": (message(as_json([WRONG], 0)), CLOSED),
    "a token that is a number": (message(as_json(0, 0)), CLOSED),
    "garbage": (random.Random(0).randbytes(5000), CLOSED),
    "a request for a page": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", CLOSED),
    "4 GiB to come": (message(b"", length=(1 << 32) - 1), CLOSED),
    "a long greeting to come": (message(b"", length=LONGEST_HELLO + 1), CLOSED),
    "an object": (message(b'{"token": "", "rank": 0}'), CLOSED),
    "fewer values": (message(as_json(WRONG)), CLOSED),
    "more values": (message(as_json(WRONG, 0, 0)), CLOSED),
    "no JSON": (message(b"token"), CLOSED),
    "no text": (message(b'["\xff\xfe", 0]'), CLOSED),
    "deep JSON": (message(b"[" * LONGEST_HELLO), CLOSED),
    "nothing at all": (message(b""), CLOSED),
    "a kind that does not exist": (HEAD.pack(2, 255) + b"[]", CLOSED),
    "a worker's message": (packed(Release("1/eager", 0, 0)), CLOSED),
}
ENDLESS = {"what": "weights", "run": "", "size": 2, "kinds": [["float64", 1 << 60]], "parameters": 0, "gpus": []}
# What is said by one who has shown the token. ``key``: of the channel at which the others train.
Says = Callable[[str], bytes]
OF_THE_JOB: dict[str, tuple[Says, str]] = {
    "half a message, known": (lambda key: packed(Release(key, 0, 0))[:-3], STAYS),
    "garbage, known": (lambda key: b"\xff" * 5000, CLOSED),
    "4 GiB to come, known": (lambda key: message(b"", Submit, (1 << 32) - 1), CLOSED),
    "a kind that does not exist, known": (lambda key: HEAD.pack(2, 255) + b"[]", CLOSED),
    "deep JSON, known": (lambda key: message(b"[" * 100_000, Submit), CLOSED),
    "a second greeting": (lambda key: packed(Hello(WRONG, 0)), CLOSED),
    "a welcome": (lambda key: packed(Welcome(0, 0, 0)), CLOSED),
    "a channel that is none": (lambda key: message(as_json([1], 0, 0, 0, 0, 0), Submit), CLOSED),
    "a channel that it has not come to": (lambda key: packed(Submit(key, 0, 0, -1, 0, 0)), STAYS),
    "a word that is no number": (lambda key: message(as_json(key, 0, "x"), Release), CLOSED),
    "a word of a channel that it has not come to": (lambda key: packed(AddStep(key, 0, 0, 7)), STAYS),
    "a channel without a plan": (lambda key: message(as_json("new", 0, {}, 0, False, False, 0), OpenChannel), STAYS),
    "a word that no page has": (lambda key: packed(OpenChannel("new", 0, {}, 0, False, False, 1 << 40)), STAYS),
    "a plan that is a list": (lambda key: message(as_json("new", 0, [], 0, False, False, 0), OpenChannel), CLOSED),
    "a plan of endless memory": (lambda key: packed(OpenChannel("new", 0, ENDLESS, 0, False, False, 0)), STAYS),
    "the end of a channel that it has not come to": (lambda key: packed(Close(key)), STAYS),
}  # fmt: skip


class Run:
    """Steps of both workers, in each of which every number grows by one."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = ob.attach(inner, self.model, ob.eager("everyone"), patience_s=PATIENCE_S)
        self.steps()
        (self.line,) = lines._lines.values()
        (self.key,) = [key for key in self.line._heard if key.endswith("/eager")]

    def steps(self) -> None:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            (-self.model.weight.sum()).backward()
            self.optimizer.step()

    def finish(self) -> float:
        self.optimizer.finish()
        return self.model.weight[0, 0].item()


def knock(token: str) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(start._name(token))
    return line


def is_closed(line: socket.socket, expected: str) -> str:
    """Waits for it where that is expected. What is said before does not matter."""
    line.settimeout(20.0 if expected == CLOSED else 0.0)
    try:
        while line.recv(1 << 16):
            pass
    except (TimeoutError, BlockingIOError):
        return STAYS
    except ConnectionError:
        pass
    return CLOSED


@scenario(SIZE)
def beside_strangers(rank: int) -> tuple[dict[str, str], float]:
    """What became of each stranger's connection, which rank 0 has; and what the steps beside them came to."""
    run, seen = Run(), dict[str, str]()
    for name, (says, expected) in STRANGERS.items():
        stranger = knock(run.line.token) if rank == 0 else None
        if stranger is not None:
            stranger.sendall(says)
        run.steps()
        if stranger is not None:
            seen[name] = is_closed(stranger, expected)
            stranger.close()
    for name, (speaks, expected) in OF_THE_JOB.items():
        known = start.connect(run.line.token, rank, PATIENCE_S)[0] if rank == 0 else None
        if known is not None:
            known.sendall(speaks(run.key))
        run.steps()
        if known is not None:
            seen[name] = is_closed(known, expected)
            known.close()
        run.steps()
    return seen, run.finish()


@pytest.mark.parametrize("name", [*STRANGERS, *OF_THE_JOB])
def test_who_talks_nonsense_is_hung_up_on_and_disturbs_no_step(told: Told, name: str) -> None:
    (seen, reached), (_, also) = told(beside_strangers)
    assert seen[name] == {**STRANGERS, **OF_THE_JOB}[name][1]
    assert reached == also == STEPS * (1 + len(STRANGERS) + 2 * len(OF_THE_JOB))


@scenario(SIZE)
def beside_many(rank: int) -> tuple[int, bool, float]:
    """How many of a thousand silent connections are closed, and whether another worker is let in beside the others."""
    run, idle, is_let_in = Run(), list[socket.socket](), False
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if rank == 0:
        idle = [knock(run.line.token) for _ in range(MANY)]
    run.steps()
    if rank == 0:
        line, welcome, descriptor = start.connect(run.line.token, rank, PATIENCE_S)
        is_let_in = welcome.pid == run.line.host_pid
        run.steps()
        line.close()
        os.close(descriptor)
    else:
        run.steps()
    oldest = idle[: MANY - MOST_STRANGERS]
    closed = len(list(takewhile(lambda one: is_closed(one, CLOSED) == CLOSED, oldest)))
    for one in idle:
        one.close()
    run.steps()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return closed, is_let_in, run.finish()


def test_a_thousand_idle_connections_keep_nobody_out_and_the_oldest_must_go(told: Told) -> None:
    (closed, is_let_in, reached), (_, _, also) = told(beside_many)
    assert closed == MANY - MOST_STRANGERS
    assert is_let_in
    assert reached == also == 4 * STEPS


@scenario(SIZE)
def of_names(rank: int) -> tuple[str, list[str], float]:
    run = Run()
    names = [one.split()[-1] for one in Path("/proc/net/unix").read_text(errors="replace").splitlines()]
    shown = [name for name in names if name == "@" + start._name(run.line.token)[1:].decode()]
    said = [Path(f"/proc/{run.line.host_pid}/{what}").read_text(errors="replace") for what in ("cmdline", "environ")]
    return run.line.token, [*shown, *said], run.finish()


def test_nobody_reads_the_token_in_a_sockets_name(told: Told) -> None:
    for token, shown, _ in told(of_names):
        assert shown[0].startswith("@offbeat-")
        assert not [one for one in shown if token in one]
