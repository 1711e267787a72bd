"""A worker's side of exchanges in step (`offbeat.live.host.exchange_server`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.live.host import protocol as say
from offbeat.live.host.exchange_server import PAGE
from offbeat.live.host.host_sums import told
from offbeat.live.host.protocol import Answer
from offbeat.live.transport.errors import PeerFailed
from offbeat.live.worker.board import Board
from offbeat.live.worker.channel_client import HostClient
from offbeat.live.worker.line import Line
from offbeat.live.worker.slots import slots_for
from offbeat.live.worker.waiter import Waiter
from offbeat.tensors.codec import Codec
from offbeat.tensors.vector import Vec, wide

Kinds = Sequence[tuple[torch.dtype, int]]


class Exchanged:
    """One that is under way: a work to wait for, and then what came of it."""

    def __init__(self, client: ExchangeClient, number: int) -> None:
        self._client, self._number = client, number
        self._answer: Answer | None = None
        self.absent: Sequence[int] = ()  # whom it named, and who had died before

    def within(self, seconds: float) -> bool:
        """Whether it is over; waits no longer than that."""
        if self._answer is None:
            self._answer = self._client.answered_within(self._number, seconds)
        return self._answer is not None

    def take(self, use: Callable[[list[Vec], list[Any]], object]) -> None:
        """Let ``use`` read the vectors that were asked for, and what was said beside those that were read."""
        assert self._answer is not None
        self.absent = self._answer.about[2]
        use([self._client.read(refs) for refs, _ in self._answer.given], self._answer.about[1])
        self._client.has_read(self._answer)
        self._answer = None


class ExchangeClient(HostClient):
    """The exchanges of ``members``, whose ranks these are, with vectors of ``kinds`` that lie where ``like`` does.

    ``codec``: of sums, on their way to other hosts. ``page``: at which page of the run's exchanges this worker is;
    None: there is one exchange here.
    """

    def __init__(
        self,
        key: str,
        line: Line,
        members: tuple[int, ...],
        like: Vec,
        kinds: Kinds,
        gpus: Sequence[str],
        board: Board,
        patience_s: float,
        codec: Codec | None = None,
        page: Callable[[], int] | None = None,
    ) -> None:
        word = line.join(key)
        slots = slots_for(line, like, kinds, 0, bool(gpus), word)
        super().__init__(key, line, word, slots, board, patience_s)
        self.members, self.me = members, members.index(board.rank)
        self._page, self._number, self._answers = page or int, -1, dict[int, Answer]()
        self._unwanted: set[int] = set()  # exchanges to which this worker only brings something
        self._last, self._unread = 0, set[int]()  # numbers of answers: the last, and those that are to be read
        named = [(str(dtype).removeprefix("torch."), n) for dtype, n in kinds]
        plan = {
            **board.plan(members),
            "what": "exchanges",
            "kinds": named,
            "notes": 0,
            "gpus": list(gpus),
            "codec": told(codec),
            "pages": page is not None,
        }
        self.open(say.OpenChannel(key, self.me, plan, 0, False, False, word))

    def lay(
        self,
        write: Callable[[Vec], None] | Vec | None,
        *,
        sums: Sequence[tuple[int, float]] = (),
        divisor: int = 1,
        reads: Sequence[int] = (),
        sends: Sequence[int] = (),
        note: Any = None,
        draws: Sequence[int] = (),
        keeps: bool = False,
        later: bool = False,
    ) -> Exchanged:
        """The next exchange: bring a vector, or let ``write`` put one where it is to lie, or bring nothing.

        ``sums``, ``reads``, ``sends``: see `protocol.Lay`, by members; where nobody else is sent what this one brings,
        all want the same sum. ``draws``, ``keeps``: of a coded one. ``later``: the answer is waited for later.
        """
        slot = -1
        if write is not None:
            slot = self._room()
            if isinstance(write, Vec):
                self._slots.write(write, slot)
            else:
                write(self._slots.room(slot))
                self._slots.wrote([slot])
        number = self._number = max(self._number + 1, self._page() * PAGE)
        if not sums and not reads:
            self._unwanted.add(number)
        self.send(
            say.Lay(
                self.key,
                number,
                slot,
                note,
                list(sums),
                divisor,
                list(reads),
                list(sends),
                bool(sums) and not sends,
                list(draws),
                keeps,
                later,
                self._answered,
                self._slots.due(),
            )
        )
        return Exchanged(self, number)

    def _room(self) -> int:
        while not self._grants:
            self._sort(self._wait("a slot to write to"))
        return self._grants.popleft()

    def _sort(self, answer: Answer) -> None:
        self._last = answer.number
        if answer.how == "exchange" and answer.about[0] in self._unwanted:
            self._unwanted.discard(answer.about[0])
            self._answered = min(self._unread, default=self._last + 1) - 1
        elif answer.how == "exchange":
            self._answers[answer.about[0]] = answer
            self._unread.add(answer.number)

    def answered_within(self, number: int, seconds: float) -> Answer | None:
        end_s = time.monotonic() + seconds
        while number not in self._answers:
            answer = self._heard_within(max(0.0, end_s - time.monotonic()))
            if answer is None:
                return None
            self._sort(answer)
        return self._answers.pop(number)

    def read(self, refs: Sequence[say.Ref]) -> Vec:
        return self._slots.read(refs)

    def has_read(self, answer: Answer) -> None:
        """Nothing of it is read any more."""
        self._unread.discard(answer.number)
        self._answered = min(self._unread, default=self._last + 1) - 1

    def release(self) -> None:
        """What was read is free for others at once."""
        self.send(say.Release(self.key, self._answered, self._slots.due()))

    def close(self) -> None:
        self.hang_up()


class InStep:
    """The exchanges in step of a run whose hosts have host processes. All members of one come to it alike.

    ``gpus_of``: the GPUs on which slots lie for vectors like these, if they do. ``carriers`` learns how vectors go.
    """

    def __init__(
        self,
        line: Line,
        board: Board,
        waiter: Waiter,
        gpus_of: Callable[[Sequence[Tensor]], Sequence[str]] = lambda tensors: (),
        carriers: set[str] | None = None,
    ) -> None:
        self._line, self._board, self._waiter, self._gpus_of = line, board, waiter, gpus_of
        self._clients: dict[str, ExchangeClient] = {}
        self.page = 0  # of the run's exchanges
        self._once = 0  # how many there were beside, each of which is one by itself
        self._carriers = set[str]() if carriers is None else carriers

    @property
    def place(self) -> tuple[int, int]:
        """Where in the run's exchanges this worker is."""
        return self.page, self._once

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self.page, self._once = place

    def among(self, ranks: tuple[int, ...], tensors: Sequence[Tensor], codec: Codec | None = None) -> ExchangeClient:
        """Those of ``ranks``, with vectors like these, in dtypes that can be summed."""
        return self._among(ranks, tensors, [(wide(t.dtype), t.numel()) for t in tensors], codec)

    def messages(self, ranks: tuple[int, ...], nbytes: int) -> ExchangeClient:
        """Those of ``ranks``, with messages of so many bytes."""
        return self._among(ranks, [torch.empty(1, dtype=torch.uint8).expand(nbytes)], [(torch.uint8, nbytes)])

    def _among(
        self, ranks: tuple[int, ...], tensors: Sequence[Tensor], kinds: Kinds, codec: Codec | None = None
    ) -> ExchangeClient:
        name = f"{'-'.join(map(str, ranks))}/{','.join(f'{dtype}x{n}' for dtype, n in kinds)}/{tensors[0].device.type}"
        name = name if codec is None else f"{name}/{json.dumps(told(codec))}"
        if name not in self._clients:
            self._clients[name] = self._client(name, ranks, tensors, kinds, codec)
        return self._clients[name]

    def _client(
        self, name: str, ranks: tuple[int, ...], tensors: Sequence[Tensor], kinds: Kinds, codec: Codec | None = None
    ) -> ExchangeClient:
        gpus = self._gpus_of(tensors)
        self._carriers.update(self._board.carriers(gpus))
        key = f"{self._board.name}/exchanges/{name}"
        like = Vec(tensors)
        patience_s = self._waiter.patience_s
        return ExchangeClient(
            key, self._line, ranks, like, kinds, gpus, self._board, patience_s, codec, lambda: self.page
        )

    def once(self, tensor: Tensor) -> ExchangeClient:
        """One exchange of all, on the host, whose memory is given back when it is closed."""
        self._once += 1
        everyone = tuple(range(self._board.size))
        key = f"{self._board.name}/once/{self._once}"
        kinds = [(tensor.dtype, tensor.numel())]
        patience_s = self._waiter.patience_s
        return ExchangeClient(key, self._line, everyone, Vec([tensor]), kinds, "", self._board, patience_s)

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """The first member's numbers for all, as bytes."""
        staged = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        client, everyone = self.once(staged), range(self._board.size)
        mine, sends = (Vec([staged]), everyone) if self._board.rank == 0 else (None, ())
        begun = client.lay(mine, reads=[0], sends=sends)
        self._waiter.wait([begun], what)
        begun.take(lambda vecs, _: [vec.put_into(Vec([staged])) for vec in vecs])
        client.close()
        if begun.absent:
            raise PeerFailed("rank 0 died before all had its weights; start the job again")
        tensor.copy_(staged.view(tensor.dtype).view(tensor.shape))

    def agree_on(self, tensor: Tensor, op: Any, what: str) -> Tensor:
        """A blocking reduction among all; gives a new tensor, on the host. A mean is one of those who are alive."""
        staged = tensor.detach().to("cpu", copy=True)
        if not staged.numel():
            return staged
        if op == dist.ReduceOp.AVG:
            total, there = self._reduced(staged, dist.ReduceOp.SUM, what)
            return total.div_(there)
        return self._reduced(staged, op, what)[0]

    def _reduced(self, staged: Tensor, op: Any, what: str) -> tuple[Tensor, int]:
        """And of how many."""
        client, everyone = self.once(staged), range(self._board.size)
        sums = op == dist.ReduceOp.SUM and staged.is_floating_point()
        begun = client.lay(
            Vec([staged.reshape(-1)]),
            sums=[(rank, 1.0) for rank in everyone if sums],
            reads=[] if sums else everyone,
            sends=[] if sums else everyone,
        )
        self._waiter.wait([begun], what)
        found: list[Tensor] = []
        begun.take(lambda vecs, _: found.extend(vec.parts[0].clone() for vec in vecs))
        client.close()
        return _reduced(found, op).reshape(staged.shape), self._board.size - len(begun.absent)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients = {}


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
