"""What two host processes send each other comes once and in order, whatever happens to their connection, and no
stranger gets in.

All of it takes place in one process with one loop. Where a test does something to a connection, a cable lies between
the two: it passes on what it gets, until the test cuts it, stalls it or puts something in.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.live.host import links
from offbeat.live.host.links import MOST_UNPROVED, TURN_BYTES, Links
from offbeat.live.host.protocol import (
    HEAD,
    KINDS,
    LONGEST,
    LONGEST_HELLO,
    Challenge,
    Inbox,
    Knock,
    Post,
    Proof,
    Release,
    packed,
)
from tests.support.nets import PATIENCE_S

SECRET, LOOPBACK = b"the job's secret", "127.0.0.1"
MB = 1 << 20


class Loop:
    """The turns of a host process's loop, here for several host processes together."""

    def __init__(self) -> None:
        self.selector, self.sides, self.turns = selectors.DefaultSelector(), list[Side](), 0
        self.now_s = time.monotonic

    def turn(self) -> None:
        wakes = [one for side in self.sides if (one := side.links.wakes_s) is not None]
        pause_s = min([0.05, *(max(0.0, one - self.now_s()) for one in wakes)])
        for key, _ in self.selector.select(pause_s):
            key.data()
        for side in self.sides:
            side.links.on_time(self.now_s())
            side.links.flush()
        self.turns += 1

    def until(self, is_so: Callable[[], bool], what: str = "it") -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < ends_s, f"{what} does not come"
            self.turn()

    def close(self) -> None:
        for side in self.sides:
            side.links.close()
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.selector.close()


