"""A hub in a process of its own, so that nobody's interpreter, and nobody's being stopped, holds up the others' rounds.

The process knows what it is to do from one line that it reads; after that its input is the ear at which it hears that
the run is given up, or that rank 0's process has ended. It imports neither torch nor numpy: it is there in some tens of
milliseconds, and small. (For that it gives the packages on the way empty doors: theirs import everything.)
"""

from __future__ import annotations

import json
import os
import socket
import sys
import types
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from offbeat.live.transport.hub import Entrance
    from offbeat.method.effects import Channel
    from offbeat.rounds.waiting import Wait

ENDING_S = 5.0
MOST_ROUNDS = 4096  # of a schedule, until it begins again

Plan = dict[str, Any]


class HubApart:
    """The process, as rank 0 sees it."""

    def __init__(self, plan: Plan, size: int, entrance: Entrance) -> None:
        import subprocess  # here and not above: the hub does not need it

        self.port = entrance.port
        descriptors = [listener.fileno() for listener in entrance.listeners]
        self._process = subprocess.Popen(
            # As a stranger to this environment: no site, no user's paths, not in our group, so that no Ctrl-C ends it.
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
        )
        line = json.dumps({**plan, "lines": size, "token": entrance.token.hex(), "listeners": descriptors})
        assert self._process.stdin is not None
        self._mouth = self._process.stdin
        self._mouth.write(line.encode() + b"\n")
        self._mouth.flush()
        for listener in entrance.listeners:
            listener.close()

    def join(self, timeout_s: float) -> None:
        """Wait until every worker has hung up."""
        self._wait(timeout_s)
        self.abandon()

    def abandon(self) -> None:
        """Hang up on everybody. What they have said by now is still passed on."""
        self._mouth.close()
        if not self._wait(ENDING_S):
            self._process.kill()
            self._process.wait()

    def _wait(self, seconds: float) -> bool:
        import subprocess

        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


# What it is to do, as one line.


def plan_of_channel(channel: Channel, size: int, per_node: int, seed: int, first_round: int) -> Plan | None:
    """For a channel's desk; None where something of the user's own is in it, which no line can say."""
    wait, period = _said(channel.rules.wait), getattr(channel.whom, "period", None)
    if wait is None or period is None or period > MOST_ROUNDS:
        return None
    rounds = [[channel.whom(version).block(rank) for rank in range(size)] for version in range(period)]
    rules = channel.rules
    return {
        "what": "desk",
        "rules": [wait, *[getattr(rules, one.name) for one in fields(rules)[1:]]],  # the first is how to wait
        "rounds": rounds,
        "nodes": [size * per_node, per_node],
        "seed": seed,
        "first_round": first_round,
    }


def _said(wait: Wait) -> str | float | None:
    from offbeat.rounds.waiting import AtLeast, First, Majority

    if type(wait) is AtLeast:
        return wait.quorum
    return wait.name if type(wait) in (First, Majority) else None


class OneRound(NamedTuple):
    """One round of a schedule: everybody's block."""

    blocks: list[tuple[int, ...] | None]

    def block(self, rank: int) -> tuple[int, ...] | None:
        return self.blocks[rank]


class Rounds:
    """A schedule that begins again."""

    def __init__(self, rounds: list[list[list[int] | None]]) -> None:
        self._rounds = [OneRound([None if b is None else tuple(b) for b in blocks]) for blocks in rounds]

    def __call__(self, version: int) -> Any:
        return self._rounds[version % len(self._rounds)]


def handler(plan: Plan) -> Any:
    """What hears the workers, in the hub's process."""
    from offbeat.live.partial.desk import Desk
    from offbeat.live.partial.meetings import Meetings
    from offbeat.live.partial.stacks import Slots
    from offbeat.rounds.rules import Rules
    from offbeat.rounds.waiting import rule
    from offbeat.topology.hierarchy import Nodes

    slots = Slots(**plan["slots"])
    if plan["what"] == "meetings":
        return Meetings(plan["size"], slots)
    wait, *settings = plan["rules"]
    rules, nodes = Rules(rule(wait), *settings), Nodes(*plan["nodes"])
    return Desk(rules, Rounds(plan["rounds"]), nodes, plan["seed"], plan["first_round"], slots)


def main() -> None:
    """The process itself."""
    package = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    for name in ("", ".live", ".live.partial", ".live.transport", ".topology", ".rounds", ".basics"):
        module = types.ModuleType(f"offbeat{name}")
        module.__path__ = [os.path.join(package, *name.split("."))]
        sys.modules[f"offbeat{name}"] = module
    from offbeat.live.transport.hub import Service

    plan = json.loads(_line())
    listeners = [socket.socket(fileno=number) for number in plan["listeners"]]
    Service(handler(plan), plan["lines"], bytes.fromhex(plan["token"]), listeners, Input()).run()


def _line() -> bytes:
    """Byte by byte: what comes after it is not ours to read."""
    read = bytearray()
    while (one := os.read(0, 1)) not in (b"\n", b""):
        read += one
    return bytes(read)


class Input:
    """The process's input; when it closes, the run is given up."""

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        """It ends with the process."""


if __name__ == "__main__":
    main()
