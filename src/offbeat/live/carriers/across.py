"""Sums among ranks of several hosts: inside each host first, then one message a host, then inside again.

The ranks of a host lay their vectors into memory that they share. The first ranks of every host, as many as the
smallest host has, are its *ports*: each adds up a stretch of its host's vectors and sums it with the same stretch of
the other hosts, over Gloo. So all ports work, and what leaves a host is one vector, however many ranks it has. A
stretch is cut into chunks: while one is on the wire, the next is added up.

With a codec, what leaves a host is coded: the hosts' sums, in two phases (see `offbeat.tensors.stretches`). What is
lost by it is kept by the port whose stretch it is, and added next time.

A vector is in its rank's own region until all have laid theirs; then each stretch belongs to its port, which alone
reads the others' and writes to its own; a port says that its stretch is *added* when the wire is through with it, and
nobody copies it before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.live.carriers import hosts
from offbeat.live.carriers.adding import add_in_place, stretch
from offbeat.live.carriers.commons import ADDED, LAID, Commons, Laid
from offbeat.live.carriers.hands import ONE, Hands
from offbeat.live.carriers.phases import TwoPhases
from offbeat.live.carriers.sharing import all_have, shared
from offbeat.live.transport.board import Board
from offbeat.live.transport.group import Group
from offbeat.live.transport.waiter import Waiter, Work
from offbeat.tensors.codec import Codec
from offbeat.tensors.stretches import CodedShare, Stretches
from offbeat.tensors.vector import Vec, wide

CHUNK = 1 << 20  # numbers on the wire at a time
SUMS = "the other hosts' sums"


class Coding(NamedTuple):
    """How the hosts' sums are coded on their way.

    ``lost``: what earlier sums have lost, beside each tensor that is summed. ``gives``: from the record of the members
    of a host, whether there is anything of theirs in its sum.
    """

    codec: Codec
    key: tuple[int, ...]
    lost: Sequence[Tensor] | None
    gives: Callable[[Tensor, tuple[int, ...]], bool]


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
        self.has_coded = False
        home = next(house for house in houses if board.rank in house)
        self._place, self._port, self._ports = houses.index(home), home.index(board.rank), min(map(len, houses))
        self._group: Group | None = None
        if len(houses) > 1 and self._port < self._ports:
            ranks = tuple(house[self._port] for house in houses)
            self._group = Group(f"{name}/port-{self._port}", ranks, board, maker)
        self.carriers = ({"gloo"} if len(houses) > 1 else set()) | ({commons.carrier} if commons is not None else set())

    def total(self, tensors: Sequence[Tensor], what: str) -> None:
        """Let each of these be the sum of everybody's."""
        laid = self._lay(tensors, what)
        mine, works = self._views(laid, tensors), list[Work]()
        for k, tensor in enumerate(mine):
            for a, b in self._chunks(tensor):
                self._add(laid, k, a, b)
                if self._group is not None:
                    works.append(self._group.all_reduce(tensor[a:b]))
        self._waiter.wait(works, what)
        self._collect(laid, mine, tensors, what)

    def coded_total(self, tensors: Sequence[Tensor], record: Tensor, coding: Coding, what: str) -> None:
        """The same, coded between hosts. The ``record`` of who gives what is summed beside them, and not coded."""
        self.has_coded = True
        # The last is for the sum of the records: when one port has made it, another may still read the members'.
        given = [*tensors, record, torch.zeros_like(record)]
        laid = self._lay(given, what)
        *mine, own_record, records = self._views(laid, given)
        if self._port < self._ports:
            for k, tensor in enumerate(mine):
                for a, b in self._chunks(tensor):
                    self._add(laid, k, a, b)
            everyones = [own_record] if laid is None else [views[-2] for views in laid.views.everyones()]
            records.copy_(torch.stack(everyones).sum(dim=0))
            if self._group is not None:
                self._code(mine, records, coding, self._group, what)
        self._collect(laid, [*mine, own_record, records], tensors, what, record)

    def _code(self, mine: Sequence[Tensor], records: Tensor, coding: Coding, group: Group, what: str) -> None:
        """Let my stretch be the coded sum of all hosts': while one chunk is on the wire, another is coded."""
        there, members = coding.gives(records, self.houses[self._place]), len(self.houses)
        told = group.all_reduce(records)
        chunks, sums, sent = list[Vec](), list[TwoPhases](), list[Work]()
        for k, tensor in enumerate(mine):
            for a, b in self._chunks(tensor):
                own = Vec([tensor[a:b]])
                lost = None if coding.lost is None else Vec([coding.lost[k][a:b]])
                key, stretches = (*coding.key, k, a), Stretches(own, coding.codec, members)
                share = CodedShare(own if there else None, stretches, self._place, key, lost)
                chunks.append(own)
                sums.append(TwoPhases(share, group))
                sent.append(sums[-1].to_owners())
        self._waiter.wait([told], what)
        gives, answered = [coding.gives(records, house) for house in self.houses], list[Work]()
        for phases, work in zip(sums, sent, strict=True):
            self._waiter.wait([work], what)
            answered.append(phases.to_all(gives))
        for phases, work, own in zip(sums, answered, chunks, strict=True):
            self._waiter.wait([work], what)
            phases.result(own)

    # Inside the host.

    def _lay(self, tensors: Sequence[Tensor], what: str) -> Laid | None:
        """When it is there, all of this host have laid theirs; None of one who is alone there."""
        if self._commons is None:
            return None
        laid = self._commons.lay(tensors)
        self._waiter.wait([laid.have(LAID, self._commons.others)], what)
        return laid

    def _views(self, laid: Laid | None, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Where my stretches are summed."""
        if laid is None or self._commons is None:
            return [t.to(wide(t.dtype)) for t in tensors]
        return laid.views.of(self._commons.me)

    def _stretch(self, tensor: Tensor) -> tuple[int, int]:
        """Mine of it."""
        return stretch(tensor.numel(), self._port, self._ports) if self._port < self._ports else (0, 0)

    def _chunks(self, tensor: Tensor) -> list[tuple[int, int]]:
        lo, hi = self._stretch(tensor)
        return [(a, min(a + CHUNK, hi)) for a in range(lo, hi, CHUNK)]

    def _add(self, laid: Laid | None, k: int, a: int, b: int) -> None:
        if laid is not None and self._commons is not None:
            everyones = [views[k] for views in laid.views.everyones()]
            add_in_place(everyones[self._commons.me], everyones, a, b, self._commons.hands)
            self._commons.settle()

    def _collect(
        self,
        laid: Laid | None,
        mine: Sequence[Tensor],
        tensors: Sequence[Tensor],
        what: str,
        record: Tensor | None = None,
    ) -> None:
        """My stretch is there: take the others', and the sum of the records, which every port has."""
        if laid is None or self._commons is None:
            for tensor, total in zip(tensors, mine, strict=False):
                tensor.copy_(total)
            if record is not None:
                record.copy_(mine[-1])
            return
        if self._port < self._ports:
            self._commons.say(ADDED, laid.region, laid.number)
        self._waiter.wait([laid.have(ADDED, range(self._ports))], what)
        pairs = list[tuple[Tensor, Tensor]]()
        for port in range(self._ports):
            theirs = laid.views.of(port)
            for tensor, total in zip(tensors, theirs, strict=False):
                lo, hi = stretch(tensor.numel(), port, self._ports)
                pairs.append((tensor[lo:hi], total[lo:hi]))
        if record is not None:
            pairs.append((record, laid.views.of(0)[-1]))
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
    houses, wanted = hosts.together(ranks, homes), hosts.wanted()
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