class Side:
    """One host process: its links, and what it has heard."""

    def __init__(self, loop: Loop, name: str, secret: bytes = SECRET) -> None:
        self.heard, self.lost = list[tuple[str, Any]](), dict[str, str]()
        self.rooms, self.asked = dict[str, bytearray](), list[str]()
        self.links = Links(name, secret, loop.selector, self._hear, self._room, self._lost)
        self.name, self.at = name, self.links.listen(LOOPBACK)
        loop.sides.append(self)

    def _hear(self, peer: str, message: Any) -> None:
        self.heard.append((peer, message))

    def _room(self, peer: str, message: Any, nbytes: int) -> list[memoryview]:
        """In two parts."""
        self.asked.append(message.name)
        self.rooms[message.name] = made = bytearray(nbytes)
        return [memoryview(made)[: nbytes // 3], memoryview(made)[nbytes // 3 :]]

    def _lost(self, peer: str, words: str) -> None:
        assert peer not in self.lost
        self.lost[peer] = words

    def said(self, name: str) -> Post:
        return Post(self.name, name, "")

    def names(self, peer: str) -> list[str]:
        return [message.name for one, message in self.heard if one == peer]


def meet(one: Side, other: Side) -> None:
    one.links.know(other.name, *other.at)
    other.links.know(one.name, *one.at)


class Cable:
    """Between those who dial it and ``target``. ``said``: what the first who dialled has said."""

    def __init__(self, loop: Loop, target: tuple[str, int]) -> None:
        self._loop, self._target, self.ends = loop, target, dict[socket.socket, socket.socket]()
        self._late, self.said, self.stalls, self.cut_after, self.cuts = dict[socket.socket, bytes](), b"", False, -1, 0
        self._listener = socket.create_server((LOOPBACK, 0))
        self._listener.setblocking(False)
        self.at = self._listener.getsockname()
        loop.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        for one, other in ((near, far), (far, near)):
            self.ends[one], self._late[one] = other, b""
            one.setblocking(False)
            self._loop.selector.register(one, selectors.EVENT_READ, lambda end=one: self._pass(end))
        self._first = near if not self.said else None

    def _pass(self, end: socket.socket) -> None:
        other = self.ends.get(end)
        if other is None or self.stalls:
            return
        try:
            data = self._late[end] or end.recv(1 << 18)
            if not data:
                raise ConnectionError
            if end is self._first:
                self.said += data[: 1 << 12]
            sent = 0
            with contextlib.suppress(BlockingIOError):
                sent = other.send(data)
            self._late[end] = data[sent:]
        except BlockingIOError:
            return
        except OSError:
            self._close(end)
            return
        if self.cut_after > 0:
            self.cut_after -= sent
            if self.cut_after <= 0:
                self.cut()

    def _close(self, end: socket.socket) -> None:
        for one in (end, self.ends.get(end)):
            if one in self.ends:
                del self.ends[one]
                self._loop.selector.unregister(one)
                one.close()

    def cut(self) -> None:
        self.cut_after, self.cuts = -1, self.cuts + 1
        for end in list(self.ends):
            self._close(end)

    def put_in(self, data: bytes) -> None:
        """Towards the one who was dialled."""
        [far] = [one for one in self.ends if one.getpeername() == self._target]
        far.sendall(data)

    def unplug(self) -> None:
        self._loop.selector.unregister(self._listener)
        self._listener.close()
        self.cut()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def two(loop: Loop) -> tuple[Side, Side]:
    a, b = Side(loop, "a"), Side(loop, "b")
    meet(a, b)
    return a, b


def by_cable(loop: Loop) -> tuple[Side, Side, Cable]:
    a, b = Side(loop, "a"), Side(loop, "b")
    cable = Cable(loop, a.at)
    a.links.know("b", *b.at)
    b.links.know("a", *cable.at)
    return a, b, cable


def greeted(loop: Loop, *sides: Side) -> None:
    """They are connected."""
    for one in sides:
        for other in sides:
            if one is not other:
                one.links.send(other.name, one.said("good day"))
    loop.until(lambda: all(side.names(o.name) == ["good day"] for side in sides for o in sides if o is not side))
    for side in sides:
        side.heard.clear()


# What is sent.


def test_messages_and_vectors_come_both_ways_also_when_sent_before_there_is_a_connection(loop: Loop) -> None:
    a, b = Side(loop, "a"), Side(loop, "b")
    meet(a, b)
    vectors = {name: random.Random(name).randbytes(3 * MB + 17) for name in ("of a", "of b")}
    parts = memoryview(vectors["of a"])
    a.links.send("b", a.said("small"))
    a.links.send("b", a.said("of a"), [parts[:100], parts[100:100], parts[100:]])
    b.links.send("a", b.said("of b"), [memoryview(vectors["of b"])])
    loop.until(lambda: len(a.heard) == 1 and len(b.heard) == 2)
    assert b.rooms == {"of a": vectors["of a"]}
    assert a.rooms == {"of b": vectors["of b"]}
    assert sorted(b.names("a")) == ["of a", "small"]


def test_a_message_overtakes_a_vector_and_a_turn_of_the_loop_moves_a_bounded_part_of_it(
    loop: Loop, two: tuple[Side, Side]
) -> None:
    a, b = two
    greeted(loop, a, b)
    a.links.send("b", a.said("vector"), [memoryview(bytes(64 * MB))])
    loop.until(lambda: b.asked == ["vector"])
    begun = loop.turns
    a.links.send("b", a.said("small"))
    loop.until(lambda: len(b.heard) == 2)
    assert b.names("a") == ["small", "vector"]
    assert loop.turns - begun >= 64 * MB // (2 * TURN_BYTES)


def test_messages_keep_their_order_and_vectors_keep_theirs(loop: Loop, two: tuple[Side, Side]) -> None:
    a, b = two
    for k in range(50):
        a.links.send("b", a.said(f"m{k}"))
        a.links.send("b", a.said(f"v{k}"), [memoryview(bytes(100_000))])
    loop.until(lambda: len(b.heard) == 100)
    for sort in "mv":
        assert [name for name in b.names("a") if name[0] == sort] == [f"{sort}{k}" for k in range(50)]


def test_acknowledged_is_called_once_and_not_before_the_peer_has_it(loop: Loop, two: tuple[Side, Side]) -> None:
    a, b = two
    had = dict[str, list[bool]]()
    for name, vector in {"small": b"", "vector": bytes(8 * MB), "last": b""}.items():

        def acknowledged(name: str = name) -> None:
            had.setdefault(name, []).append(name in b.names("a"))

        a.links.send("b", a.said(name), [memoryview(vector)], acknowledged)
    assert a.links.owes("b") == 3
    loop.until(lambda: len(had) == 3)
    assert had == {"small": [True], "vector": [True], "last": [True]}
    assert a.links.owes("b") == 0


def test_a_vector_without_room_is_dropped_and_what_follows_is_heard(loop: Loop) -> None:
    a, b = Side(loop, "a"), Side(loop, "b")
    b.links._room = lambda peer, message, nbytes: ()
    meet(a, b)
    for name in ("one", "two"):
        a.links.send("b", a.said(name), [memoryview(bytes(2 * MB))])
    loop.until(lambda: b.names("a") == ["one", "two"])


# Connections that break.


@pytest.mark.parametrize("seed", range(4))
def test_everything_comes_exactly_once_over_a_cable_that_is_cut_again_and_again(loop: Loop, seed: int) -> None:
    a, b, cable = by_cable(loop)
    draw, cuts = random.Random(seed), 25
    sent, done = dict[str, bytes](), list[str]()
    for k in range(150):
        for one, other in ((a, b), (b, a)):
            name = f"{one.name}{k}"
            sent[name] = draw.randbytes(draw.randrange(1, 700_000)) if k % 3 == 0 else b""

            def acknowledged(name: str = name, other: Side = other, peer: str = one.name) -> None:
                assert name in other.names(peer)
                done.append(name)

            one.links.send(other.name, one.said(name), [memoryview(sent[name])], acknowledged)

    def is_over() -> bool:
        if cable.cuts < cuts and cable.cut_after < 0:
            cable.cut_after = draw.choice([3, 300, 3_000, 300_000, 3_000_000])
        return len(done) == len(sent)

    loop.until(is_over)
    assert cable.cuts >= cuts // 2
    assert sorted(done) == sorted(sent)
    for one, other in ((a, b), (b, a)):
        heard = one.names(other.name)
        names = [f"{other.name}{k}" for k in range(150)]
        assert [name for name in heard if not sent[name]] == [name for name in names if not sent[name]]
        assert [name for name in heard if sent[name]] == one.asked == [name for name in names if sent[name]]
        assert all(one.rooms[name] == sent[name] for name in one.asked)
    assert not a.lost
    assert not b.lost


def test_a_new_connection_of_a_peer_takes_the_place_of_one_that_only_looks_alive(loop: Loop) -> None:
    a, b, cable = by_cable(loop)
    greeted(loop, a, b)
    [near] = [end for end in cable.ends if end.getsockname() == cable.at]
    far = cable.ends.pop(near)
    loop.selector.unregister(near)
    loop.selector.unregister(far)
    a.links.send("b", a.said("on its way"))
    loop.turn()
    near.close()  # b sees that; what a has said goes to nobody
    b.links.send("a", b.said("here again"))
    loop.until(lambda: bool(a.heard and b.heard))
    assert (a.names("b"), b.names("a")) == (["here again"], ["on its way"])
    assert not a.lost
    far.close()


def test_a_peer_that_says_goodbye_is_lost_at_once_with_what_it_said_before(loop: Loop, two: tuple[Side, Side]) -> None:
    a, b = two
    greeted(loop, a, b)
    b.links.send("a", b.said("last words"))
    b.links.close()
    loop.until(lambda: bool(a.lost))
    assert a.names("b") == ["last words"]
    assert a.lost == {"b": "it has ended"}
    a.links.send("b", a.said("into the void"))
    assert a.links.owes("b") == 0


def test_a_peer_that_nobody_listens_for_any_more_is_lost_soon(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "REFUSED_S", 0.3)
    a, b, cable = by_cable(loop)
    greeted(loop, a, b)
    with socket.create_server((LOOPBACK, 0)) as ended:
        a.links.know("b", *ended.getsockname())
    cable.unplug()
    loop.until(lambda: bool(a.lost and b.lost))
    assert "nobody listens" in a.lost["b"]
    assert "nobody listens" in b.lost["a"]


def test_a_peer_that_does_not_come_back_is_lost_after_a_while(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, cable = by_cable(loop)
    greeted(loop, a, b)
    monkeypatch.setattr(links, "REDIAL_S", 1.0)
    cable.stalls = True
    cable.cut()
    loop.until(lambda: bool(a.lost and b.lost))
    assert list(a.lost) == ["b"]
    assert list(b.lost) == ["a"]


def test_a_peer_that_gives_no_sign_of_life_is_lost_though_its_connection_stands(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("BEAT_S", 0.1), ("SILENT_S", 0.5), ("REDIAL_S", 0.5), ("PROOF_S", 0.2)):
        monkeypatch.setattr(links, name, seconds)
    a, b, cable = by_cable(loop)
    greeted(loop, a, b)
    cable.stalls = True
    loop.until(lambda: bool(a.lost and b.lost))
    assert "no connection came about in" in a.lost["b"]


def test_peers_that_have_nothing_to_say_are_not_lost(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT_S", 0.1), ("SILENT_S", 0.5), ("REDIAL_S", 0.5)):
        monkeypatch.setattr(links, name, seconds)
    a, b, _ = by_cable(loop)
    greeted(loop, a, b)
    end_s = time.monotonic() + 1.5
    loop.until(lambda: time.monotonic() > end_s)
    assert not a.lost
    assert not b.lost
    assert all(peer.is_connected for peer in (*a.links.peers(), *b.links.peers()))


def test_a_peer_that_was_parted_with_hears_why_and_does_not_come_back(loop: Loop, two: tuple[Side, Side]) -> None:
    a, b = two
    greeted(loop, a, b)
    a.links.part_with("b", "the others go on without it")
    loop.until(lambda: bool(a.lost and b.lost))
    assert a.lost == {"b": "the others go on without it"}
    assert "the others go on without it" in b.lost["a"]


def test_a_later_process_of_the_same_name_is_another_peer(loop: Loop) -> None:
    a, b = Side(loop, "a"), Side(loop, "b")
    meet(a, b)
    greeted(loop, a, b)
    later = Side(loop, "b")
    later.links.know("a", *a.at)
    later.links.send("a", later.said("I am new"))
    loop.until(lambda: bool(a.lost and b.lost and later.lost))
    assert "another of its name" in a.lost["b"]
    assert a.heard == []
    a.links.forget("b")
    a.lost.clear()
    newest = Side(loop, "b")
    meet(a, newest)
    greeted(loop, a, newest)
    assert not a.lost


# Others.


def test_a_peer_that_is_stalled_delays_no_other(loop: Loop) -> None:
    a, b, cable = by_cable(loop)
    c = Side(loop, "c")
    meet(a, c)
    greeted(loop, a, b)
    cable.stalls = True
    a.links.send("b", a.said("stuck"), [memoryview(bytes(64 * MB))])
    b.links.send("a", b.said("stuck"), [memoryview(bytes(64 * MB))])
    a.links.send("b", a.said("stuck too"))
    for k in range(20):
        a.links.send("c", a.said(f"{k}"), [memoryview(bytes(MB))])
        c.links.send("a", c.said(f"{k}"))
    loop.until(lambda: len(c.heard) == 20 and len(a.names("c")) == 20)
    assert b.heard == []
    cable.stalls = False
    loop.until(lambda: sorted(b.names("a")) == ["stuck", "stuck too"] and a.names("b") == ["stuck"])


def frame(kind: int, length: int, number: int = 0, heard: int = 0, body: bytes = b"") -> bytes:
    return links._FRAME.pack(kind, length, number, heard, 0, 0.0) + body


POSTED = packed(Post("b", "planted", ""))
NONSENSE = {
    "a kind that does not exist": frame(9, 0),
    "a message of 4 GiB": frame(0, (1 << 32) - 1, 1),
    "a message that is a little too long": frame(0, LONGEST + HEAD.size + 1, 1),
    "a message of another number": frame(0, len(POSTED), 5, 0, POSTED),
    "a message that was heard before": frame(0, len(POSTED), 0, 0, POSTED),
    "a chunk without a vector": frame(2, 100, 0),
    "a vector of no bytes": frame(1, 8 + len(POSTED), 0, 0, bytes(8) + POSTED),
    "a vector without a message": frame(1, 8, 0),
    "endless chunks": frame(1, 8 + len(POSTED), 0, 0, (100).to_bytes(8, "little") + POSTED) + frame(2, 101, 0),
    "that it has heard more than was said": frame(3, 0, 0, 1000),
    "a message that cannot be read": frame(0, 7, 1, 0, HEAD.pack(2, KINDS.index(Post)) + b"{}"),
    "two messages in one": frame(0, 2 * len(POSTED), 1, 0, 2 * POSTED),
    "half a message in one": frame(0, len(POSTED) - 1, 1, 0, POSTED[:-1]),
    "bytes": b"\xff" * 5000,
}


@pytest.mark.parametrize("name", NONSENSE)
def test_who_is_of_the_job_and_talks_nonsense_is_lost_and_nobody_else_is(loop: Loop, name: str) -> None:
    a, b, cable = by_cable(loop)
    c = Side(loop, "c")
    meet(a, c)
    greeted(loop, a, b)
    loop.until(lambda: a.links.owes("b") == b.links.owes("a") == 0)
    cable.put_in(NONSENSE[name])
    loop.until(lambda: bool(a.lost and b.lost))
    assert a.lost["b"].startswith("it said ")
    greeted(loop, a, c)
    assert list(a.lost) == ["b"]
    assert a.heard == []


def test_a_vector_that_does_not_fit_its_room_is_not_received(loop: Loop, two: tuple[Side, Side]) -> None:
    a, b = two
    small = bytearray(10)
    b.links._room = lambda peer, message, nbytes: [memoryview(small)]
    a.links.send("b", a.said("long"), [memoryview(b"x" * 1000)])
    loop.until(lambda: bool(b.lost))
    assert "1000 bytes for a room of 10" in b.lost["a"]
    assert small == bytes(10)


# Strangers.


def knock_with(at: tuple[str, int], data: bytes) -> socket.socket:
    line = socket.create_connection(at)
    line.sendall(data)
    line.setblocking(False)
    return line


def is_closed(line: socket.socket) -> bool:
    try:
        while line.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def hello(body: bytes, kind: type[Any] = Knock, length: int | None = None) -> bytes:
    return HEAD.pack(len(body) if length is None else length, KINDS.index(kind)) + body


STAYS = {
    "silence": b"",
    "one byte": b"\x20",
    "half a knock": packed(Knock(links.VERSION, "b", "a", "", ""))[:-3],
    "a knock and no proof": packed(Knock(links.VERSION, "b", "a", "", "")),
}
CLOSED = {
    "garbage": random.Random(0).randbytes(5000),
    "a request for a page": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "4 GiB to come": hello(b"", length=(1 << 32) - 1),
    "a long knock to come": hello(b"", length=LONGEST_HELLO + 1),
    "no JSON": hello(b"knock"),
    "deep JSON": hello(b"[" * LONGEST_HELLO),
    "fewer values": hello(json.dumps([1, "b"]).encode()),
    "another version": packed(Knock(99, "b", "a", "", "")),
    "a knock at another's door": packed(Knock(links.VERSION, "b", "c", "", "")),
    "the name of one who does not dial": packed(Knock(links.VERSION, "A", "a", "", "")),
    "its own name": packed(Knock(links.VERSION, "a", "a", "", "")),
    "a long name": packed(Knock(links.VERSION, "b" * 300, "a", "", "")),
    "a worker's message": packed(Release("1/eager", 0, 0)),
    "a proof before a knock": packed(Proof("", 0, 0, -1)),
    "a proof that is none": packed(Knock(links.VERSION, "b", "a", "", "")) + packed(Proof("0" * 64, 0, 0, -1)),
    "a proof in other letters": packed(Knock(links.VERSION, "b", "a", "", "")) + hello(b'["\\ud800",0,0,-1]', Proof),
    "a message in place of a proof": packed(Knock(links.VERSION, "b", "a", "", "")) + packed(Post("b", "x", "")),
}


@pytest.mark.parametrize("name", [*STAYS, *CLOSED])
def test_a_stranger_is_not_listened_to_and_disturbs_nobody(loop: Loop, name: str) -> None:
    a = Side(loop, "a")
    stranger = knock_with(a.at, {**STAYS, **CLOSED}[name])
    if name in CLOSED:
        loop.until(lambda: is_closed(stranger))
    b = Side(loop, "b")
    meet(a, b)
    greeted(loop, a, b)
    assert is_closed(stranger) == (name in CLOSED)
    assert a.heard == []
    assert not a.lost
    stranger.close()


def test_a_stranger_has_little_time(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PROOF_S", 0.2)
    a = Side(loop, "a")
    lines = [knock_with(a.at, data) for data in STAYS.values()]
    loop.until(lambda: all(map(is_closed, lines)))
    for line in lines:
        line.close()


def test_a_thousand_idle_connections_keep_nobody_out_and_the_oldest_must_go(loop: Loop) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    a, idle = Side(loop, "a"), list[socket.socket]()
    for _ in range(1000):
        idle.append(knock_with(a.at, b""))
        loop.turn()
    loop.until(lambda: all(map(is_closed, idle[: 1000 - MOST_UNPROVED])))
    assert not any(map(is_closed, idle[1000 - MOST_UNPROVED :]))
    b = Side(loop, "b")
    meet(a, b)
    greeted(loop, a, b)
    for line in idle:
        line.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_has_another_secret_is_not_heard_and_says_why(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "REDIAL_S", 0.5)
    a, b = Side(loop, "a"), Side(loop, "b", b"another secret")
    meet(a, b)
    b.links.send("a", b.said("let me in"))
    loop.until(lambda: bool(b.lost))
    assert a.heard == []
    assert "does it have the job's secret?" in b.lost["a"]


def test_what_was_said_once_proves_nothing_the_second_time(loop: Loop) -> None:
    a, b, cable = by_cable(loop)
    greeted(loop, a, b)
    again = knock_with(a.at, cable.said)
    loop.until(lambda: is_closed(again))
    assert a.heard == []
    assert not a.lost
    greeted(loop, a, b)
    again.close()


def test_a_proof_that_is_reflected_proves_nothing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody without the secret listens where b believes a, and gives back whatever b says."""
    monkeypatch.setattr(links, "REDIAL_S", 0.5)
    b, mirror = Side(loop, "b"), socket.create_server((LOOPBACK, 0))
    mirror.setblocking(False)
    proved = list[Proof]()

    def reflect() -> None:
        line, _ = mirror.accept()
        inbox = Inbox()

        def on_ready() -> None:
            data = line.recv(1 << 12)
            for message in inbox.feed(data) if data else ():
                if isinstance(message, Knock):
                    line.sendall(packed(Challenge(message.nonce, message.life)))
                elif isinstance(message, Proof):
                    proved.append(message)
                    line.sendall(packed(message))
            if not data:
                loop.selector.unregister(line)
                line.close()

        loop.selector.register(line, selectors.EVENT_READ, on_ready)

    loop.selector.register(mirror, selectors.EVENT_READ, reflect)
    b.links.know("a", *mirror.getsockname())
    b.links.send("a", b.said("a secret"))
    loop.until(lambda: bool(b.lost))
    assert proved
    assert "no proof" in b.lost["a"]


def test_nothing_listens_at_another_address_of_the_host(loop: Loop) -> None:
    a = Side(loop, "a")
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", a.at[1]))
    assert a.links.listen(LOOPBACK) == a.at
    for every in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="every network"):
            Links("x", SECRET, loop.selector, a._hear, a._room, a._lost).listen(every)


def test_what_cannot_be_is_refused_in_a_sentence(loop: Loop) -> None:
    a = Side(loop, "a")
    with pytest.raises(KeyError, match="knows no host process z"):
        a.links.send("z", a.said("x"))
    with pytest.raises(ValueError, match="name of this host process itself"):
        a.links.know("a", *a.at)
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 address"):
        a.links.know("b", "a.name.that.takes.time.to.look.up", 1)
    with pytest.raises(ValueError, match="listens at"):
        a.links.listen("127.0.0.2")
    with pytest.raises(ValueError, match="secret is empty"):
        Links("x", b"", loop.selector, a._hear, a._room, a._lost)


@pytest.mark.parametrize("thinks_s", [0.0, 0.009], ids=["answers at once", "thinks before it answers"])
def test_each_knows_how_long_a_message_takes_to_the_other(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, thinks_s: float
) -> None:
    now_s, way_s = [1000.0], 0.002
    loop.now_s = lambda: now_s[0]
    monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=loop.now_s))
    a, b, cable = by_cable(loop)
    greeted(loop, a, b)
    assert a.links.trip_s("b") == 0.0, "nothing has been said yet"
    pass_on = cable._pass

    def slowly(end: socket.socket) -> None:
        now_s[0] += way_s
        pass_on(end)

    monkeypatch.setattr(cable, "_pass", slowly)
    for k in range(4):
        a.links.send("b", a.said(f"question {k}"))
        loop.until(lambda k=k: f"question {k}" in b.names("a"))  # type: ignore[misc]
        now_s[0] += thinks_s
        b.links.send("a", b.said(f"answer {k}"))
        loop.until(lambda k=k: f"answer {k}" in a.names("b"))  # type: ignore[misc]
    # An acknowledgement may be on its way at the same time, and takes as long.
    assert 0.99 * way_s < a.links.trip_s("b") < 2.01 * way_s
