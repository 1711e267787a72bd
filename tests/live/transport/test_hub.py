"""The door of the hub: strangers do no harm, and clerks are let in whoever else stands there."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import offbeat as ob
from offbeat.live.partial.coordinator import Coordinator
from offbeat.live.transport import hub as hubs
from offbeat.live.transport.hub import HELLO, MOST_STRANGERS, Entrance, Frame, Hub, Word, connect, read_frame
from offbeat.rounds import waiting
from offbeat.rounds.referee import Referee
from offbeat.rounds.rules import Rules
from tests.support.nets import trained
from tests.support.scenarios import Told, scenario

TOKEN = bytes(range(16))


def hub_of(size: int) -> Hub:
    return Hub(Coordinator(Referee(Rules(waiting.first, "carry"), size, 0)), size, Entrance("127.0.0.1", TOKEN))


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = hub_of(2)
    yield hub
    hub.abandon()


def told(hub: Hub) -> str:
    return json.dumps(["127.0.0.1", hub.port, TOKEN.hex()])


def knock(hub: Hub, says: bytes = b"") -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", hub.port), timeout=60)
    stranger.sendall(says)
    return stranger


def is_sent_away(stranger: socket.socket) -> bool:
    with stranger:
        try:
            return stranger.recv(1) == b""
        except ConnectionResetError:
            return True


def one_round(hub: Hub) -> None:
    """Both clerks come and rank 1 arrives; both hear "go"."""
    clerks = [connect(told(hub), rank) for rank in (0, 1)]
    clerks[1].sendall(Frame(Word.ARRIVED, 1, 0, 0).pack())
    for clerk in clerks:
        clerk.settimeout(60)  # 40 strangers who were waited for would take longer
        assert read_frame(clerk) == Frame(Word.GO, 0, 0, 1)
    for clerk in clerks:
        clerk.close()


def test_strangers_who_say_nothing_delay_nobody(hub: Hub) -> None:
    strangers = [knock(hub) for _ in range(20)] + [knock(hub, b"\0") for _ in range(20)]
    one_round(hub)
    assert all(is_sent_away(stranger) for stranger in strangers)


@pytest.mark.parametrize(
    "says",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff" * 5000,
        HELLO.pack(b"x" * 16, 0),
        HELLO.pack(TOKEN, 2),
    ],
    ids=["a browser", "noise", "a wrong token", "a rank that is not there"],
)
def test_who_says_something_else_is_sent_away_and_delays_nobody(hub: Hub, says: bytes) -> None:
    assert is_sent_away(knock(hub, says))
    one_round(hub)


def test_a_rank_comes_only_once(hub: Hub) -> None:
    first = knock(hub, HELLO.pack(TOKEN, 0))
    assert is_sent_away(knock(hub, HELLO.pack(TOKEN, 0)))
    first.close()


def test_the_oldest_of_too_many_strangers_is_sent_away(hub: Hub) -> None:
    strangers = [knock(hub) for _ in range(MOST_STRANGERS + 1)]
    assert is_sent_away(strangers[0])
    one_round(hub)
    assert all(is_sent_away(stranger) for stranger in strangers[1:])


def test_the_door_is_shut_when_all_have_come(hub: Hub) -> None:
    one_round(hub)
    with pytest.raises(ConnectionRefusedError):
        knock(hub)


def test_a_hub_that_is_given_up_hangs_up_on_everybody() -> None:
    hub = hub_of(3)
    clerk, stranger = connect(told(hub), 0), knock(hub)
    hub.abandon()
    assert read_frame(clerk) is None
    assert is_sent_away(stranger)
    clerk.close()


def families(hub: Hub) -> list[int]:
    """Of both clerks' connections."""
    clerks = [connect(told(hub), rank) for rank in (0, 1)]
    for clerk in clerks:
        clerk.close()
    return [clerk.family for clerk in clerks]


def test_on_its_own_host_a_hub_is_spoken_to_without_the_network(hub: Hub) -> None:
    assert families(hub) == [socket.AF_UNIX] * 2


def test_where_its_unix_socket_is_not_found_a_hub_is_spoken_to_over_tcp(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs, "_unix_name", lambda token: b"\0nobody-is-here")
    assert families(hub) == [socket.AF_INET] * 2


METHODS = (ob.eager(), ob.self_clocked(), ob.ad_psgd(), ob.allreduce())


def dialled(rank: int, strategy: ob.Strategy) -> int:
    """How many connections this rank makes over TCP in a run."""
    made, dial = list[Any](), socket.create_connection

    def counted(address: Any, *args: Any, **named: Any) -> socket.socket:
        made.append(address)
        return dial(address, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", counted)
        trained(rank, strategy, steps=2)
    return len(made)


@scenario(2)
def on_one_host(rank: int) -> list[int]:
    return [dialled(rank, strategy) for strategy in METHODS]


@pytest.mark.live
def test_in_a_run_on_one_host_nobody_is_spoken_to_over_tcp(told: Told) -> None:
    assert told(on_one_host) == [[0] * len(METHODS)] * 2
