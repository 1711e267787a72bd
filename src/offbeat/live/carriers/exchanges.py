"""Exchanges in step: averages of groups, mixes along a graph, gradients while backward makes them, and small numbers.

All of it goes through the host processes. Only the main thread asks, in the same order on every rank, and a mix that
was begun is simply not waited for yet. Where the script's own group is NCCL's and each rank has a GPU of its own, a sum
of all ranks goes through NCCL.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.live.carriers import gpus
from offbeat.live.carriers.coding import CodedInStep
from offbeat.live.carriers.sent import Sent
from offbeat.live.memory.adding import Pieces, copy
from offbeat.live.transport import hosts
from offbeat.live.worker.board import Board
from offbeat.live.worker.exchange_client import ExchangeClient, Exchanged, InStep
from offbeat.live.worker.waiter import Waiter, Work
from offbeat.method.effects import Mix
from offbeat.tensors.houses import numbered
from offbeat.tensors.vector import Vec, wide
from offbeat.tensors.wire import all_reduce_bytes
from offbeat.topology.matrix import Mixing

LONG = timedelta(days=7)  # our patience is kept by the waiter


class Transport:
    """This process's end of all exchanges of one attached optimiser."""

    def __init__(self, waiter: Waiter, board: Board, devices: Iterable[torch.device], of_shards: bool = False) -> None:
        self.waiter, self.rank, self.size = waiter, board.rank, board.size
        self.wire_bytes = 0
        self._board = board
        self._everyone = tuple(range(board.size))
        self.carriers: set[str] = set()  # the ways vectors have gone
        gpus.post(board, gpus.here(devices))
        waiter.until(lambda: gpus.all_have_posted(board), "the others to attach")
        self._equipment = gpus.posted(board)
        self.line = board.line
        self._in_step: InStep | None = None  # where there are several ranks
        if board.line is not None:
            self._in_step = InStep(board.line, board, waiter, self.gpus_of_slots, self.carriers)
        self.coded = CodedInStep(self)
        # Its group is one of all ranks, and ends with any of them.
        nccl = gpus.nccl_fits(self._equipment) and not of_shards and not board.min_workers
        self._nccl: Any = dist.new_group(backend="nccl", timeout=LONG) if nccl else None

    @property
    def in_step(self) -> InStep:
        assert self._in_step is not None, "one rank exchanges nothing"
        return self._in_step

    @property
    def place(self) -> tuple[int, int]:
        """Where in the run's exchanges this worker is."""
        return self.in_step.place

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self.in_step.place = place

    def turn_page(self, page: int) -> None:
        """The exchanges that follow are those of another place in the run, which is the same on all ranks."""
        if self._in_step is not None:
            self._in_step.page = page

    @property
    def homes(self) -> list[str]:
        """The hosts of all ranks."""
        return [own.home for own in self._equipment]

    @property
    def dead(self) -> Collection[int]:
        """Without whom the run goes on, as far as this rank has heard."""
        return self._board.dead

    @property
    def numbered_homes(self) -> tuple[int, ...]:
        """The numbers of all ranks' hosts."""
        return numbered(self.homes)

    @property
    def hosts(self) -> int:
        """On how many the ranks are."""
        return len(set(self.numbered_homes))

    # Memory that a host's ranks share.

    def gpus_of_slots(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """The GPUs on which slots lie for vectors that look like these; none: they lie in memory of the host.

        Where there are several hosts, they do, too, since vectors leave it from there.
        """
        on_one = all(t.is_cuda for t in tensors) and len({t.device for t in tensors}) == 1
        if not on_one or len(set(self.homes)) > 1 or hosts.wanted() not in (None, "ipc"):
            return ()
        return gpus.of_slots(self._equipment)

    def handing_over(self, with_gradient: bool = False) -> None:
        """The next exchange has this worker's work in it."""
        self._board.handing_over(with_gradient)

    # A mix.

    def mix(self, effect: Mix, seq: int, seed: int, later: bool = False) -> Sent:
        """Start exchange ``seq``. ``effect.x`` is read now, and copied where it could change before it is sent.

        ``later``: it is waited for later, and computing goes on.
        """
        ranks, in_blocks = effect.W.block(self.rank), all_blocks(effect.W)
        if effect.codec is not None:
            return self.coded.mix(effect, effect.codec, (seed, self.rank, seq), in_blocks, later)
        if ranks is not None and in_blocks:
            return self.plain_mean(effect.x, ranks, later)
        return self._along_a_row(effect, later)

    def plain_mean(self, x: Vec, ranks: tuple[int, ...], later: bool) -> Sent:
        if len(ranks) == 1:
            alone = x.clone()
            return Sent((), lambda: alone)
        client = self.in_step.among(ranks, x.parts)
        self.wire_bytes += all_reduce_bytes(len(ranks), _wide_bytes(x)) // len(ranks)
        everyone = [(member, 1.0) for member in range(len(ranks))]
        return _copied(client.lay(x, sums=everyone, divisor=len(ranks), later=later), client, len(ranks))

    def _along_a_row(self, effect: Mix, later: bool) -> Sent:
        """Along a row of the matrix. All ranks come here, also those whom nobody mixes with."""
        W, x = effect.W, effect.x
        client, row = self.in_step.among(self._everyone, x.parts), W.row(self.rank)
        self.wire_bytes += len(W.receivers(self.rank)) * _wide_bytes(x)
        is_mean = W.block(self.rank) is not None
        sums = [(j, 1.0 if is_mean else w) for j, w in row.items()]
        divisor, receivers = len(row) if is_mean else 1, W.receivers(self.rank)
        begun = client.lay(x, sums=sums, divisor=divisor, sends=receivers or [self.rank], later=later)
        return _copied(begun, client, len(row) if is_mean else 0)

    # Gradients, bucket by bucket.

    def part_of_mean(self, out: Tensor, pieces: Pieces | None, ranks: tuple[int, ...]) -> tuple[Work | None, int]:
        """Start a sum among ``ranks`` of what they have in ``pieces``, or in ``out``, into ``out``. Answers also what
        it will be divided by.

        Pieces are laid where the sum is made and nowhere else, and the sum is divided by the number of ranks while it
        is made: each spares a pass over it. Only by a power of two, which changes no bit but the exponent: a mean of
        fewer can still be made of it.
        """
        if len(ranks) < 2 or (out.is_cuda and self._nccl is not None and ranks == self._everyone):
            copy(pieces(out) if pieces is not None else ())
            return self._through_nccl(out, ranks), 1
        divisor = len(ranks) if len(ranks).bit_count() == 1 else 1
        self.wire_bytes += all_reduce_bytes(len(ranks), out.nbytes) // len(ranks)
        client, everyone = self.in_step.among(ranks, [out]), [(member, 1.0) for member in range(len(ranks))]
        write = Vec([out]) if pieces is None else lambda room: copy(pieces(room.parts[0]))
        return Landing(client.lay(write, sums=everyone, divisor=divisor), out), divisor

    def _through_nccl(self, tensor: Tensor, ranks: tuple[int, ...]) -> Work | None:
        if len(ranks) < 2:
            return None
        self.carriers.add("nccl")
        self.wire_bytes += all_reduce_bytes(len(ranks), tensor.nbytes) // len(ranks)
        work: dist.Work = dist.all_reduce(tensor, group=self._nccl, async_op=True)
        return work

    # Beside the method: start, average, ending.

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values for all."""
        if self.size > 1:
            self.in_step.broadcast(tensor, "rank 0's weights")

    def agree_on(self, tensor: Tensor, op: Any, what: str) -> Tensor:
        """A blocking reduction among all; gives a new tensor."""
        return self.in_step.agree_on(tensor, op, what) if self.size > 1 else tensor.detach().to("cpu", copy=True)

    def park(self) -> None:
        """Leave without waiting for anybody."""
        self._leave()

    def close(self) -> None:
        """All ranks are through."""
        self._leave()
        if self._nccl is not None:
            dist.destroy_process_group(self._nccl)
            self._nccl = None

    def _leave(self) -> None:
        if self._in_step is not None:
            self._in_step.close()
        self._in_step = self.line = None


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

    @property
    def absent(self) -> int:
        """How many had died before they brought their part."""
        return len(self._begun.absent)


def _copied(begun: Exchanged, client: ExchangeClient, mean_of: int) -> Sent:
    """What comes of it in memory of its own: a method may keep it. ``mean_of``: so many, if it is a mean, of which some
    may have died."""

    def result() -> Vec:
        found: list[Vec] = []
        begun.take(lambda vecs, _: found.append(vecs[0].clone()))
        client.release()
        if mean_of and begun.absent:
            return found[0] * (mean_of / (mean_of - len(begun.absent)))
        return found[0]

    return Sent([begun], result)


def _wide_bytes(x: Vec) -> int:
    return sum(p.numel() * wide(p.dtype).itemsize for p in x.parts)


@lru_cache(maxsize=256)
def all_blocks(W: Mixing) -> bool:
    """Whether everybody takes the mean of a group."""
    return all(W.block(rank) is not None for rank in range(W.size))
