"""Tensors between processes: averages of groups as all-reduces, everything else as messages between two.

Only the main thread starts operations, in the same order on every rank. They run in the background by nature (Gloo's
own threads); a mix that was begun is simply not waited for yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.live.carriers import gpus
from offbeat.live.carriers.across import SUMS, Across, across
from offbeat.live.carriers.coded import CodedExchanges
from offbeat.live.carriers.coding import CodedInStep
from offbeat.live.carriers.commons import Commons
from offbeat.live.carriers.group import LONG, Group
from offbeat.live.carriers.porter import Porter
from offbeat.live.carriers.sent import Sent
from offbeat.live.carriers.sharing import shared
from offbeat.live.memory.hands import ONE, Hands, Pieces
from offbeat.live.transport import hosts
from offbeat.live.worker.board import Board
from offbeat.live.worker.exchange_client import ExchangeClient, Exchanged, InStep
from offbeat.live.worker.waiter import Waiter, Work
from offbeat.method.effects import Mix
from offbeat.tensors.codec import sent_to
from offbeat.tensors.houses import numbered, together
from offbeat.tensors.sums import mean, weighted
from offbeat.tensors.vector import Vec, wide
from offbeat.tensors.wire import all_reduce_bytes
from offbeat.topology.matrix import Mixing

T = TypeVar("T", bound=Commons)


class Transport:
    """This process's end of all exchanges of one attached optimiser."""

    def __init__(self, waiter: Waiter, board: Board, devices: Iterable[torch.device], of_shards: bool = False) -> None:
        self.waiter, self.rank, self.size = waiter, board.rank, board.size
        self.wire_bytes = 0
        self._board = board
        self._everyone = tuple(range(board.size))
        self._groups: dict[tuple[int, ...], Group] = {}
        self._commons: dict[tuple[tuple[int, ...], str], Commons | None] = {}
        self._across: dict[tuple[tuple[int, ...], str], Across | None] = {}
        self.porter = Porter(board)
        self.carriers: set[str] = set()  # the ways vectors have gone
        gpus.post(board, gpus.here(devices))
        waiter.until(lambda: gpus.all_have_posted(board), "the others to attach")
        self._equipment = gpus.posted(board)
        self.line = board.line  # where rounds and visits are the host process's
        self.in_step: InStep | None = None
        if board.line is not None:
            self.in_step = InStep(board.line, board, waiter.patience_s, self.common_gpu, self.carriers)
        self.coded = CodedExchanges(self) if self.in_step is None else CodedInStep(self, self.in_step)
        self._side: Group | None = None
        if board.size > 1 and self.in_step is None:
            self._side = Group("side", self._everyone, board, waiter)
        self._hands = Hands(self.homes.count(self.homes[board.rank]))
        nccl = gpus.nccl_fits(self._equipment) and not of_shards  # its group is one of all ranks
        self._nccl: Any = dist.new_group(backend="nccl", timeout=LONG) if nccl else None

    @property
    def homes(self) -> list[str]:
        """The hosts of all ranks."""
        return [own.home for own in self._equipment]

    @property
    def numbered_homes(self) -> tuple[int, ...]:
        """The numbers of all ranks' hosts, as far as bytes are concerned: where Gloo is wanted, each has its own."""
        return tuple(range(self.size)) if hosts.wanted() == "gloo" else numbered(self.homes)

    @property
    def hosts(self) -> int:
        """On how many the ranks are."""
        return len(set(self.numbered_homes))

    # Memory that a host's ranks share.

    def common_gpu(self, tensors: Sequence[Tensor]) -> str:
        """The only GPU on which vectors lie that look like these, on all ranks; "": there is no such GPU.

        Where there are several hosts, vectors lie in host memory, from which they leave it.
        """
        if len(set(self.homes)) > 1:
            return ""
        gpus = {gpu for own in self._equipment for gpu in own.gpus}
        alone = all(t.is_cuda for t in tensors) and len({t.device for t in tensors}) == 1 and len(gpus) == 1
        return next(iter(gpus)) if alone and hosts.wanted() in (None, "ipc") and not hosts.gpu_each() else ""

    def commons(self, ranks: tuple[int, ...], tensors: Sequence[Tensor]) -> Commons | None:
        """Of these ranks, for tensors that lie where these do. All of them ask for it when one does.

        None where that is not to be had, or not wanted.
        """
        device = tensors[0].device
        key = ranks, device.type
        if key not in self._commons:
            name = self._board.numbered(f"commons/{device.type}", ranks)
            self._commons[key] = self._shared(
                name, ranks, tensors, lambda: Commons(name, ranks, device, self._board, self.waiter, self._hands)
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
        found = shared(name, ranks, make, self._board, self.waiter)
        if found is not None:
            self.carriers.add(found.carrier)
        return found

    def across(self, ranks: tuple[int, ...], tensors: Sequence[Tensor]) -> Across | None:
        """The way of sums among ranks of several hosts. All of them ask for it when one does.

        None where they are on one host, or where no two are, or where that is not to be had, or not wanted.
        """
        device, homes = tensors[0].device, self.homes
        houses, on_gpu = together(ranks, homes), any(t.is_cuda for t in tensors)
        one_gpu_each = all(len({gpu for r in house for gpu in self._equipment[r].gpus}) == 1 for house in houses)
        if len(houses) == 1 or (on_gpu and (not one_gpu_each or len({t.device for t in tensors}) > 1)):
            return None
        key = ranks, device.type
        if key not in self._across:
            name = self._board.numbered(f"across/{device.type}", ranks)
            self._across[key] = across(
                name, ranks, homes, device, self._board, self.waiter, self.porter.waiter, self._hands
            )
        found = self._across[key]
        if found is not None:
            self.carriers |= found.carriers
        return found

    # A mix, in three shapes.

    def mix(self, effect: Mix, seq: int, seed: int, later: bool = False) -> Sent:
        """Start exchange ``seq``. ``effect.x`` is read now, and copied where it could change before it is sent.

        ``later``: it is waited for later, and computing goes on.
        """
        ranks = effect.W.block(self.rank)
        if effect.codec is not None and isinstance(self.coded, CodedInStep):
            return self.coded.mix(effect, effect.codec, (seed, self.rank, seq), all_blocks(effect.W), later)
        codec = effect.codec if ranks is None else sent_to(effect.codec, len(ranks) - 1)
        if codec is not None and isinstance(self.coded, CodedExchanges):
            return self.coded.mix(effect, codec, ranks, (seed, self.rank, seq))
        if ranks is not None and all_blocks(effect.W):
            return self.plain_mean(effect.x, ranks, later)
        if effect.codec is None and self.in_step is not None:
            return self._mixed_here(effect, self.in_step, later)
        if effect.codec is None:  # all are here, those too whom nobody mixes with
            commons = self.commons(self._everyone, effect.x.parts)
            if commons is not None:
                return self._read_neighbours(effect, commons, later)
        # On several hosts in the same way for all, as those of a host take part in each other's exchanges.
        between_two = ranks is None or (effect.codec is None and len(set(self.homes)) > 1)
        return self._point_to_point(effect, later) if between_two else self.plain_mean(effect.x, ranks or (), later)

    def plain_mean(self, x: Vec, ranks: tuple[int, ...], later: bool) -> Sent:
        if len(ranks) == 1:
            alone = x.clone()
            return Sent((), lambda: alone)
        if self.in_step is not None:
            client = self.in_step.among(ranks, x.parts)
            self.wire_bytes += all_reduce_bytes(len(ranks), _wide_bytes(x)) // len(ranks)
            everyone = [(member, 1.0) for member in range(len(ranks))]
            return _copied(client.lay(x, sums=everyone, divisor=len(ranks), later=later), client)
        commons = self.commons(ranks, x.parts)
        if commons is not None:
            parts = [torch.empty_like(p, dtype=wide(p.dtype)) for p in x.parts]
            self.wire_bytes += all_reduce_bytes(len(ranks), sum(p.nbytes for p in parts)) // len(ranks)
            return Sent([commons.lay(x.parts, later=later).sums(parts, len(ranks), each=later)], lambda: Vec(parts))
        whole, parts = side_by_side(x)
        works = [work for p in whole if (work := self.all_reduce(p, ranks)) is not None]
        return Sent(works, lambda: Vec([p.div_(len(ranks)) for p in parts]))

    def _mixed_here(self, effect: Mix, in_step: InStep, later: bool) -> Sent:
        """Along a row of the matrix, by the host process."""
        W, x = effect.W, effect.x
        client, row = in_step.among(self._everyone, x.parts), W.row(self.rank)
        self.wire_bytes += len(W.receivers(self.rank)) * _wide_bytes(x)
        is_mean = W.block(self.rank) is not None
        sums = [(j, 1.0 if is_mean else w) for j, w in row.items()]
        divisor, receivers = len(row) if is_mean else 1, W.receivers(self.rank)
        return _copied(client.lay(x, sums=sums, divisor=divisor, sends=receivers or [self.rank], later=later), client)

    def _point_to_point(self, effect: Mix, later: bool) -> Sent:
        """Messages between two; where some are on this host, these read each other's memory."""
        W, x = effect.W, effect.x
        near = self._near(x.parts)
        inside = () if near is None else near.ranks
        mine = [_host(p.to(wide(p.dtype), copy=True)) for p in x.parts]
        theirs = {j: [torch.empty_like(p) for p in mine] for j in W.senders(self.rank)}
        receivers = W.receivers(self.rank)
        far = {j: parts for j, parts in theirs.items() if j not in inside}
        works: list[Work] = list(self.swap([r for r in receivers if r not in inside], far, mine))
        if near is not None:
            beside = [r for r in receivers if r in inside]
            self.wire_bytes += len(beside) * sum(p.nbytes for p in mine)
            laid = near.lay(x.parts, [near.ranks.index(r) for r in beside], later)
            views, senders = laid.views, [j for j in theirs if j in inside]

            def read() -> None:
                for j in senders:
                    for own, laid_there in zip(theirs[j], views.of(inside.index(j)), strict=True):
                        own.copy_(laid_there)

            works.append(laid.needs([inside.index(j) for j in senders], read))

        def result() -> Vec:
            rows = [(w, Vec(mine if j == self.rank else theirs[j])) for j, w in W.row(self.rank).items()]
            mixed = weighted(rows) if W.block(self.rank) is None else mean([x for _, x in rows], len(rows))
            return Vec([m.to(p.device) for m, p in zip(mixed.parts, x.parts, strict=True)])

        return Sent(works, result)

    def _near(self, tensors: Sequence[Tensor]) -> Commons | None:
        """What the ranks of this host share, where there are other hosts."""
        house = tuple(r for r in self._everyone if self.homes[r] == self.homes[self.rank])
        return None if house == self._everyone else self.commons(house, tensors)

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

    def swap(self, receivers: Sequence[int], theirs: dict[int, list[Tensor]], mine: list[Tensor]) -> list[dist.Work]:
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

    def part_of_mean(self, out: Tensor, pieces: Pieces | None, ranks: tuple[int, ...]) -> tuple[Work | None, int]:
        """Start a sum among ``ranks`` of what they have in ``pieces``, or in ``out``, into ``out``. Answers also what
        it will be divided by.

        Where memory is shared, pieces are laid there and nowhere else, and the sum is divided by the number of ranks
        while it is made: each spares a pass over it. Only by a power of two, which changes no bit but the exponent: a
        mean of fewer can still be made of it.
        """
        divisor = len(ranks) if len(ranks).bit_count() == 1 else 1
        if len(ranks) > 1 and self.in_step is not None and not (out.is_cuda and self._nccl is not None):
            self.wire_bytes += all_reduce_bytes(len(ranks), out.nbytes) // len(ranks)
            return self._summed_here(self.in_step, out, pieces, ranks, divisor), divisor
        commons = self.commons(ranks, [out]) if len(ranks) > 1 else None
        if commons is None:
            ONE.copy(pieces(out) if pieces is not None else ())
            return self.all_reduce(out, ranks), 1
        self.wire_bytes += all_reduce_bytes(len(ranks), out.nbytes) // len(ranks)
        return commons.lay([out], pieces=pieces).sums([out], divisor), divisor

    def _summed_here(
        self, in_step: InStep, out: Tensor, pieces: Pieces | None, ranks: tuple[int, ...], divisor: int
    ) -> Work:
        """A sum by the host process, into ``out``."""
        client, everyone = in_step.among(ranks, [out]), [(member, 1.0) for member in range(len(ranks))]
        write = Vec([out]) if pieces is None else lambda room: ONE.copy(pieces(room.parts[0]))
        return Landing(client.lay(write, sums=everyone, divisor=divisor), out)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Work | None:
        """Start an in-place sum among ``ranks``. Gloo takes CUDA tensors too, and copies them to the host and back."""
        if len(ranks) < 2:
            return None
        self.wire_bytes += all_reduce_bytes(len(ranks), tensor.nbytes) // len(ranks)
        if self.in_step is not None and not (tensor.is_cuda and self._nccl is not None):
            return self._summed_here(self.in_step, tensor, None, ranks, 1)
        commons = self.commons(ranks, [tensor])
        if commons is not None:
            return commons.lay([tensor]).sums([tensor])
        if tensor.is_cuda and self._nccl is not None and ranks == self._everyone:
            self.carriers.add("nccl")
            work: dist.Work = dist.all_reduce(tensor, group=self._nccl, async_op=True)
            return work
        composed = self.across(ranks, [tensor])
        if composed is not None:
            return self.porter.send(partial(composed.total, [tensor], SUMS))
        return self.group(ranks).all_reduce(tensor)

    def group(self, ranks: tuple[int, ...]) -> Group:
        """The group of these ranks, made by all of them when it is first asked for."""
        if ranks not in self._groups:
            self.carriers.add("gloo")
            self._groups[ranks] = Group("mixes", ranks, self._board, self.waiter)
        return self._groups[ranks]

    # Beside the method: start, average, ending. A group of their own, so that they pass what is in flight.

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values for all, as bytes: Gloo does not know every dtype."""
        if self.in_step is not None:
            staged = _host(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
            client = self.in_step.once(staged)
            mine, sends = (Vec([staged]), self._everyone) if self.rank == 0 else (None, ())
            begun = client.lay(mine, reads=[0], sends=sends)
            self.waiter.wait([begun], "rank 0's weights")
            begun.take(lambda vecs, _: vecs[0].put_into(Vec([staged])))
            client.close()
            tensor.copy_(staged.view(tensor.dtype).view(tensor.shape))
        elif self._side is not None:
            staged = _host(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
            self.waiter.wait([self._side.broadcast(staged, 0)], "rank 0's weights")
            tensor.copy_(staged.view(tensor.dtype).view(tensor.shape))

    def agree_on(self, tensor: Tensor, op: Any, what: str) -> Tensor:
        """A blocking reduction among all; gives a new tensor."""
        staged = _host(tensor.clone())
        if self.in_step is not None and staged.numel():
            client, everyone = self.in_step.once(staged), range(self.size)
            sums = op == dist.ReduceOp.SUM and staged.is_floating_point()
            begun = client.lay(
                Vec([staged.reshape(-1)]),
                sums=[(rank, 1.0) for rank in everyone if sums],
                reads=[] if sums else everyone,
                sends=[] if sums else everyone,
            )
            self.waiter.wait([begun], what)
            found: list[Tensor] = []
            begun.take(lambda vecs, _: found.extend(vec.parts[0].clone() for vec in vecs))
            client.close()
            return _reduced(found, op).reshape(staged.shape)
        if self._side is not None:
            self.waiter.wait([self._side.all_reduce(staged, op)], what)
        return staged

    def park(self) -> None:
        """Leave without waiting for anybody; for the groups see ``Group.park``."""
        self.porter.close(give_up=True)
        self._let_go(together=False)
        self._leave_host()
        for group in self._all_groups():
            group.park()

    def close(self) -> None:
        """Give the groups back. All ranks are through with them."""
        self.porter.close()
        self._let_go(together=True)
        self._leave_host()
        for group in self._all_groups():
            group.close()
        if self._nccl is not None:
            dist.destroy_process_group(self._nccl)
        self._groups, self._across, self._side, self._nccl = {}, {}, None, None

    def _leave_host(self) -> None:
        if self.in_step is not None:
            self.in_step.close()
        self.in_step = self.line = None

    def _let_go(self, together: bool) -> None:
        for commons in self._commons.values():
            if commons is not None:
                commons.close(together)
        for one in self._across.values():
            if one is not None:
                one.close(together)
        self._commons = {}
        self._hands.close()

    def _all_groups(self) -> list[Group]:
        between = [group for one in self._across.values() if one is not None for group in one.groups()]
        return [*self._groups.values(), *between, *([self._side] if self._side is not None else [])]


class Landing:
    """A sum under way whose result goes into a tensor."""

    def __init__(self, begun: Exchanged, out: Tensor) -> None:
        self._begun, self._out, self._is_over = begun, out, False

    def within(self, seconds: float) -> bool:
        if not self._is_over and self._begun.within(seconds):
            self._begun.take(self._land)
            self._is_over = True
        return self._is_over

    def _land(self, vecs: list[Vec], notes: list[Any]) -> None:
        self._out.copy_(vecs[0].parts[0])


def _copied(begun: Exchanged, client: ExchangeClient) -> Sent:
    """What comes of it in memory of its own: a method may keep it."""

    def result() -> Vec:
        found: list[Vec] = []
        begun.take(lambda vecs, _: found.append(vecs[0].clone()))
        client.release()
        return found[0]

    return Sent([begun], result)


def _reduced(found: list[Tensor], op: Any) -> Tensor:
    out = found[0]
    for other in found[1:]:
        if op == dist.ReduceOp.MAX:
            out = torch.maximum(out, other)
        elif op == dist.ReduceOp.MIN:
            out = torch.minimum(out, other)
        else:
            out = out + other
    return out


def _wide_bytes(x: Vec) -> int:
    return sum(p.numel() * wide(p.dtype).itemsize for p in x.parts)


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
