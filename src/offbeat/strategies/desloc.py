"""Averages of what the optimisers remember, less often than those of the weights (DES-LOC), after Iacob et al. (2025).

DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models, arXiv:2505.22549. Every K_u-th
average of the weights also averages the first moments (momentum), every K_v-th the second ones.
"""

from __future__ import annotations

from functools import partial

from offbeat.method import (
    Channel,
    Got,
    Mix,
    Mixing,
    Nodes,
    Open,
    Replica,
    Rules,
    Vec,
    pack,
    scalar,
    topology,
    unpack,
    waiting,
    whole,
)

BOTH = [1, 2]  # orders


def every(moments: int | str | None) -> dict[int, int]:
    """How many averages of the weights there are to one of the moments of each order; empty: each keeps its own.

    A number n means both orders every n-th time, together. (The paper's proportion is "3/6". Where first moments are
    averaged without the second, a worker takes over m ≠ 0 for numbers of which its own v is still 0, and Adam's
    m / (√v + ε) throws them far away: rare features, units that are dead on some workers.)
    """
    if moments is None:
        return {}
    if not isinstance(moments, str):
        n = whole("moments", moments, 1)
        return {1: n, 2: n}
    first, slash, second = moments.partition("/")
    if not slash or not first.strip().isdecimal() or not second.strip().isdecimal():
        raise ValueError(f"moments is {moments!r}; use a number, such as 3, or one for each order, such as '3/6'")
    return {1: whole("moments, of the first order,", int(first), 1), 2: whole("and of the second", int(second), 1)}


def both_every(moments: int | str | None) -> int | None:
    """The same where averages are partial rounds: there moments of both orders travel together."""
    K = every(moments)
    if len(set(K.values())) > 1:
        raise ValueError(
            f"moments is {moments!r}, but here those of both orders travel together; use one number, such as {K[2]}"
        )
    return K.get(1)


class MomentsToo:
    """Counts the averages of the weights, and averages moments where it is their turn."""

    def __init__(self, me: Replica, every: dict[int, int]) -> None:
        self._me, self._every = me, every
        if every:
            me.recall(averages=0)

    async def averaged(self, W: Mixing) -> None:
        """An average of the weights is over."""
        if not self._every:
            return
        mem = self._me.memory
        mem.averages += 1
        due = [order for order, n in self._every.items() if mem.averages % n == 0]
        if due:
            await self._average(due, W)

    async def _average(self, orders: list[int], W: Mixing) -> None:
        """In one message. A worker that has taken no step has no moments, and does not count."""
        own = _Message(self._me, orders)
        own.adopt(await Mix(own.sent, W))


class MomentsBeside:
    """The same for methods in whose averages not all take part: moments have rounds of their own, beside the weights'.

    After every n-th average of its own a worker hands in its moments and takes the mean of what all have handed in
    last. Whoever comes first starts the round, and what the absent handed in before answers for them, so nobody is
    waited for. As in WAGMA-SGD, who was in time takes the mean m of S workers, and who was late (S·m + own) / (S + 1).
    Whatever comes of it is a mean of moments: squares stay positive, as they would not if one's own later changes were
    added to a mean of older ones, as is right for weights.
    """

    def __init__(self, me: Replica, n: int | None, per_node: int = 1) -> None:
        self._me, self._n, workers = me, n, Nodes(me.size, per_node).count
        self._rounds: Channel | None = None
        if n is not None and workers > 1:
            me.recall(averages=0)
            everyone, how, like = (
                topology.everyone(workers),
                Rules(waiting.rule("first"), "last"),
                _Message(me, BOTH).sent,
            )
            self._adopt = partial(_adopt, me)  # which does not know of this: nothing holds itself when the run is over
            self._rounds = Channel("moments", everyone, how, self._adopt, per_node=per_node, like=like, beside=True)

    async def open(self) -> None:
        """Before the first step, on all workers."""
        if self._rounds is not None:
            await Open(self._rounds, self._rounds.like)

    async def averaged(self, t: int) -> None:
        """After step ``t`` this worker has averaged its weights."""
        if self._rounds is None or self._n is None:
            return
        mem = self._me.memory
        mem.averages += 1
        if mem.averages % self._n == 0:
            self._adopt(await self._rounds.mix(_Message(self._me, BOTH).sent, t))

    async def rest(self) -> None:
        """No step left to take: what was handed in last answers until all have finished."""
        if self._rounds is not None:
            async for got in self._rounds.rest(lambda: None):
                self._adopt([got])


def _adopt(me: Replica, results: list[Got]) -> None:
    for got in results[-1:]:
        _Message(me, BOTH).adopt(got.value, mine=0.0 if got.fresh else 1.0 / (got.count + 1))


class _Message:
    """This worker's moments of these orders, and of each whether it has any: one that has taken no step has none."""

    def __init__(self, me: Replica, orders: list[int]) -> None:
        self._own = [me.moments(order) for order in orders]
        values = [moments.value for moments in self._own]
        self._parts = [*values, *(scalar(float(moments.are_there), me.x) for moments in self._own)]
        self.sent = pack(*self._parts)

    def adopt(self, mean: Vec, mine: float = 0.0) -> None:
        """Go on with a mean of such messages, and with ``mine`` of what was there; who had none does not count."""
        means, n = unpack(mean, *self._parts), len(self._own)
        for moments, value, share in zip(self._own, means[:n], means[n:], strict=True):
            there = share.item()
            if there:
                value = value if there == 1.0 else value / there
                moments.adopt(value if not mine else value * (1.0 - mine) + moments.value * mine)
