"""Sums among ranks of several hosts: inside each host first, then one message a host, then inside again.

The ranks of a host lay their vectors into memory that they share. The first ranks of every host, as many as the
smallest host has, are its *ports*: each adds up a stretch of its host's vectors and sums it with the same stretch of
the other hosts, over Gloo. So all ports work, and what leaves a host is one vector, however many ranks it has. A
long vector is cut into pieces, each a sum by itself: while one is on the wire, the next is laid down and added up.

With a codec, what leaves a host is coded: the hosts' sums, in two phases (see `offbeat.tensors.stretches`). What is
lost by it is kept by the port whose stretch it is, and added next time.

A vector is in its rank's own region until all have laid theirs, but for a port's own stretch, to which it adds the
others' where it is. From then on each stretch belongs to its port, which alone reads the others' and writes to its own;
a port shows its stretch there, and says that it is *added*, when the wire is through with it, and nobody copies it
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.live.carriers.commons import ADDED, LAID, Commons, Laid
from offbeat.live.carriers.group import Group
from offbeat.live.carriers.phases import TwoPhases
from offbeat.live.carriers.sharing import all_have, shared
from offbeat.live.memory.adding import add_in_place, stretch
from offbeat.live.memory.hands import ONE, Hands
from offbeat.live.transport import hosts
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter, Work
from offbeat.tensors.codec import Codec, reads_quickly
from offbeat.tensors.houses import together
from offbeat.tensors.stretches import CodedShare, Room, Stretches
from offbeat.tensors.vector import Vec, wide

CHUNK = 1 << 19  # numbers on the wire at a time: fewer leave sooner, but each message has a price of its own
MESSAGE_BYTES, MOST = 1 << 20, 4  # so long a coded chunk should be, which may hold so many times more numbers
SUMS = "the other hosts' sums"


class Coding(NamedTuple):
    """How the hosts' sums are coded on their way.

    ``lost``: what earlier sums have lost, beside each tensor that is summed. ``gives``: from the record of the members
    of a host, whether there is anything of theirs in its sum. ``divisor``: what the sums are divided by, in the end.
    """

    codec: Codec
    key: tuple[int, ...]
    lost: Sequence[Tensor] | None
    gives: Callable[[Tensor, tuple[int, ...]], bool]
    divisor: float = 1


class Cutting(NamedTuple):
    """Stretches of some tensors that are summed at once: ``of`` which tensors they are, and where each ``starts``."""

    tensors: list[Tensor]
    of: list[int]
    starts: list[int]


class Begun(NamedTuple):
    """A sum under way: ``mine`` lies where this host's ranks can read it. The ``chunks`` that I send are in it, or in
    the tensors themselves, in what was ``kept`` there of each; they are known by their tensor and beginning. ``kept``
    has nothing laid down in its place: there is room for something else."""

    tensors: Sequence[Tensor]
    laid: Laid | None
    mine: list[Tensor]
    kept: list[tuple[int, int]]
    chunks: list[tuple[tuple[int, int], Tensor]]


class Coded(NamedTuple):
    """A chunk of a sum, coded: ``out`` is where its numbers go; in ``memory`` my host's sum is the first."""

    out: Tensor
    stretches: Stretches
    memory: Tensor


