"""One rank's messages to those beside it: some whole numbers, and sometimes a vector behind them.

On one host they lie in memory that these ranks share, as one more exchange in step (`offbeat.live.carriers.commons`):
the first lays its message down, and the others lay nothing. Its region is not written to again before all of them have
copied what they were told. Elsewhere, or where memory cannot be shared, Gloo takes it there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.live.carriers.commons import Commons
from offbeat.live.carriers.exchanges import Transport
from offbeat.live.carriers.group import Group
from offbeat.live.carriers.staging import Staging
from offbeat.live.worker.exchange_client import ExchangeClient
from offbeat.live.worker.waiter import Waiter
from offbeat.tensors.vector import Vec, wide

Kinds = list[tuple[torch.dtype, int]]
TELLS = "the others beside this rank to hear of a round"


class PassedInMemory:
    """Through memory of ``commons``, where vectors are as they are ``staged``, or lie on the device that it is on."""

    def __init__(self, commons: Commons, first: int, numbers: int, kinds: Kinds, staging: Staging | None) -> None:
        self._commons, self._first, self._staging = commons, commons.ranks.index(first), staging
        # What a message may hold, so that its place does not depend on what it does. Wide enough, and exact.
        self._kinds = [(torch.float64, 1 + numbers), *kinds]

    def tell(self, head: Sequence[int], value: Vec | None, waiter: Waiter) -> None:
        """To all of them; returns when it is laid down."""
        parts = () if value is None else (value if self._staging is None else self._staging.down(value)).parts
        numbers = torch.tensor([len(parts), *head], dtype=torch.float64)
        laid = self._commons.lay([numbers, *parts], kinds=self._kinds)
        waiter.wait([laid.needs((), lambda: None)], TELLS)

    def hear(self, waiter: Waiter, what: str) -> tuple[list[int], Vec | None]:
        """The next message; its vector is a copy."""
        laid = self._commons.lay((), (), kinds=self._kinds)
        views, first, heard, parts = laid.views, self._first, list[int](), list[Tensor]()

        def read() -> None:
            numbers, *there = views.of(first)
            found, *head = map(int, numbers.tolist())
            heard.extend(head)
            parts.extend(view.clone() for view in there[:found])

        waiter.wait([laid.needs([first], read)], what)
        value = Vec(parts) if parts else None
        return heard, value if value is None or self._staging is None else self._staging.up(value)


class PassedHere:
    """Through the host process of these ranks."""

    def __init__(self, client: ExchangeClient) -> None:
        self._client = client

    def tell(self, head: Sequence[int], value: Vec | None, waiter: Waiter) -> None:
        """To all of them; returns when it is laid down."""
        self._client.lay(value, sends=range(len(self._client.members)), note=list(head))

    def hear(self, waiter: Waiter, what: str) -> tuple[list[int], Vec | None]:
        """The next message; its vector is a copy."""
        begun, heard, found = self._client.lay(None, reads=[0]), list[int](), list[Vec]()

        def read(vecs: list[Vec], notes: list[list[int]]) -> None:
            heard.extend(notes[0])
            found.extend(vec.clone() for vec in vecs)

        waiter.wait([begun], what)
        begun.take(read)
        return heard, found[0] if found else None


class PassedOverGloo:
    """As broadcasts in a group of these ranks."""

    def __init__(self, group: Group, first: int, numbers: int, kinds: Kinds, staging: Staging) -> None:
        self._group, self._first, self._numbers, self._kinds, self._staging = group, first, 1 + numbers, kinds, staging

    def tell(self, head: Sequence[int], value: Vec | None, waiter: Waiter) -> None:
        """To all of them; returns when it is sent."""
        parts = () if value is None else self._staging.down(value).parts
        messages = [torch.tensor([len(parts), *head]), *parts]
        waiter.wait([self._group.broadcast(message, self._first) for message in messages], TELLS)

    def hear(self, waiter: Waiter, what: str) -> tuple[list[int], Vec | None]:
        """The next message."""
        numbers = torch.zeros(self._numbers, dtype=torch.int64)
        waiter.wait([self._group.broadcast(numbers, self._first)], what)
        found, *head = numbers.tolist()
        parts = [torch.empty(n, dtype=dtype) for dtype, n in self._kinds[:found]]
        waiter.wait([self._group.broadcast(part, self._first) for part in parts], what)
        return head, self._staging.up(Vec(parts)) if parts else None


def passing(
    ranks: tuple[int, ...], numbers: int, like: Vec, transport: Transport
) -> PassedHere | PassedInMemory | PassedOverGloo:
    """The way from the first of ``ranks`` to the others, who all ask for it now: ``numbers``, and vectors like this."""
    if transport.in_step is not None:
        return PassedHere(transport.in_step.beside(ranks, like.parts))
    kinds = [(wide(p.dtype), p.numel()) for p in like.parts]
    commons = transport.commons(ranks, like.parts)
    if commons is not None:
        staged = Staging(like) if commons.carrier == "shm" else None
        return PassedInMemory(commons, ranks[0], numbers, kinds, staged)
    if any(p.is_cuda for p in like.parts):  # on several GPUs: then through the host's memory
        commons = transport.commons(ranks, [torch.empty(0)])
        if commons is not None:
            return PassedInMemory(commons, ranks[0], numbers, kinds, Staging(like))
    return PassedOverGloo(transport.group(ranks), ranks[0], numbers, kinds, Staging(like))
