"""Sums among hosts in two phases, without processes: real servers' sums, and messages in any order that can be."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.live.host import adders, host_sums
from offbeat.live.host import protocol as say
from offbeat.live.host.adders import Adders
from offbeat.live.host.books import Books
from offbeat.live.host.host_sums import DIRECT_BYTES, GivenByHost, HostSums, Messages, Summed, codec_of, told
from offbeat.live.host.ledger import Expression, Written
from offbeat.live.host.server import Bytes, Counterparts
from offbeat.live.memory.arena import Arena, SlotMemory
from offbeat.live.transport.errors import OffbeatError
from offbeat.tensors import codec as codecs
from offbeat.tensors.codec import Codec
from offbeat.tensors.stretches import Stretches, coded_mean, shares
from offbeat.tensors.vector import Vec

KINDS, PARAMETERS = [(torch.float32, 1_001), (torch.float64, 70)], 3
CODECS = {
    "int8": codecs.int8(bucket=64),
    "qsgd4": codecs.qsgd(4, bucket=64),
    "bf16": codecs.bf16(),
    "one bucket": codecs.int8(bucket=5_000),
    "topk": codecs.topk(5, chunk=100),
}


class OneHost:
    """A host: its memory, its sums, and what it was told."""

    def __init__(self, network: Network, me: int, codec: Codec | None) -> None:
        self.me, self.arena = me, Arena()
        self.adders = Adders(lambda: None)
        self.books = Books(self.arena, SlotMemory(self.arena, KINDS, PARAMETERS), self.adders)
        self.errors = list[BaseException]()
        send = lambda host, message, views, there: network.send(me, host, message, views, there)  # noqa: E731
        self.sums = HostSums("run/sums", me, codec, self.books, send, self.errors.append)
        self.got: dict[tuple[int, ...], Summed] = {}
        self.books.also = lambda: [*self.sums.values, *(s.lost for s in self.got.values() if s.lost is not None)]

    def vector(self, value: Vec, used: Sequence[bool] = (True, True, True)) -> Expression:
        slot = self.books.slots.take()
        value.put_into(self.books.memory.vec(slot))
        self.books.memory.note_used(slot, tuple(used))
        kept = Expression([(Written(slot), 1.0)])
        self.books.aside.add(slot)
        return kept

    def read(self, value: Expression) -> list[Tensor]:
        ((slot, _),) = value.slots
        return [part.clone() for part in self.books.memory.vec(slot).parts]

    def total(self, name: tuple[int, ...], divisor: int = 1) -> tuple[list[Tensor], Any]:
        """The sum, and which parameters were used to make it."""
        value = Expression([(self.got[name].total(divisor), 1.0)])
        self.books.make(value)
        self.finish()
        return self.read(value), self.books.memory.used([value.slots[0][0]])

    def finish(self) -> None:
        """All that was asked for is done."""
        self.adders.through_with(self.books.memory)

    def close(self) -> None:
        self.sums.close()
        self.books.close()
        self.adders.close()
        self.arena.close()


class Network:
    """Between two hosts words stay in their order, and vectors in theirs; everything else is drawn."""

    def __init__(self, hosts: int, codec: Codec | None, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.hosts = [OneHost(self, me, codec) for me in range(hosts)]
        self.roads: dict[tuple[int, int, bool], deque[tuple[Any, bytes, Callable[[], None]]]] = {}
        self.acknowledged = list[Callable[[], None]]()
        self.sent_bytes = 0

    def send(self, me: int, host: int, message: Any, views: Sequence[memoryview], there: Callable[[], None]) -> None:
        (read,) = say.Inbox().feed(say.packed(message))
        body = b"".join(bytes(view) for view in views)
        self.sent_bytes += len(body)
        self.roads.setdefault((me, host, bool(views)), deque()).append((read, body, there))

    def step(self) -> bool:
        """Something arrives. Whether there was anything."""
        full = [road for road, waiting in self.roads.items() if waiting]
        for host in self.hosts:
            host.finish()
        if not full:
            return any(self.roads.values())
        start, end, has_vector = road = self.draw.choice(full)
        message, body, there = self.roads[road].popleft()
        sums, vector = self.hosts[end].sums, None
        if has_vector:
            vector = sums.room(start, message, len(body))
            vector.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
            self.acknowledged.append(there)
        sums.hear(start, message, vector)
        return True

    def run(self) -> None:
        while self.step():
            pass
        for there in self.acknowledged:
            there()
        self.acknowledged = []

    def begin(self, host: int, name: tuple[int, ...], members: Sequence[int], given: GivenByHost) -> None:
        one = self.hosts[host]
        one.sums.begin(name, members, given, lambda summed: one.got.__setitem__(name, summed))
        if given.value is not None:  # from now on the sum alone knows that it is needed
            one.books.aside.discard(given.value.slots[0][0])


@contextmanager
def network(hosts: int, codec: Codec | None, seed: int = 0) -> Iterator[Network]:
    made = Network(hosts, codec, seed)
    try:
        yield made
    finally:
        for one in made.hosts:
            one.close()


def drawn(seed: int) -> Vec:
    draw = torch.Generator().manual_seed(seed)
    return Vec([torch.randn(n, generator=draw, dtype=dtype) for dtype, n in KINDS])


Name = tuple[int, ...]


def some_sums(draw: random.Random, hosts: int) -> dict[Name, tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Of each sum its hosts, and who of them gives something."""
    who = {}
    for number in range(4):
        some = draw.sample(range(hosts), draw.randint(2, hosts))
        name: Name = (number, some[0])
        who[name] = tuple(some), tuple(draw.random() < 0.7 for _ in some)
    return who


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(params=["at once", "by the adder"], autouse=True)
def adding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vectors were short, or long."""
    if request.param == "by the adder":
        for module in ("adders", "host_sums"):
            monkeypatch.setattr(f"offbeat.live.host.{module}.SHORT", 0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(6))
def test_all_hosts_get_the_bits_of_the_rule_in_any_order_and_keep_what_was_lost(codec: str, seed: int) -> None:
    draw = random.Random(seed)
    hosts = draw.randint(2, 4)
    with network(hosts, CODECS[codec], seed) as net:
        case, begins = some_sums(draw, hosts), list[tuple[int, Name, Vec | None, Vec]]()
        for name, (members, gives) in case.items():
            for host, there in zip(members, gives, strict=True):
                x = drawn(100 * name[0] + host) if there else None
                begins.append((host, name, x, drawn(7_000 + 100 * name[0] + host)))
        draw.shuffle(begins)
        given, lost = dict[tuple[Name, int], Vec](), dict[tuple[Name, int], Vec]()
        kept = dict[tuple[Name, int], Expression]()
        for host, name, x, owed in begins:
            one, value = net.hosts[host], None
            kept[name, host], lost[name, host] = one.vector(owed), owed
            if x is not None:
                given[name, host], value = x, one.vector(x)
            key = (5, host, name[0])
            net.begin(host, name, case[name][0], GivenByHost(value, f"from {host}", key, kept[name, host]))
            for _ in range(draw.randint(0, 4)):
                net.step()
        net.run()
        for name, (members, _) in case.items():
            stretches = Stretches(drawn(0), CODECS[codec], len(members))
            gave = {host: given[name, host] for host in members if (name, host) in given}
            owing = {host: lost[name, host] for host in members}
            right = coded_mean(shares(gave, members, stretches, 5, name[0], owing), 3)
            for host in members:
                got, _ = net.hosts[host].total(name, 3)
                assert same(got, (drawn(0).zeros_like() if right is None else right).parts)
                assert net.hosts[host].got[name].said == [f"from {other}" for other in members]
                assert same(net.hosts[host].read(kept[name, host]), owing[host].parts), "what was lost is kept"
        assert not any(one.sums.values for one in net.hosts)
        assert not any(one.errors for one in net.hosts)


def test_what_is_lost_anew_is_what_was_given_and_not_sent() -> None:
    with network(2, CODECS["int8"]) as net:
        for host in range(2):
            net.begin(
                host, (1,), (0, 1), GivenByHost(net.hosts[host].vector(drawn(host)), None, (0, host, 1), anew=True)
            )
        net.run()
        lost = [one.got[1,].lost for one in net.hosts]
        got, _ = net.hosts[0].total((1,))
        for k in range(len(KINDS)):
            kept = [net.hosts[host].read(value)[k] for host, value in enumerate(lost) if value is not None]
            assert len(kept) == 2
            everything = drawn(0).parts[k] + drawn(1).parts[k]
            torch.testing.assert_close(got[k] + kept[0] + kept[1], everything, rtol=0, atol=1e-6)
            assert (got[k] - everything).abs().max() > 1e-3, "something was lost"


@pytest.mark.parametrize("gives", [(0, 1, 2), (0, 2), (1,)])
def test_sums_that_are_not_coded_have_the_bits_of_a_sum_in_the_order_of_the_hosts(gives: tuple[int, ...]) -> None:
    with network(3, None, seed=len(gives)) as net:
        for host in range(3):
            value = net.hosts[host].vector(drawn(host)) if host in gives else None
            net.begin(host, (9, 0), (2, 0, 1), GivenByHost(value, None, ()))
            assert not net.hosts[host].sums.are_through
        net.run()
        assert all(one.sums.are_through for one in net.hosts)
        ordered = [drawn(host) for host in (2, 0, 1) if host in gives]
        for host in range(3):
            got, _ = net.hosts[host].total((9, 0), 3)
            for k, part in enumerate(got):
                total = ordered[0].parts[k].clone()
                for vec in ordered[1:]:
                    total += vec.parts[k]
                assert torch.equal(part, total / 3)
        whole = net.hosts[0].books.memory.vec(net.hosts[0].books.slots.take()).nbytes
        assert net.sent_bytes < 1.4 * 2 * 2 * whole, "each of three sends about 4/3 of a vector, and not 2"


def test_where_nobody_gives_anything_no_vector_is_sent_and_the_sum_is_zero() -> None:
    with network(3, CODECS["qsgd4"]) as net:
        for host in range(3):
            net.begin(host, (0, 0), (0, 1, 2), GivenByHost(None, [host], (0, host, 0)))
        net.run()
        assert net.sent_bytes == 0
        for one in net.hosts:
            assert one.got[0, 0].said == [[0], [1], [2]]
            assert all(part.count_nonzero() == 0 for part in one.total((0, 0))[0])


def test_a_sum_used_the_parameters_that_at_least_one_host_used() -> None:
    with network(3, CODECS["int8"]) as net:
        used = [(True, False, False), (False, True, False), (True, True, True)]
        for host in range(3):
            value = net.hosts[host].vector(drawn(host), used[host]) if host < 2 else None
            net.begin(host, (0, 0), (0, 1, 2), GivenByHost(value, None, (0, host, 0)))
        net.run()
        assert [one.total((0, 0))[1] for one in net.hosts] == [(True, True, False)] * 3


def test_a_vector_of_another_length_is_refused_before_there_is_memory_for_it() -> None:
    with network(2, CODECS["int8"]) as net:
        message = say.Stretch("run/sums", [0, 0], [0, 1], 1, None, True)
        due = Stretches(drawn(0), CODECS["int8"], 2).lengths[0] + PARAMETERS
        assert net.hosts[0].sums.room(1, message, due).numel() == due
        with pytest.raises(ValueError, match=f"{due + 1} bytes of a stretch that has {due}"):
            net.hosts[0].sums.room(1, message, due + 1)
        with pytest.raises(ValueError, match="a stretch without its vector"):
            net.hosts[0].sums.hear(1, message, None)


def test_hosts_that_disagree_on_a_sum_are_told() -> None:
    with network(3, CODECS["int8"]) as net:
        net.begin(0, (4, 0), (0, 1), GivenByHost(None, None, (0, 0, 4)))
        with pytest.raises(ValueError, match="hosts disagree on a sum"):
            net.hosts[0].sums.hear(1, say.Stretch("run/sums", [4, 0], [0, 1, 2], 1, None, False), None)


def test_a_host_that_is_lost_leaves_nothing_in_use_and_others_go_on() -> None:
    with network(3, CODECS["int8"]) as net:
        for name, members in {(1, 0): (0, 1, 2), (2, 0): (0, 1)}.items():
            for host in members if len(members) == 2 else (0, 1):
                net.begin(
                    host, name, members, GivenByHost(net.hosts[host].vector(drawn(host)), None, (0, host, name[0]))
                )
        for host in (0, 1):
            net.hosts[host].sums.lost(2)
        net.run()
        for host in (0, 1):
            one = net.hosts[host]
            assert list(one.got) == [(2, 0)]
            assert not one.sums.values
            net.begin(host, (3, 0), (0, 1, 2), GivenByHost(one.vector(drawn(host)), None, (0, host, 3)))
            assert not one.sums.values


def test_memory_of_messages_serves_again_when_all_have_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (adders, host_sums):
        monkeypatch.setattr(module, "SHORT", 0)
    back, give_back = list[int](), Messages.give_back

    def noted(self: Messages, messages: Sequence[Tensor]) -> None:
        back.extend(message.data_ptr() for message in messages if message.numel())
        give_back(self, messages)

    monkeypatch.setattr(Messages, "give_back", noted)
    seen = set[int]()
    with network(3, CODECS["int8"]) as net:
        for number in range(5):
            back.clear()
            for host in range(3):
                value = net.hosts[host].vector(drawn(10 * number + host))
                net.begin(host, (number, 0), (0, 1, 2), GivenByHost(value, None, (0, host, number)))
            net.run()
            assert not back, "it is still to be read"
            for one in net.hosts:
                one.total((number, 0))
            assert len(back) == len(set(back)) == 3 * 6, "what is sent, its sum, and two of each that come"
            assert not number or seen == set(back)
            seen = set(back)


def test_slots_serve_again_when_a_sum_has_been_read() -> None:
    with network(2, CODECS["int8"]) as net:
        used = list[int]()
        for number in range(6):
            for host in range(2):
                value = net.hosts[host].vector(drawn(10 * number + host))
                net.begin(host, (number,), (0, 1), GivenByHost(value, None, (0, host, number), anew=True))
            net.run()
            for one in net.hosts:
                one.total((number,))
                one.got.clear()
            used.append(len(net.hosts[0].books.slots.all))
        assert used[1:] == used[:1] * 5


def test_nothing_waits_for_a_host_that_is_lost() -> None:
    carried, came = list[Any](), list[str]()
    others = Counterparts("key", ["a", "b", "c"], 3, "a", lambda host, *what: carried.append((host, *what)))
    for host in (1, 2):
        others.send(host, say.Opened("key", {}), Bytes([memoryview(b"abc")], partial(came.append, f"to {host}")))
    others.opened("b")
    others.opened("c")
    others.flush()
    assert [host for host, *_ in carried] == ["b", "c"]
    assert not others.is_through
    others.lost("b")
    assert not others.is_through
    carried[1][-1]()
    assert others.is_through
    others.send(1, say.Opened("key", {}), Bytes([memoryview(b"abc")], lambda: None))
    assert others.is_through
    assert came == ["to 2"]


@dataclass(frozen=True)
class Broken:
    """A codec that cannot code."""

    name: str = "broken"

    def encode(self, x: Tensor, key: tuple[int, ...]) -> Tensor:
        raise FloatingPointError("no numbers are right")

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        raise AssertionError

    def message_bytes(self, numel: int, itemsize: int) -> int:
        return numel


def test_an_error_of_a_codec_is_told_and_not_the_end_of_whoever_adds() -> None:
    with network(2, Broken()) as net:
        net.begin(0, (0, 0), (0, 1), GivenByHost(net.hosts[0].vector(drawn(0)), None, (0, 0, 0)))
        net.hosts[0].finish()
        assert [str(error) for error in net.hosts[0].errors] == ["no numbers are right"]


def test_who_goes_in_two_phases() -> None:
    kinds = [(torch.float32, DIRECT_BYTES // 4 - 16), (torch.float32, DIRECT_BYTES // 4 + 16)]
    for (kind, is_long), (hosts, expected) in ((k, h) for k in zip(kinds, (False, True), strict=True) for h in TAKES):
        arena = Arena()
        books = Books(arena, SlotMemory(arena, [kind], 0), Adders(lambda: None))
        for codec in (None, codecs.int8()):
            sums = HostSums("run/sums", 0, codec, books, lambda *_: None, lambda _: None)
            assert sums.takes(range(hosts)) == (hosts > 1 and (codec is not None or (expected and is_long)))
        arena.close()


TAKES = ((1, False), (2, False), (3, True))


@pytest.mark.parametrize("codec", [*CODECS.values(), codecs.fp16(), Broken("mine")], ids=lambda one: one.name)
def test_a_codec_is_told_in_plain_values(codec: Codec) -> None:
    (message,) = say.Inbox().feed(say.packed(say.OpenChannel("key", 0, {"codec": told(codec)}, 0, False, False, 0)))
    assert codec_of(message.plan["codec"]) == codec
    assert codec_of(told(None)) is None


def test_a_codec_that_cannot_be_told_is_refused_in_a_sentence() -> None:
    class Local(Broken):
        pass

    with pytest.raises(OffbeatError, match=r"cannot import .*Local from .*; put the class into a module of its own"):
        told(Local())
    with pytest.raises(OffbeatError, match=r"cannot be told the settings of .* use numbers, words and lists of them"):
        told(Broken(name=object()))  # type: ignore[arg-type]
