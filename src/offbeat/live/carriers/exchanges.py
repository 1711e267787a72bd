"""Tensors between processes: averages of groups as all-reduces, everything else as messages between two.

Only the main thread starts operations, in the same order on every rank. They run in the background by nature (Gloo's
own threads); a mix that was begun is simply not waited for yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.live.carriers import doors, gpus, hosts
from offbeat.live.carriers.commons import Commons
from offbeat.live.carriers.phases import TwoPhases
from offbeat.live.carriers.shelves import Shelves
from offbeat.live.transport.board import Board
from offbeat.live.transport.group import LONG, Group
from offbeat.live.transport.waiter import Waiter, Work
from offbeat.method.effects import Mix, Ticket
from offbeat.tensors.codec import Codec, sent_to
from offbeat.tensors.stretches import CodedShare, Stretches
from offbeat.tensors.sums import keep, mean, owing, weighted
from offbeat.tensors.vector import Vec, wide
from offbeat.tensors.wire import all_gather_bytes, all_reduce_bytes, decode, encode, message_bytes
from offbeat.topology.matrix import Mixing

T = TypeVar("T", Shelves, Commons)


class Sent(Ticket[Vec]):
    """An exchange under way: what it waits for, and how the result is put together then."""

    __slots__ = ("_result", "works")

    def __init__(self, works: Sequence[Work], result: Callable[[], Vec]) -> None:
        self.works, self._result = works, result

    def result(self) -> Vec:
        """Call once, when all works are done."""
        return self._result()


class Transport:
    """This process's end of all exchanges of one attached optimiser."""

    def __init__(self, waiter: Waiter, board: Board, devices: Iterable[torch.device], of_shards: bool = False) -> None:
        self.waiter, self.rank, self.size = waiter, board.rank, board.size
        self.wire_bytes = 0
        self._board = board
        self._everyone = tuple(range(board.size))
        self._groups: dict[tuple[int, ...], Group] = {}
        self._commons: dict[tuple[tuple[int, ...], str], Commons | None] = {}
        self.carriers: set[str] = set()  # the ways vectors have gone
        gpus.post(board, gpus.here(devices))  # before the others are met: then all have posted theirs
        self._side = Group("side", self._everyone, board, waiter) if board.size > 1 else None
        self._equipment = gpus.posted(board)
        nccl = gpus.nccl_fits(self._equipment) and not of_shards  # its group is one of all ranks
        self._nccl: Any = dist.new_group(backend="nccl", timeout=LONG) if nccl else None

    # Memory that a host's ranks share.

    def shelves(self, name: str, ranks: tuple[int, ...], like: Vec, parameters: int) -> Shelves | None:
        """For these ranks, who all ask for them now; None where that is not to be had, or not wanted."""
        return self._shared(
            name, ranks, like.parts, lambda: Shelves(name, ranks, like, parameters, self._board, self.waiter)
        )

    def commons(self, ranks: tuple[int, ...], tensors: Sequence[Tensor]) -> Commons | None:
        """Of these ranks, for tensors that lie where these do. All of them ask for it when one does.

        None where that is not to be had, or not wanted.
        """
        device = tensors[0].device
        key = ranks, device.type
        if key not in self._commons:
            name = f"commons/{device.type}/" + "-".join(map(str, ranks))
            self._commons[key] = self._shared(
                name, ranks, tensors, lambda: Commons(name, ranks, device, self._board, self.waiter)
            )
        return self._commons[key]

    def _shared(self, name: str, ranks: tuple[int, ...], tensors: Sequence[Tensor], make: Callable[[], T]) -> T | None:
        wanted, on_gpu = hosts.wanted(), any(t.is_cuda for t in tensors)
        if len(ranks) < 2 or len({self._equipment[r].home for r in ranks}) > 1:
            return None
        if wanted is not None and wanted != ("ipc" if on_gpu else "shm"):
            return None
        if on_gpu and len({t.device for t in tensors} | {gpu for r in ranks for gpu in self._equipment[r].gpus}) != 2:
            return None  # only where all vectors of all ranks lie on one GPU
        board, found, why = self._board, None, ""
        # Nobody enters before all are there: one may be without data, and come when it hears that we wait.
        self.waiter.until(board.meeting(name, ranks), "the ranks of this host to share memory")
        try:
            found = make()
        except OSError as error:
            why = str(error)
        board.publish(f"{doors.SAID}/{name}/{board.rank}", why or doors.DONE)
        facts = [f"{doors.SAID}/{name}/{rank}" for rank in ranks]
        self.waiter.until(
            lambda: all(board.published(fact) for fact in facts), "the ranks of this host to share memory"
        )
        said = {rank: board.published(fact) or "" for rank, fact in zip(ranks, facts, strict=True)}
        failed = {rank: why for rank, why in said.items() if why != doors.DONE}
        if not failed and found is not None:
            self.carriers.add(found.carrier)
            return found
        if found is not None:
            found.close()
        if board.rank == ranks[0]:
            rank, why = min(failed.items(), key=lambda one: one[1].startswith(doors.FOLLOWS))
            words = f"memory cannot be shared on this host (rank {rank}: {why})"
            warnings.warn(f"{words}: vectors travel through Gloo, which is slower", stacklevel=2)
        return None

    # A mix, in three shapes.

    def mix(self, effect: Mix, seq: int, seed: int, later: bool = False) -> Sent:
        """Start exchange ``seq``. ``effect.x`` is read now, and copied where it could change before it is sent.

        ``later``: it is waited for later, and computing goes on.
        """
        ranks = effect.W.block(self.rank)
        codec = effect.codec if ranks is None else sent_to(effect.codec, len(ranks) - 1)
        if codec is not None:
            return self._coded(effect, codec, ranks, (seed, self.rank, seq))
        if ranks is not None and all_blocks(effect.W):
            return self._sum(effect.x, ranks, later)
        if effect.codec is None:  # all are here, those too whom nobody mixes with
            commons = self.commons(self._everyone, effect.x.parts)
            if commons is not None:
                return self._read_neighbours(effect, commons, later)
        return self._point_to_point(effect) if ranks is None else self._sum(effect.x, ranks, later)

    def _sum(self, x: Vec, ranks: tuple[int, ...], later: bool) -> Sent:
        if len(ranks) == 1:
            alone = x.clone()
            return Sent((), lambda: alone)
        commons = self.commons(ranks, x.parts)
        if commons is not None:
            parts = [torch.empty_like(p, dtype=wide(p.dtype)) for p in x.parts]
            works: list[Any] = [commons.lay(x.parts, later=later).sums(parts, each=later)]
            self.wire_bytes += all_reduce_bytes(len(ranks), sum(p.nbytes for p in parts)) // len(ranks)
        else:
            whole, parts = side_by_side(x)
            works = [work for p in whole if (work := self.all_reduce(p, ranks)) is not None]
        return Sent(works, lambda: Vec([p.div_(len(ranks)) for p in parts]))

    def _point_to_point(self, effect: Mix) -> Sent:
        W, x = effect.W, effect.x
        mine = [_host(p.to(wide(p.dtype), copy=True)) for p in x.parts]
        theirs = {j: [torch.empty_like(p) for p in mine] for j in W.senders(self.rank)}
        works = self._swap(W.receivers(self.rank), theirs, mine)

        def result() -> Vec:
            rows = [(w, Vec(mine if j == self.rank else theirs[j])) for j, w in W.row(self.rank).items()]
            mixed = weighted(rows)
            return Vec([m.to(p.device) for m, p in zip(mixed.parts, x.parts, strict=True)])

        return Sent(works, result)

    def _read_neighbours(self, effect: Mix, commons: Commons, later: bool) -> Sent:
        W, x = effect.W, effect.x
        receivers = W.receivers(self.rank)
        self.wire_bytes += len(receivers) * sum(p.numel() * wide(p.dtype).itemsize for p in x.parts)
        laid = commons.lay(x.parts, receivers, later)
        views, mixed = laid.views, list[Vec]()

        def read() -> None:
            row = W.row(self.rank)
            if W.block(self.rank) is not None:
                mixed.append(mean([Vec(views.of(j)) for j in row], len(row)))
            else:
                mixed.append(weighted((w, Vec(views.of(j))) for j, w in row.items()))

        return Sent([laid.needs(W.senders(self.rank), read)], lambda: mixed[0])

    def _coded(self, effect: Mix, codec: Codec, ranks: tuple[int, ...] | None, key: tuple[int, ...]) -> Sent:
        W, x = effect.W, effect.x
        if sent_to(codec, W.audience(self.rank)) is None:
            return self._hear_coded(effect, codec)
        if ranks is not None and effect.in_two_phases(self.rank):
            share = CodedShare(x, Stretches(x, codec, len(ranks)), ranks.index(self.rank), key, effect.lost)
            return self._in_two_phases(share, ranks)
        wanted = owing(x, effect.lost)
        message = encode(wanted, codec, key)
        if ranks is not None:
            gathered = [torch.empty_like(message) for _ in ranks]
            self.wire_bytes += all_gather_bytes(len(ranks), message.numel()) // len(ranks)
            work = self.group(ranks).all_gather(gathered, message)

            def gathered_mean() -> Vec:
                decoded = [decode(m, wanted, codec) for m in gathered]
                keep(effect.lost, wanted, decoded[ranks.index(self.rank)])
                return mean(decoded, len(ranks))

            return Sent([work], gathered_mean)
        theirs = {j: [torch.empty_like(message)] for j in W.senders(self.rank)}
        works = self._swap(W.receivers(self.rank), theirs, [message])

        def result() -> Vec:
            rows = W.row(self.rank).items()
            return weighted((w, decode(message if j == self.rank else theirs[j][0], x, codec)) for j, w in rows)

        return Sent(works, result)

    def _in_two_phases(self, share: CodedShare, ranks: tuple[int, ...]) -> Sent:
        """The first phase goes on in the background; the second begins when the result is asked for."""
        phases = self._phases(share, ranks)

        def result() -> Vec:
            self.waiter.wait([phases.to_all([True] * len(ranks))], "the others' sums")
            return Vec([p.div_(len(ranks)) for p in phases.result().parts])

        return Sent([phases.to_owners()], result)

    def _phases(self, share: CodedShare, ranks: tuple[int, ...]) -> TwoPhases:
        phases = TwoPhases(share, self.group(ranks))
        self.wire_bytes += phases.wire_bytes
        return phases

    def _hear_coded(self, effect: Mix, codec: Codec) -> Sent:
        """Others' coded shares beside one's own, which goes to nobody."""
        W, x = effect.W, effect.x
        mine, length = Vec([p.to(wide(p.dtype), copy=True) for p in x.parts]), message_bytes(x, codec)
        theirs = {j: [torch.empty(length, dtype=torch.uint8)] for j in W.senders(self.rank)}
        works = self._swap((), theirs, [])

        def result() -> Vec:
            rows = W.row(self.rank).items()
            return weighted((w, mine if j == self.rank else decode(theirs[j][0], x, codec)) for j, w in rows)

        return Sent(works, result)

    def coded_gradients(
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
        if gathers:
            return self._gathered_gradients(g, header, like, codec, ranks, key)
        stretches, own_key = Stretches(like, codec, len(ranks)), (key[0], self.rank, key[1])
        share = CodedShare(g, stretches, ranks.index(self.rank), own_key)
        message = torch.cat([torch.tensor([g is not None], dtype=torch.uint8), header])
        headers = torch.empty(len(ranks), message.numel(), dtype=torch.uint8)
        self.wire_bytes += all_gather_bytes(len(ranks), message.numel()) // len(ranks)
        told = self.group(ranks).all_gather(list(headers), message)
        phases = self._phases(share, ranks)
        self.waiter.wait([told, phases.to_owners()], "the others' gradients")
        gives, counts = headers[:, 0].tolist(), headers[:, 1:].long().sum(dim=0)
        if not any(gives):
            return None, counts
        self.waiter.wait([phases.to_all(gives)], "the others' sums")
        return Vec([p.div_(sum(gives)) for p in phases.result().parts]), counts

    def _gathered_gradients(
        self, g: Vec | None, header: Tensor, like: Vec, codec: Codec, ranks: tuple[int, ...], key: tuple[int, int]
    ) -> tuple[Vec | None, Tensor]:
        seed, seq = key
        body = torch.zeros(message_bytes(like, codec), dtype=torch.uint8)
        if g is not None:
            body = encode(g, codec, (seed, self.rank, seq))
        message = torch.cat([torch.tensor([g is not None], dtype=torch.uint8), header, body])
        gathered = [torch.empty_like(message) for _ in ranks]
        self.wire_bytes += all_gather_bytes(len(ranks), message.numel()) // len(ranks)
        self.waiter.wait([self.group(ranks).all_gather(gathered, message)], "the others' gradients")
        start = 1 + header.numel()
        theirs = [decode(m[start:], like, codec) for m in gathered if m[0]]
        counts = torch.stack([m[1:start].long() for m in gathered]).sum(dim=0)
        return (mean(theirs, len(theirs)) if theirs else None), counts

    def _swap(self, receivers: Sequence[int], theirs: dict[int, list[Tensor]], mine: list[Tensor]) -> list[dist.Work]:
        """Messages between two, as broadcasts in groups of two; the lower rank's comes first, as on the other side."""
        works = []
        for peer in sorted({*receivers, *theirs}):  # in one order everywhere, as making a group waits for the other
            group = self.group((min(self.rank, peer), max(self.rank, peer)))
            outward = [group.broadcast(part, self.rank) for part in mine if peer in receivers and self.rank < peer]
            inward = [group.broadcast(part, peer) for part in theirs.get(peer, ())]
            outward += [group.broadcast(part, self.rank) for part in mine if peer in receivers and self.rank > peer]
            works += inward + outward
        self.wire_bytes += len(receivers) * sum(part.numel() * part.element_size() for part in mine)
        return works

    # Collectives.

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Work | None:
        """Start an in-place sum among ``ranks``. Gloo takes CUDA tensors too, and copies them to the host and back."""
        if len(ranks) < 2:
            return None
        self.wire_bytes += all_reduce_bytes(len(ranks), tensor.nbytes) // len(ranks)
        commons = self.commons(ranks, [tensor])
        if commons is not None:
            return commons.lay([tensor]).sums([tensor])
        if tensor.is_cuda and self._nccl is not None and ranks == self._everyone:
            self.carriers.add("nccl")
            work: dist.Work = dist.all_reduce(tensor, group=self._nccl, async_op=True)
            return work
        return self.group(ranks).all_reduce(tensor)

    def group(self, ranks: tuple[int, ...]) -> Group:
        """The group of these ranks, made by all of them when it is first asked for."""
        if ranks not in self._groups:
            self.carriers.add("gloo")
            self._groups[ranks] = Group("-".join(map(str, ranks)), ranks, self._board, self.waiter)
        return self._groups[ranks]

    # Beside the strategy: start, average, ending. A group of their own, so that they pass what is in flight.

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values for all, as bytes: Gloo does not know every dtype."""
        if self._side is not None:
            staged = _host(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
            self.waiter.wait([self._side.broadcast(staged, 0)], "rank 0's weights")
            tensor.copy_(staged.view(tensor.dtype).view(tensor.shape))

    def agree_on(self, tensor: Tensor, op: Any, what: str) -> Tensor:
        """A blocking reduction among all; gives a new tensor."""
        staged = _host(tensor.clone())
        if self._side is not None:
            self.waiter.wait([self._side.all_reduce(staged, op)], what)
        return staged

    def park(self) -> None:
        """Leave the groups as they are; see ``Group.park``."""
        self._let_go(together=False)
        for group in self._all_groups():
            group.park()

    def close(self) -> None:
        """Give the groups back. All ranks are through with them."""
        self._let_go(together=True)
        for group in self._all_groups():
            group.close()
        if self._nccl is not None:
            dist.destroy_process_group(self._nccl)
        self._groups, self._side, self._nccl = {}, None, None

    def _let_go(self, together: bool) -> None:
        for commons in self._commons.values():
            if commons is not None:
                commons.close(together)
        self._commons = {}

    def _all_groups(self) -> list[Group]:
        return [*self._groups.values(), *([self._side] if self._side is not None else [])]


def side_by_side(x: Vec) -> tuple[list[Tensor], list[Tensor]]:
    """A copy to be summed: few long tensors to send, and in them the parts of ``x``."""
    kinds = [(wide(p.dtype), p.device) for p in x.parts]
    alike = [[k for k, one in enumerate(kinds) if one == kind] for kind in dict.fromkeys(kinds)]
    whole = [torch.cat([x.parts[k].to(kinds[k][0]) for k in group]) for group in alike]
    parts = dict[int, Tensor]()
    for tensor, group in zip(whole, alike, strict=True):
        parts.update(zip(group, tensor.split([x.parts[k].numel() for k in group]), strict=True))
    return whole, [parts[k] for k in range(len(kinds))]


@lru_cache(maxsize=256)
def all_blocks(W: Mixing) -> bool:
    """Whether everybody takes the mean of a group."""
    return all(W.block(rank) is not None for rank in range(W.size))


def _host(tensor: Tensor) -> Tensor:
    return tensor.cpu() if tensor.is_cuda else tensor
