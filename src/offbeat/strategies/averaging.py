"""What several methods share: the mean of all weights, gossip along a graph, a mix under way; with codecs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from offbeat.method import (
    Begin,
    Codec,
    Edge,
    Finish,
    Mix,
    Mixing,
    Replica,
    Ticket,
    Vec,
    nothing_lost,
    pack,
    scalar,
    topology,
    unpack,
)


class Averager:
    """The mean of the workers' models.

    Where nothing is coded the weights travel. With a codec, each worker's displacement from the last common point
    travels (``memory.anchor``, the same on all): its rounding error shrinks with what was learned since. What coding
    loses (``memory.lost``) is sent with the next displacement. A run that is resumed on other hosts goes on as it
    began: in the middle of a period there is no common point to start from.
    """

    def __init__(self, me: Replica, codec: Codec | None) -> None:
        self._me, self._codec = me, me.sends(codec)
        if self._codec is not None:
            me.recall(anchor=me.model.clone(), lost=nothing_lost(me.model))
        elif codec is not None:
            me.recall(anchor=None, lost=None)
        self._moved = me.model.clone() if self._is_displaced else None  # fresh pages are slow

    @property
    def _is_displaced(self) -> bool:
        return getattr(self._me.memory, "anchor", None) is not None

    async def __call__(self, W: Mixing, weight: float | None = None) -> Vec:
        """The mean; ``weight`` is how often I count in it, 1 on average."""
        if self._moved is None:
            if weight is None:
                return await Mix(self._me.model, W)
            # The weights travel, too: somebody may have died since they were 1 on average.
            share = scalar(weight, self._me.x)
            total, weights = unpack(await Mix(pack(self._me.model * weight, share), W), self._me.model, share)
            return total / weights
        mem = self._me.memory
        anchor: Vec = mem.anchor
        moved = self._moved.copy_(self._me.model).add_(anchor, alpha=-1.0)
        if weight is not None:
            moved.mul_(weight)
        anchor.add_(await Mix(moved, W, self._codec, mem.lost))
        return anchor


class Underway:
    """A mix that is finished some steps after it was begun, and that a checkpoint in between does not lose.

    A resumed run starts the method's body anew, and a ticket cannot be saved. So what was sent stays in
    ``memory.sent`` until it is finished, and a body that finds something there when it starts sends it again. All
    workers were saved at the same step, so all of them do, and the answer is the one that was on its way.

    With a codec, what coding loses is sent next time (``memory.lost``): for each ``slot`` a vector of its own, where
    several vectors take turns. It changes when the mix is finished, so that it can be begun again.
    """

    def __init__(self, me: Replica, W: Mixing, codec: Codec | None) -> None:
        self._mem, self._W, self._codec = me.recall(sent=None), W, me.sends(codec)
        if self._codec is not None:
            me.recall(slot=0, lost=[])
        self._ticket: Ticket[Vec] | None = None

    @property
    def sent(self) -> Vec | None:
        """My own share of what is under way; ``None`` when nothing is."""
        sent: Vec | None = self._mem.sent
        return sent

    async def resume(self) -> None:
        """Send again what a checkpoint caught on its way. Every body that uses this begins with it."""
        if self._mem.sent is not None:
            await self.begin(self._mem.sent, getattr(self._mem, "slot", 0))

    async def begin(self, x: Vec, slot: int = 0) -> None:
        """Send ``x``, which must be nobody else's memory: it is kept until ``finish``."""
        mem = self._mem
        mem.sent, lost = x, None
        if self._codec is not None:
            mem.slot, mem.lost = slot, [*mem.lost, *[None] * (slot + 1 - len(mem.lost))]
            lost = mem.lost[slot] = nothing_lost(x) if mem.lost[slot] is None else mem.lost[slot]
        self._ticket = await Begin(Mix(x, self._W, self._codec, lost))

    async def finish(self) -> Vec:
        """The result; waits only if it is not there yet."""
        assert self._ticket is not None, "nothing is under way"
        mixed: Vec = await Finish(self._ticket)
        self._mem.sent = self._ticket = None
        return mixed


class Gossip:
    """Mixing along a graph: x_i ← Σ_j W_ij x_j.

    With a codec Q the difference form travels, x_i ← x_i + Σ_j (W − I)_ij Q(x_j), in which one's own share is coded as
    everybody else receives it: whatever Q loses, the columns of W − I sum to 0, and so the sum of all x stays the same.
    """

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec

    def ask(self, x: Vec, W: Mixing) -> Mix:
        """The request to make."""
        return Mix(x, W) if self._codec is None else Mix(x, difference(W), self._codec)

    def apply(self, x: Vec, answer: Vec) -> None:
        """What to do with its answer."""
        if self._codec is None:
            x.copy_(answer)
        else:
            x.add_(answer)


@lru_cache(maxsize=256)
def difference(W: Mixing) -> Mixing:
    """W − I: what mixing changes."""
    rows = [{**W.row(rank), rank: W.row(rank)[rank] - 1.0} for rank in range(W.size)]
    return Mixing.from_rows(W.size, rows, f"{W.name} − I")


def named(graph: str | Iterable[Edge]) -> str | tuple[Edge, ...]:
    """A graph by its name or its edges; a name that does not exist is refused at once."""
    if isinstance(graph, str):
        topology.graph(graph, 1)
        return graph
    return tuple((int(i), int(j)) for i, j in graph)
