"""Sums among hosts in two phases, at one of them: `offbeat.tensors.stretches` says who does what.

Each host has added up what its own members of a block give. Of that sum it codes, for each other host, the stretch that
this one owns; each adds up its stretch, codes it once, and sends it to all. So a host sends about two coded vectors,
however many hosts there are. Long sums of more than two hosts go this way also where nothing is coded.

Coding is work of the adders, and what is coded lies in memory of the host process's own. A host speaks for its first
member in the block: the draws are that member's, and so is what coding loses. A host whose members give nothing says
so, and sends nothing of its own.

A message says which sum it belongs to, and of which hosts, so it may come before the sum has begun here.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.live.host import protocol as say
from offbeat.live.host.adders import SHORT, Errand
from offbeat.live.host.books import Books
from offbeat.live.host.ledger import Decoded, Expression, Sum, Written
from offbeat.live.transport.errors import OffbeatError
from offbeat.tensors.bits import read_as
from offbeat.tensors.codec import Codec
from offbeat.tensors.stretches import CodedShare, Room, Stretches
from offbeat.tensors.vector import Vec

DIRECT_BYTES = 1 << 16  # of a vector that is not coded: up to here each host sends all of it to all, one trip less

Name = tuple[int, ...]
Send = Callable[[int, Any, Sequence[memoryview], Callable[[], None]], None]  # to a host, and what to call then


class Raw:
    """Numbers as they are: the codec of sums that are not coded."""

    name = "raw"
    reads_quickly = True

    def encode(self, x: Tensor, key: tuple[int, ...]) -> Tensor:
        return x.detach().clone().view(torch.uint8)

    def encode_into(self, x: Tensor, key: tuple[int, ...], message: Tensor) -> None:
        message.view(x.dtype).copy_(x)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return self.decode_into(message, torch.empty_like(like))

    def decode_into(self, message: Tensor, out: Tensor, divisor: float = 1) -> Tensor:
        numbers = read_as(message, out.dtype)
        return out.copy_(numbers) if divisor == 1 else torch.div(numbers, divisor, out=out)

    def message_bytes(self, numel: int, itemsize: int) -> int:
        return numel * itemsize


class Messages(Room):
    """Memory for messages, which is used again when it has been given back: fresh pages are slow.

    The loop and the adder's thread both take. Only the adder uses what is scratch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._free: dict[int, list[Tensor]] = {}

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        try:
            return self._free[nbytes].pop()
        except (KeyError, IndexError):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give_back(self, messages: Sequence[Tensor]) -> None:
        for one in messages:
            self._free.setdefault(one.numel(), []).append(one)


class Summed(NamedTuple):
    """What came of a sum.

    ``said``: what each host's members have said beside, in the order of the hosts. ``total``: the sum, divided.
    ``lost``: what coding has lost now, where that was asked for.
    """

    said: list[Any]
    total: Callable[[int], Sum]
    lost: Expression | None


class GivenByHost(NamedTuple):
    """What the members of a block at this host bring to a sum.

    ``value``: one slot, or one sum; None: they give nothing. ``key`` keys the draws. ``lost``: one slot with what
    coding has lost, which is added and becomes what is lost now; ``anew``: nothing was lost before.
    """

    value: Expression | None
    said: Any
    key: tuple[int, ...]
    lost: Expression | None = None
    anew: bool = False


class _Heard(NamedTuple):
    """What another host has brought. ``message``: of the stretch that this host owns; None: it gives nothing."""

    said: Any
    message: Tensor | None
    note: NDArray[np.uint8] | None


class _HostSum:
    """One sum under way. ``place``: this host's in the order of ``hosts``."""

    def __init__(self, name: Name, hosts: tuple[int, ...], me: int, stretches: Stretches) -> None:
        self.name, self.hosts, self.stretches = name, hosts, stretches
        self.place = hosts.index(me)
        self.given: GivenByHost | None = None
        self.then: Callable[[Summed], None] = lambda summed: None
        self.share: CodedShare | None = None
        self.is_coded = self.adds_up = self.is_added_up = self.gives_nothing = False
        self.heard: dict[int, _Heard] = {}  # by place
        self.sums: dict[int, Tensor] = {}
        self.before: list[Tensor] | None = None  # what coding had lost
        self.memory: list[Tensor] = []  # that is to be given back
        self.reads = 1  # connections that still read of it, and whoever waits for the sum


