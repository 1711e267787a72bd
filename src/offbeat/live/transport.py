"""Tensors between processes: averages of groups as collectives, everything else point to point.

Only the main thread starts operations, in the same order on every rank, so one process group serves them all. They run
in the background by nature (Gloo's own threads); a mix that was begun is simply not waited for yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.codec import Codec
from offbeat.effects import Mix, Ticket
from offbeat.live.waiting import Waiter
from offbeat.merging import mean, weighted
from offbeat.vector import Vec, wide

LONG = timedelta(days=7)  # Gloo's own timeout kills a group for good; our patience is kept by the waiter


class Sent(Ticket[Vec]):
    """An exchange under way: what it waits for, and how the result is put together then."""

    __slots__ = ("_result", "works")

    def __init__(self, works: Sequence[dist.Work], result: Callable[[], Vec]) -> None:
        self.works, self._result = works, result

    def result(self) -> Vec:
        """Call once, when all works are done."""
        return self._result()


class Transport:
    """This process's end of all exchanges of one attached optimiser."""

    def __init__(self, waiter: Waiter, rank: int, size: int, cuda: bool) -> None:
        self.waiter, self.rank, self.size = waiter, rank, size
        self.wire_bytes = 0
        self._group: Any = dist.new_group(backend="gloo", timeout=LONG) if size > 1 else None
        self._side: Any = dist.new_group(backend="gloo", timeout=LONG) if size > 1 else None
        nccl = size > 1 and cuda and dist.is_nccl_available()
        self._nccl: Any = dist.new_group(backend="nccl", timeout=LONG) if nccl else None
        self._blocks: dict[tuple[int, ...], Any] = {tuple(range(size)): self._group}
        self._everyone = tuple(range(size))

    # A mix, in three shapes.

    def mix(self, effect: Mix, seq: int, seed: int) -> Sent:
        """Start exchange ``seq``. ``effect.x`` is read now, and copied where it could change before it is sent."""
        ranks = effect.W.block(self.rank)
        if effect.codec is not None and ranks != (self.rank,):
            return self._coded(effect, effect.codec, ranks, seq, seed)
        if ranks == (self.rank,):
            alone = effect.x.clone()
            if effect.codec is not None:
                own = _encode(effect.x, effect.codec, (seed, self.rank, seq))
                alone = _decode(own, effect.x, effect.codec)
            return Sent((), lambda: alone)
        if ranks is not None and len(ranks) > 2:
            return self._sum(effect.x, ranks)
        return self._point_to_point(effect, seq)

    def _sum(self, x: Vec, ranks: tuple[int, ...]) -> Sent:
        parts = [p.to(wide(p.dtype), copy=True) for p in x.parts]
        works = [self.all_reduce(p, ranks) for p in parts]
        return Sent([w for w in works if w is not None], lambda: Vec([p.div_(len(ranks)) for p in parts]))

    def _point_to_point(self, effect: Mix, seq: int) -> Sent:
        W, x = effect.W, effect.x
        mine = [_host(p.to(wide(p.dtype), copy=True)) for p in x.parts]
        theirs = {j: [torch.empty_like(p) for p in mine] for j in W.senders(self.rank)}
        works = self._swap(seq, W.receivers(self.rank), theirs, mine)

        def result() -> Vec:
            rows = [(w, Vec(mine if j == self.rank else theirs[j])) for j, w in W.row(self.rank).items()]
            block = W.block(self.rank)
            mixed = weighted(rows) if block is None else mean([v for _, v in rows], len(block))
            return Vec([m.to(p.device) for m, p in zip(mixed.parts, x.parts, strict=True)])

        return Sent(works, result)

    def _coded(self, effect: Mix, codec: Codec, ranks: tuple[int, ...] | None, seq: int, seed: int) -> Sent:
        W, x = effect.W, effect.x
        message = _host(_encode(x, codec, (seed, self.rank, seq)))
        if ranks is not None and len(ranks) > 2:
            gathered = [torch.empty_like(message) for _ in ranks]
            self.wire_bytes += (len(ranks) - 1) * message.numel()
            group = self._block(ranks)
            work = dist.all_gather(gathered, message, group=group, async_op=True)

            def gathered_mean() -> Vec:
                return mean([_decode(m, x, codec) for m in gathered], len(ranks))

            return Sent([work], gathered_mean)
        theirs = {j: [torch.empty_like(message)] for j in W.senders(self.rank)}
        works = self._swap(seq, W.receivers(self.rank), theirs, [message])

        def result() -> Vec:
            rows = W.row(self.rank).items()
            return weighted((w, _decode(message if j == self.rank else theirs[j][0], x, codec)) for j, w in rows)

        return Sent(works, result)

    def coded_gradients(
        self, g: Vec | None, header: Tensor, like: Vec, codec: Codec, ranks: tuple[int, ...], key: tuple[int, int], t: int
    ) -> tuple[Vec | None, Tensor]:
        """The mean of the coded gradients of those who have one, and the sum of all ``header`` bytes."""
        seed, seq = key
        length = sum(codec.message_bytes(p.numel(), p.element_size()) for p in like.parts)
        body = torch.zeros(length, dtype=torch.uint8)
        if g is not None:
            body = _host(_encode(g, codec, (seed, self.rank, seq)))
        message = torch.cat([torch.tensor([g is not None], dtype=torch.uint8), header, body])
        gathered = [message]
        if len(ranks) > 1:
            gathered = [torch.empty_like(message) for _ in ranks]
            self.wire_bytes += (len(ranks) - 1) * message.numel()
            work = dist.all_gather(gathered, message, group=self._block(ranks), async_op=True)
            self.waiter.wait([work], t, "the others' gradients")
        start = 1 + header.numel()
        theirs = [_decode(m[start:], like, codec) for m in gathered if m[0]]
        counts = torch.stack([m[1:start].long() for m in gathered]).sum(dim=0)
        return (mean(theirs, len(theirs)) if theirs else None), counts

    def _swap(
        self, seq: int, receivers: Sequence[int], theirs: dict[int, list[Tensor]], mine: list[Tensor]
    ) -> list[dist.Work]:
        works: list[dist.Work | None] = []
        for k, _ in enumerate(mine):
            tag = (seq * 16 + k) % 2**30
            works += [dist.irecv(buffers[k], src=j, group=self._group, tag=tag) for j, buffers in theirs.items()]
        for k, part in enumerate(mine):
            tag = (seq * 16 + k) % 2**30
            works += [dist.isend(part, dst=j, group=self._group, tag=tag) for j in receivers]
            self.wire_bytes += len(receivers) * part.numel() * part.element_size()
        return [w for w in works if w is not None]

    # Collectives.

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...] | None = None) -> dist.Work | None:
        """Start an in-place sum among ``ranks`` (all, if not given)."""
        ranks = ranks or self._everyone
        if len(ranks) < 2:
            return None
        self.wire_bytes += 2 * (len(ranks) - 1) * tensor.numel() * tensor.element_size() // len(ranks)
        if tensor.is_cuda and self._nccl is not None and ranks == self._everyone:
            return dist.all_reduce(tensor, group=self._nccl, async_op=True)
        return dist.all_reduce(tensor, group=self._block(ranks), async_op=True)

    def _block(self, ranks: tuple[int, ...]) -> Any:
        if ranks not in self._blocks:
            members = list(ranks)
            self._blocks[ranks] = dist.new_group(
                members, backend="gloo", timeout=LONG, use_local_synchronization=True
            )
        return self._blocks[ranks]

    # Beside the strategy: start, average, ending. A group of their own, so that they pass what is in flight.

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values for all."""
        if self.size > 1:
            staged = _host(tensor).contiguous()
            work = dist.broadcast(staged, src=0, group=self._side, async_op=True)
            self.waiter.wait([work], -1, "rank 0's weights")
            tensor.copy_(staged)

    def agree_on(self, tensor: Tensor, op: Any, what: str) -> Tensor:
        """A blocking reduction among all; gives a new tensor."""
        staged = _host(tensor.clone())
        if self.size > 1:
            work = dist.all_reduce(staged, op=op, group=self._side, async_op=True)
            self.waiter.wait([work], -1, what)
        return staged

    def park(self) -> None:
        """Never give the groups back: destroying one with an operation pending blocks until its timeout.

        The process is about to end; the operating system closes the sockets, which releases the peers.
        """
        for group in (*self._blocks.values(), self._side, self._nccl):
            if group is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def close(self) -> None:
        """Give the groups back. All ranks are through with them."""
        for group in {id(g): g for g in (*self._blocks.values(), self._side, self._nccl) if g is not None}.values():
            dist.destroy_process_group(group)


def _host(tensor: Tensor) -> Tensor:
    return tensor.cpu() if tensor.is_cuda else tensor


def _encode(x: Vec, codec: Codec, key: tuple[int, ...]) -> Tensor:
    messages = [codec.encode(p, (*key, k)) for k, p in enumerate(x.parts)]
    return messages[0] if len(messages) == 1 else torch.cat([m.cpu() for m in messages])


def _decode(message: Tensor, like: Vec, codec: Codec) -> Vec:
    parts, start = [], 0
    for p in like.parts:
        length = codec.message_bytes(p.numel(), p.element_size())
        parts.append(codec.decode(message[start : start + length].to(p.device), p))
        start += length
    return Vec([p.to(wide(p.dtype)) for p in parts])
