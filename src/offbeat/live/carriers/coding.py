"""Coded exchanges in step, through the host processes: sums, the papers' gathering, and messages along a graph.

A sum is coded where it leaves a host, by the host processes (`offbeat.live.host.host_sums`): each host speaks for its
first member in the block, and that one keeps what coding has lost. A block on one host is not coded. Where everybody
gets everybody's coded share, each worker codes its own: also for those of its host, as the papers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat.live.carriers.sent import Sent
from offbeat.live.worker.exchange_client import ExchangeClient, Exchanged, InStep
from offbeat.method.effects import Mix
from offbeat.tensors.codec import Codec, sent_to
from offbeat.tensors.stretches import Stretches
from offbeat.tensors.sums import keep, mean, owing, weighted
from offbeat.tensors.vector import Vec, wide
from offbeat.tensors.wire import all_gather_bytes, decode, encode, message_bytes, sent_in_phases

if TYPE_CHECKING:
    from offbeat.live.carriers.exchanges import Transport


class CodedInStep:
    """Those of one attached optimiser."""

    def __init__(self, ways: Transport) -> None:
        self._ways = ways

    @property
    def _in_step(self) -> InStep:
        return self._ways.in_step

    # Mixes.

    def mix(self, effect: Mix, codec: Codec, key: tuple[int, ...], in_blocks: bool, later: bool) -> Sent:
        """``in_blocks``: everybody takes the mean of a group."""
        rank = self._ways.rank
        ranks = effect.W.block(rank)
        if not in_blocks:
            along = self._along(effect, codec, key, later)
            if along is not None:
                return along
        assert ranks is not None
        if len(ranks) == 1:
            return self._ways.plain_mean(effect.x, ranks, later)
        if not effect.in_two_phases(rank):
            return self._gather(effect, codec, ranks, key, later)
        if self._hosts_of(ranks) == 1:
            return self._ways.plain_mean(effect.x, ranks, later)
        return self._sum(effect, codec, ranks, key, later)

    def _sum(self, effect: Mix, codec: Codec, ranks: tuple[int, ...], key: tuple[int, ...], later: bool) -> Sent:
        """In two phases. ``effect.lost`` is as it was until the result is taken."""
        x = effect.x
        lost = effect.lost if self._ways.rank == self._speaker(ranks) else None
        self._ways.wire_bytes += sent_in_phases(Stretches(x, codec, len(ranks)), ranks.index(self._ways.rank))
        client = self._in_step.among(ranks, x.parts, codec)
        write = x if lost is None else _sum_of(x, lost)
        begun = client.lay(
            write, sums=_all_of(ranks), divisor=len(ranks), draws=key, keeps=lost is not None, later=later
        )

        def use(vecs: list[Vec]) -> Vec:
            if lost is not None:
                for part, now in zip(lost.parts, vecs[1].parts, strict=True):
                    part.copy_(now)
            return vecs[0].clone()

        return _taken(begun, client, use)

    def _gather(self, effect: Mix, codec: Codec, ranks: tuple[int, ...], key: tuple[int, ...], later: bool) -> Sent:
        """The mean of everybody's coded share."""
        wanted = owing(effect.x, effect.lost)
        message, me = encode(wanted, codec, key), ranks.index(self._ways.rank)
        self._ways.wire_bytes += all_gather_bytes(len(ranks), message.numel()) // len(ranks)
        client, others = self._in_step.messages(ranks, message.numel()), [m for m in range(len(ranks)) if m != me]
        begun = client.lay(Vec([message]), reads=others, sends=others, later=later)

        def use(vecs: list[Vec]) -> Vec:
            place = me - sum(member < me for member in begun.absent)
            decoded = [decode(m, wanted, codec) for m in _in_place(vecs, place, message)]
            keep(effect.lost, wanted, decoded[place])
            return mean(decoded, len(decoded))

        return _taken(begun, client, use)

    def _along(self, effect: Mix, codec: Codec, key: tuple[int, ...], later: bool) -> Sent | None:
        """Messages along a graph. All ranks come here, also who averages in a block: for those None is the answer."""
        W, x, rank = effect.W, effect.x, self._ways.rank
        ranks, length = W.block(rank), message_bytes(x, codec)
        client = self._in_step.messages(tuple(range(self._ways.size)), length)
        if ranks is not None:
            client.lay(None)
            return None
        receivers, senders = W.receivers(rank), W.senders(rank)
        codes = sent_to(codec, W.audience(rank)) is not None  # what goes to nobody is not coded
        message = encode(x, codec, key) if codes else None
        mine = Vec([p.to(wide(p.dtype), copy=True) for p in x.parts]) if message is None else decode(message, x, codec)
        self._ways.wire_bytes += len(receivers) * length
        begun = client.lay(None if message is None else Vec([message]), reads=senders, sends=receivers, later=later)
        if not senders:  # and waits for nobody
            return Sent((), lambda: weighted([(W.row(rank)[rank], mine)]))

        def use(vecs: list[Vec]) -> Vec:
            there = [j for j in senders if j not in begun.absent]  # else what they would have sent is one's own
            theirs = {j: decode(vec.parts[0], x, codec) for j, vec in zip(there, vecs, strict=True)}
            return weighted((w, theirs.get(j, mine)) for j, w in W.row(rank).items())

        return _taken(begun, client, use)

    # Gradients.

    def gradients(
        self,
        g: Vec | None,
        header: Tensor,
        like: Vec,
        codec: Codec,
        ranks: tuple[int, ...],
        key: tuple[int, int],
        gathers: bool = False,
    ) -> tuple[Vec | None, Tensor]:
        """The mean of the coded gradients of those who have one, and the sum of all ``header`` bytes."""
        if sent_to(codec, len(ranks) - 1) is None:
            return g, header.long()
        own_key = (key[0], self._ways.rank, key[1])
        if gathers:
            return self._gathered_gradients(g, header, like, codec, ranks, own_key)
        self._ways.wire_bytes += all_gather_bytes(len(ranks), 1 + header.numel()) // len(ranks)
        self._ways.wire_bytes += sent_in_phases(Stretches(like, codec, len(ranks)), ranks.index(self._ways.rank))
        client, note = self._in_step.among(ranks, like.parts, codec), [g is not None, bytes(header.tolist()).hex()]
        begun = client.lay(g, sums=_all_of(ranks), divisor=0, draws=own_key, note=note)
        self._ways.waiter.wait([begun], "the others' gradients")
        found, told = list[Vec](), list[Any]()

        def use(vecs: list[Vec], notes: list[Any]) -> None:
            told.extend(notes)
            if any(gives for gives, _ in notes):
                found.append(vecs[0].clone())

        begun.take(use)
        client.release()
        counts = torch.tensor([list(bytes.fromhex(said)) for _, said in told], dtype=torch.long).sum(dim=0)
        return (found[0] if found else None), counts

    def _gathered_gradients(
        self, g: Vec | None, header: Tensor, like: Vec, codec: Codec, ranks: tuple[int, ...], key: tuple[int, ...]
    ) -> tuple[Vec | None, Tensor]:
        body = torch.zeros(message_bytes(like, codec), dtype=torch.uint8)
        if g is not None:
            body = encode(g, codec, key)
        message, me = torch.cat([torch.tensor([g is not None], dtype=torch.uint8), header, body]), self._ways.rank
        self._ways.wire_bytes += all_gather_bytes(len(ranks), message.numel()) // len(ranks)
        client, others = self._in_step.messages(ranks, message.numel()), [k for k, r in enumerate(ranks) if r != me]
        begun = client.lay(Vec([message]), reads=others, sends=others)
        self._ways.waiter.wait([begun], "the others' gradients")
        found, start = list[tuple[Vec | None, Tensor]](), 1 + header.numel()

        def use(vecs: list[Vec], notes: list[Any]) -> None:
            place = ranks.index(me) - sum(member < ranks.index(me) for member in begun.absent)
            gathered = _in_place(vecs, place, message)
            theirs = [decode(m[start:], like, codec) for m in gathered if m[0]]
            counts = torch.stack([m[1:start].long() for m in gathered]).sum(dim=0)
            found.append(((mean(theirs, len(theirs)) if theirs else None), counts))

        begun.take(use)
        client.release()
        return found[0]

    # Who is where.

    def _hosts_of(self, ranks: tuple[int, ...]) -> int:
        return len({self._ways.homes[r] for r in ranks})

    def _speaker(self, ranks: tuple[int, ...]) -> int:
        """For whom this host codes its sum: the first of those who are left."""
        homes, dead = self._ways.homes, self._ways.dead
        return next(r for r in ranks if homes[r] == homes[self._ways.rank] and r not in dead)


def _all_of(ranks: tuple[int, ...]) -> list[tuple[int, float]]:
    return [(member, 1.0) for member in range(len(ranks))]


def _sum_of(x: Vec, lost: Vec) -> Callable[[Vec], None]:
    def write(room: Vec) -> None:
        for into, part, owed in zip(room.parts, x.parts, lost.parts, strict=True):
            torch.add(part, owed, out=into)

    return write


def _in_place(vecs: Sequence[Vec], me: int, mine: Tensor) -> list[Tensor]:
    """Everybody's messages, of which mine was not read."""
    theirs = [vec.parts[0] for vec in vecs]
    return [*theirs[:me], mine, *theirs[me:]]


def _taken(begun: Exchanged, client: ExchangeClient, use: Callable[[list[Vec]], Vec]) -> Sent:
    def result() -> Vec:
        found: list[Vec] = []
        begun.take(lambda vecs, _: found.append(use(vecs)))
        client.release()
        return found[0]

    return Sent([begun], result)