class HostSums:
    """All sums of one server in two phases. ``codec``: None, where vectors are not coded.

    ``send`` takes a message to another host's server, with a vector where there is one. ``fail`` hears of an error.
    ``outlives``: the run goes on without a host that is lost. What coding has lost for the workers of that one is lost
    with it; what is lost here is as it was before a sum that is begun anew.
    """

    def __init__(
        self,
        key: str,
        me: int,
        codec: Codec | None,
        books: Books,
        send: Send,
        fail: Callable[[BaseException], None],
        outlives: bool = False,
    ) -> None:
        self._key, self._me, self._books, self._memory, self._send, self._fail = (
            key,
            me,
            books,
            books.memory,
            send,
            fail,
        )
        self.codec = codec
        self.on_wanted: Callable[[Name], None] = lambda name: None  # another host gives its part of it
        self._messages: Messages | None = None  # of long vectors: what is short, the loop may code, too
        self._stretches: dict[int, Stretches] = {}
        self._sums: dict[tuple[Name, tuple[int, ...]], _HostSum] = {}
        self._outlives, self.asked = outlives, set[int]()  # hosts: of theirs nothing ends before that is settled
        self._gone = set[int]()  # hosts: sums that they have a part in never end

    def takes(self, hosts: Sequence[object]) -> bool:
        """Whether a sum of these hosts goes in two phases."""
        return len(hosts) > 1 and (self.codec is not None or self._is_worth_it(len(hosts)))

    def _is_worth_it(self, hosts: int) -> bool:
        return hosts > 2 and self._memory.slot_bytes > DIRECT_BYTES

    @property
    def are_through(self) -> bool:
        """Whether no other host waits for what this one has still to code."""
        return all(one.given is None for one in self._sums.values())

    @property
    def values(self) -> list[Expression]:
        """What is still to be read here."""
        given = [one.given for one in self._sums.values() if one.given is not None]
        return [vector for one in given for vector in (one.value, one.lost) if vector is not None]

    # What happens at this host.

    def begin(self, name: Name, hosts: Sequence[int], given: GivenByHost, then: Callable[[Summed], None]) -> None:
        """This host's members have given what they give. ``then`` is called when the sum is there."""
        if not self._gone.isdisjoint(hosts):
            return
        one = self._one(name, tuple(hosts))
        one.given, one.then = given, then  # first: slots that are taken from now on are none of these
        if given.anew:
            one.given = given._replace(lost=Expression([(Written(self._books.slots.take()), 1.0)]))
        if given.value is not None:
            self._books.make(given.value)
        if given.value is None:
            self._code(one)
            self._is_coded(one)
        else:
            self._do(one, self._code, self._is_coded)

    def _code(self, one: _HostSum) -> None:
        assert one.given is not None
        x, lost = self._vec(one.given.value), self._vec(one.given.lost)
        if lost is not None and one.given.anew:
            for part in lost.parts:
                part.zero_()
        elif lost is not None and self._outlives:
            one.before = [part.clone() for part in lost.parts]
        # What is given stays until it has been added up.
        one.share = CodedShare(x, one.stretches, one.place, one.given.key, lost, yields=True)

    def _is_coded(self, one: _HostSum) -> None:
        assert one.given is not None
        assert one.share is not None
        one.is_coded, share = True, one.share
        note = b""
        if one.given.value is not None and self._memory.parameters:
            note = self._memory.note(self._slot(one.given.value)).tobytes()
        if share.sent is not None:
            one.memory.append(share.sent)
        for place, host in enumerate(one.hosts):
            if host != self._me:
                views = [] if share.messages is None else [_view(share.messages[place]), memoryview(note)]
                self._tell(one, host, 1, one.given.said, views, share.messages is not None)
        self._go_on(one)

    def _go_on(self, one: _HostSum) -> None:
        """Add up the stretch that this host owns, when all have brought theirs."""
        if not one.is_coded or one.adds_up or len(one.heard) < len(one.hosts) - 1:
            return
        assert one.given is not None
        one.adds_up = True
        if one.given.value is None and all(heard.message is None for heard in one.heard.values()):
            one.gives_nothing = True
            self._end_if_whole(one)
        else:
            self._do(one, self._add_up, self._is_added_up)

    def _add_up(self, one: _HostSum) -> None:
        assert one.share is not None
        theirs = [one.heard[place].message if place in one.heard else None for place in range(len(one.hosts))]
        one.sums[one.place] = one.share.own_sum(theirs)
        one.share.keep()

    def _is_added_up(self, one: _HostSum) -> None:
        assert one.given is not None
        own, one.is_added_up = one.sums[one.place], True
        one.memory.append(own)
        for host in one.hosts if own.numel() else ():
            if host != self._me:
                self._tell(one, host, 2, None, [_view(own)], True)
        self._end_if_whole(one)

    def _end_if_whole(self, one: _HostSum) -> None:
        if not self.asked.isdisjoint(one.hosts):
            return
        if one.gives_nothing:
            self._end(one, lambda divisor: Sum((), divisor))
            return
        lengths = one.stretches.lengths
        if not one.is_added_up or any(length and place not in one.sums for place, length in enumerate(lengths)):
            return
        assert one.given is not None
        nothing = torch.empty(0, dtype=torch.uint8)
        sums = [one.sums.get(place, nothing) for place in range(len(lengths))]
        notes = [heard.note for heard in one.heard.values() if heard.note is not None]
        if one.given.value is not None and self._memory.parameters:
            notes.append(self._memory.note(self._slot(one.given.value)).copy())

        def decode(slot: int, divisor: int) -> None:
            with self._threads():
                one.stretches.read(sums, self._memory.vec(slot).parts, divisor)
            if notes:
                self._memory.note(slot)[:] = np.bitwise_or.reduce(notes)

        then = partial(self._is_read, one)
        self._end(one, lambda divisor: Decoded(partial(decode, divisor=divisor), then))

    def _end(self, one: _HostSum, total: Callable[[int], Sum]) -> None:
        assert one.given is not None
        del self._sums[one.name, one.hosts]
        said = [one.given.said if host == self._me else one.heard[k].said for k, host in enumerate(one.hosts)]
        one.then(Summed(said, total, one.given.lost))

    # What other hosts say.

    def room(self, host: int, message: say.Stretch, nbytes: int) -> Tensor:
        """Memory for the vector that comes with a message."""
        stretches = self._stretches_of(len(message.hosts))
        if nbytes != self._due(stretches, host, message):
            raise ValueError(f"{nbytes} bytes of a stretch that has {self._due(stretches, host, message)}")
        return stretches.message(nbytes)

    def _due(self, stretches: Stretches, host: int, message: say.Stretch) -> int:
        """The bytes that come with a message."""
        if message.phase == 2:
            return stretches.lengths[message.hosts.index(host)]
        return stretches.lengths[message.hosts.index(self._me)] + self._memory.parameters

    def hear(self, host: int, message: say.Stretch, vector: Tensor | None) -> None:
        if not self._gone.isdisjoint(message.hosts):
            return
        one = self._one(tuple(message.sum), tuple(message.hosts))
        place, length = one.hosts.index(host), one.stretches.lengths[one.place]
        if vector is not None:
            one.memory.append(vector)
        elif message.gives and self._due(one.stretches, host, message):
            raise ValueError("a stretch without its vector")
        if message.phase == 2:
            assert vector is not None
            one.sums[place] = vector
            self._end_if_whole(one)
            return
        got, note = torch.empty(0, dtype=torch.uint8) if message.gives else None, None
        if message.gives and vector is not None:
            got, note = vector[:length], vector[length:].numpy() if self._memory.parameters else None
        one.heard[place] = _Heard(message.said, got, note)
        if one.given is None:
            self.on_wanted(one.name)
        self._go_on(one)

    def lost(self, host: int, used: Set[Name] = frozenset()) -> dict[Name, GivenByHost]:
        """Another host is gone. What was given here to sums that it has a part in: they may be begun anew.

        ``used``: what these came to is known elsewhere, and coding has lost here what it has lost.
        """
        self._gone.add(host)
        over = [one for one in self._sums.values() if host in one.hosts]
        self._sums = {name: one for name, one in self._sums.items() if host not in one.hosts}
        given = {one.name: one.given for one in over if one.given is not None}
        for one in over:
            if one.name not in used:
                self._restore(one)
            elif one.share is not None and not one.adds_up:
                self._books.adders.do(Errand(one.share.keep, lambda: None, given[one.name].lost, self._memory))
        return given

    def _restore(self, one: _HostSum) -> None:
        """What coding had lost before: behind whatever the adders still do for this sum."""
        if one.given is None or one.given.lost is None or one.given.anew:
            return

        def restore() -> None:
            lost = self._vec(one.given.lost) if one.given is not None else None
            for part, before in zip(() if lost is None else lost.parts, one.before or (), strict=False):
                part.copy_(before)

        self._books.adders.do(Errand(restore, lambda: None, one.given.lost, self._memory))

    def close(self) -> None:
        self._sums, self._messages, self._stretches = {}, None, {}

    # How it is done.

    def _one(self, name: Name, hosts: tuple[int, ...]) -> _HostSum:
        one = self._sums.get((name, hosts))
        if one is None:
            if not self._outlives and (other := next((ends for at, ends in self._sums if at == name), None)):
                raise ValueError(f"hosts disagree on a sum: it is one of {other} and one of {hosts}")
            one = self._sums[name, hosts] = _HostSum(name, hosts, self._me, self._stretches_of(len(hosts)))
        return one

    def _stretches_of(self, hosts: int) -> Stretches:
        if hosts not in self._stretches:
            if self._messages is None and sum(n for _, n in self._memory.kinds) > SHORT:
                self._messages = Messages()
            like = Vec([torch.empty(1, dtype=dtype).expand(n) for dtype, n in self._memory.kinds])
            codec = Raw() if self.codec is None else self.codec
            self._stretches[hosts] = Stretches(like, codec, hosts, self._messages)
        return self._stretches[hosts]

    def _do(self, one: _HostSum, do: Callable[[_HostSum], None], then: Callable[[_HostSum], None]) -> None:
        """Let the adders do it. An error is one of the codec's, and not of whoever adds."""
        assert one.given is not None
        errors = list[BaseException]()

        def work() -> None:
            try:
                with self._threads():
                    do(one)
            except Exception as error:
                errors.append(error)

        def go_on() -> None:
            if self._sums.get((one.name, one.hosts)) is not one:
                return  # given up meanwhile
            if errors:
                self._fail(errors[0])
            else:
                then(one)

        self._books.adders.do(Errand(work, go_on, one.given.value, self._memory))

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Coding is many short calls, each of which waits for all of torch's threads: half of them wait less often for
        one whose core is a worker's. (With 2 for 2 busy cores a sum of 4 million numbers took up to 0.4 s, not 0.01.)
        """
        if self._messages is None:  # what is short has one thread anyway
            yield
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads // 2))  # of those that this thread asks
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _tell(self, one: _HostSum, host: int, phase: int, said: Any, views: Sequence[memoryview], gives: bool) -> None:
        views = [view for view in views if view.nbytes]
        one.reads += bool(views)
        message = say.Stretch(self._key, list(one.name), list(one.hosts), phase, said, gives)
        self._send(host, message, views, partial(self._is_read, one))

    def _is_read(self, one: _HostSum) -> None:
        """One reader less: after the last, the memory serves for other messages."""
        one.reads -= 1
        if one.reads == 0 and self._messages is not None:
            self._messages.give_back(one.memory)
            one.memory = []

    def _vec(self, value: Expression | None) -> Vec | None:
        return None if value is None else self._memory.vec(self._slot(value))

    def _slot(self, value: Expression) -> int:
        ((slot, factor),) = value.slots
        assert factor == 1.0
        return slot


def _view(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy().data)


# Codecs, as workers tell them to their host process.


def told(codec: Codec | None) -> dict[str, Any] | None:
    """A codec in plain values: where it can be imported from, and its settings."""
    if codec is None:
        return None
    kind = type(codec)
    settings = {one.name: getattr(codec, one.name) for one in fields(codec)} if is_dataclass(codec) else vars(codec)
    plain = {name: {"dtype": _name(v)} if isinstance(v, torch.dtype) else v for name, v in settings.items()}
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise OffbeatError(
            f"the host process codes what leaves a host, and cannot import {kind.__qualname__} from "
            f"{kind.__module__}; put the class into a module of its own"
        )
    try:
        json.dumps(plain)
    except TypeError as error:
        raise OffbeatError(
            f"the host process codes what leaves a host, and cannot be told the settings of {codec.name} ({error}); "
            "use numbers, words and lists of them"
        ) from error
    return {"module": kind.__module__, "name": kind.__qualname__, "settings": plain}


def codec_of(said: dict[str, Any] | None) -> Codec | None:
    """The inverse."""
    if said is None:
        return None
    found: Any = importlib.import_module(said["module"])
    for name in said["name"].split("."):
        found = getattr(found, name)
    codec: Any = object.__new__(found)
    for name, value in said["settings"].items():
        plain = getattr(torch, value["dtype"]) if isinstance(value, dict) and "dtype" in value else value
        object.__setattr__(codec, name, plain)
    made: Codec = codec
    return made


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