class Across:
    """Sums among the ranks of ``houses``, a tuple for each host. All of them make the same ones in the same order.

    ``commons``: what this host's ranks share, None where there is but one. ``maker`` waits while the groups are made,
    ``waiter`` in the sums, which may be another thread's.
    """

    def __init__(
        self,
        name: str,
        houses: tuple[tuple[int, ...], ...],
        commons: Commons | None,
        board: Board,
        maker: Waiter,
        waiter: Waiter,
    ) -> None:
        self.houses, self._commons, self._waiter = houses, commons, waiter
        self._room = Room()
        home = next(house for house in houses if board.rank in house)
        self._place, self._port, self._ports = houses.index(home), home.index(board.rank), min(map(len, houses))
        self._group: Group | None = None
        if len(houses) > 1 and self._port < self._ports:
            ranks = tuple(house[self._port] for house in houses)
            self._group = Group(f"{name}/port-{self._port}", ranks, board, maker)
        self.carriers = ({"gloo"} if len(houses) > 1 else set()) | ({commons.carrier} if commons is not None else set())

    def total(self, tensors: Sequence[Tensor], what: str) -> None:
        """Let each of these be the sum of everybody's."""
        under_way = list[tuple[Begun, list[Work]]]()
        for piece in self._cut(tensors, CHUNK):
            begun, works = self._begin(piece.tensors, what, CHUNK), list[Work]()
            for _, mine in begun.chunks:
                if self._group is not None:
                    works.append(self._group.all_reduce(mine))
            under_way.append((begun, works))
        for begun, works in under_way:
            self._waiter.wait(works, what)
            self._collect(begun, what)

    def coded_total(self, tensors: Sequence[Tensor], record: Tensor, coding: Coding, what: str) -> None:
        """The same, coded between hosts. The ``record`` of who gives what is summed beside them, and not coded."""
        # The second is for the sum of the records: when one port has made it, another may still read the members'.
        told = self._begin([record, torch.zeros_like(record)], what)
        own_record, records = told.mine
        if self._port < self._ports:
            everyones = [own_record] if told.laid is None else [views[0] for views in told.laid.views.everyones()]
            records.copy_(torch.stack(everyones).sum(dim=0))
        if self._group is not None:
            self._code(tensors, records, coding, self._group, what)
        else:
            chunk = _coded_chunk(coding.codec)
            for begun in [self._begin(piece.tensors, what, chunk) for piece in self._cut(tensors, chunk)]:
                for _, mine in begun.chunks:
                    mine.div_(coding.divisor)
                if (coded := self._shown_coded(begun, coding.codec, chunk)) is not None:
                    self._decode(begun, coded, coding, what)
                else:
                    self._collect(begun, what)
        self._hand_out(told, what, [(record, -1)])

    def _code(self, tensors: Sequence[Tensor], records: Tensor, coding: Coding, group: Group, what: str) -> None:
        """Let these be the coded sums of all hosts': while one chunk is on the wire, another is coded."""
        self._room.begin()
        there, members = coding.gives(records, self.houses[self._place]), len(self.houses)
        told = group.all_reduce(records)
        under_way, chunk = list[tuple[Begun, list[TwoPhases], list[Work]]](), _coded_chunk(coding.codec)
        for piece in self._cut(tensors, chunk):
            begun, sums = self._begin(piece.tensors, what, chunk), list[TwoPhases]()
            for (k, a), mine in begun.chunks:
                own, at = Vec([mine]), piece.starts[k] + a
                lost = None if coding.lost is None else Vec([coding.lost[piece.of[k]][at : at + mine.numel()]])
                key, stretches = (*coding.key, piece.of[k], at), Stretches(own, coding.codec, members, self._room)
                sums.append(
                    TwoPhases(CodedShare(own if there else None, stretches, self._place, key, lost, yields=True), group)
                )
            under_way.append((begun, sums, [one.to_owners() for one in sums]))
        self._waiter.wait([told], what)
        gives, answered = [coding.gives(records, house) for house in self.houses], list[list[Work]]()
        shown = [self._shown_coded(begun, coding.codec, chunk) for begun, _, _ in under_way]
        for (_, sums, works), coded in zip(under_way, shown, strict=True):
            self._waiter.wait(works, what)
            memory = [None] * len(sums) if coded is None else [m for _, _, m in coded[self._port]]
            answered.append([one.to_all(gives, m) for one, m in zip(sums, memory, strict=True)])
        for (begun, sums, _), coded, works in zip(under_way, shown, answered, strict=True):
            self._waiter.wait(works, what)
            if coded is not None:
                self._decode(begun, coded, coding, what, sums)
                continue
            for one, (_, mine) in zip(sums, begun.chunks, strict=True):
                one.result(Vec([mine]), coding.divisor)
            self._collect(begun, what)

    def _shown_coded(self, begun: Begun, codec: Codec, chunk: int) -> list[list[Coded]] | None:
        """Each port's coded sums, where ranks of this host read them: for codecs that are as quickly read as numbers
        are copied, of which more would have to be written first. None: they are not to be shown."""
        laid, commons = begun.laid, self._commons
        if laid is None or commons is None or len(self.houses) == 1 or commons.carrier != "shm":
            return None
        if not reads_quickly(codec) or any(t.dtype != wide(t.dtype) for t in begun.tensors):
            return None
        shown, members = list[list[Coded]](), len(self.houses)
        for port in range(self._ports):
            shown.append([])
            for tensor, room in zip(begun.tensors, laid.views.of(port), strict=True):
                lo, hi = stretch(tensor.numel(), port, self._ports)
                for a in range(lo, hi, chunk):
                    b = min(a + chunk, hi)
                    stretches, memory = Stretches(Vec([tensor[a:b]]), codec, members), room[a:b].view(torch.uint8)
                    if (total := sum(stretches.lengths)) > memory.numel():
                        return None
                    shown[-1].append(Coded(tensor[a:b], stretches, memory[:total]))
        return shown

    def _decode(
        self, begun: Begun, coded: list[list[Coded]], coding: Coding, what: str, sums: Sequence[TwoPhases] = ()
    ) -> None:
        """My coded ``sums`` are there: decode them, and the others'."""
        assert begun.laid is not None
        assert self._commons is not None
        if self._port < self._ports:
            self._commons.say(ADDED, begun.laid.region, begun.laid.number)
        for one, (out, _, _) in zip(sums, coded[self._port] if sums else (), strict=True):
            one.result(Vec([out]), coding.divisor)
        self._waiter.wait([begun.laid.have(ADDED, range(self._ports))], what)
        for port in range(self._ports):
            for out, stretches, memory in coded[port] if port != self._port else ():
                own, *theirs = memory.split(_own_first(stretches.lengths, self._place))
                theirs.insert(self._place, own)
                stretches.read(theirs, [out], coding.divisor)
        self._commons.through(begun.laid)

    def _cut(self, tensors: Sequence[Tensor], chunk: int) -> list[Cutting]:
        """Pieces that go one after the other: while one is on the wire, the next is laid down and added up."""
        longest = chunk * self._ports
        if sum(t.numel() for t in tensors) <= longest:
            return [Cutting(list(tensors), list(range(len(tensors))), [0] * len(tensors))]
        return [
            Cutting([tensor[a : a + longest]], [k], [a])
            for k, tensor in enumerate(tensors)
            for a in range(0, tensor.numel(), longest)
        ]

    # Inside the host.

    def _begin(self, tensors: Sequence[Tensor], what: str, chunk: int = 0) -> Begun:
        """Lay these down, and add up my stretch of what all of this host have laid, if a ``chunk`` has a length."""
        laid, commons, sends = None, self._commons, chunk > 0 and self._port < self._ports
        own = [stretch(t.numel(), self._port, self._ports) if sends else (0, 0) for t in tensors]
        if commons is None:
            mine, kept = [t.to(wide(t.dtype)) for t in tensors], [(0, 0)] * len(own)
        else:
            kept = [ends if t.dtype == wide(t.dtype) else (0, 0) for t, ends in zip(tensors, own, strict=True)]
            laid = commons.lay(tensors, but=kept)
            self._waiter.wait([laid.have(LAID, commons.others)], what)
            mine = laid.views.of(commons.me)
        begun = Begun(tensors, laid, mine, kept, [])
        for k, (lo, hi) in enumerate(own if sends else ()):
            here = tensors[k].detach() if any(kept[k]) else mine[k]
            for a in range(lo, hi, chunk):
                b = min(a + chunk, hi)
                if laid is not None and commons is not None:
                    terms = [views[k] for views in laid.views.everyones()]
                    terms[commons.me] = here
                    add_in_place(here, terms, 1, a, b, commons.hands)
                    commons.settle()
                begun.chunks.append(((k, a), here[a:b]))
        return begun

    def _collect(self, begun: Begun, what: str) -> None:
        """My stretch is there: take the others'."""
        self._hand_out(begun, what, [(tensor, k) for k, tensor in enumerate(begun.tensors)], stretches=True)

    def _hand_out(self, begun: Begun, what: str, wanted: Sequence[tuple[Tensor, int]], stretches: bool = False) -> None:
        """What I owe of it is there: copy what the others have, each port its stretch, or the first port all of it."""
        if begun.laid is None or self._commons is None:
            for tensor, k in wanted:
                tensor.copy_(begun.mine[k])
            return
        laid, shown = begun.laid, [(k, lo, hi) for k, (lo, hi) in enumerate(begun.kept) if lo < hi]
        if self._port < self._ports:
            self._commons.copy([(begun.mine[k][lo:hi], begun.tensors[k][lo:hi]) for k, lo, hi in shown])
            self._commons.say(ADDED, laid.region, laid.number)
        self._waiter.wait([laid.have(ADDED, range(self._ports))], what)
        pairs = list[tuple[Tensor, Tensor]]()
        for port in range(self._ports if stretches else 1):
            theirs = laid.views.of(port)
            for tensor, k in wanted:
                lo, hi = stretch(tensor.numel(), port, self._ports) if stretches else (0, tensor.numel())
                if port != self._port or begun.kept[k] != (lo, hi):
                    pairs.append((tensor[lo:hi], theirs[k][lo:hi]))
        self._commons.copy(pairs)
        self._commons.through(laid)

    # Its end.

    def groups(self) -> list[Group]:
        return [] if self._group is None else [self._group]

    def close(self, together: bool = True) -> None:
        """Give the memory back; ``together``: so do the others now. The groups are closed or parked by their owner."""
        if self._commons is not None:
            self._commons.close(together)
            self._commons = None


def _own_first(lengths: Sequence[int], place: int) -> list[int]:
    return [lengths[place], *lengths[:place], *lengths[place + 1 :]]


def _coded_chunk(codec: Codec) -> int:
    """The numbers of a chunk, of which not too little is left when it has been coded."""
    return CHUNK * min(MOST, -(-MESSAGE_BYTES // max(codec.message_bytes(CHUNK, 4), 1)))


def across(
    name: str,
    ranks: tuple[int, ...],
    homes: Sequence[str],
    device: torch.device,
    board: Board,
    maker: Waiter,
    waiter: Waiter,
    hands: Hands = ONE,
) -> Across | None:
    """Made by all of ``ranks`` now; ``homes`` are those of all ranks. None where a host's ranks cannot share memory, or
    where nobody has another beside it, or where the environment wants it otherwise."""
    houses, wanted = together(ranks, homes), hosts.wanted()
    if wanted not in (None, "ipc" if device.type == "cuda" else "shm") or max(map(len, houses)) == 1:
        return None
    home, commons = next(house for house in houses if board.rank in house), None
    if len(home) > 1:
        inside = f"{name}/host-{home[0]}"
        commons = shared(inside, home, lambda: Commons(inside, home, device, board, waiter, hands), board, maker)
    if not all_have(name, ranks, len(home) == 1 or commons is not None, board, maker):
        if commons is not None:
            commons.close()
        return None
    return Across(name, houses, commons, board, maker, waiter)
