"""Averages of what the optimisers remember, less often than those of the weights (DES-LOC), after Iacob et al. (2025).

DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models, arXiv:2505.22549. Every K_u-th
average of the weights also averages the first moments (momentum), every K_v-th the second ones.
"""

from __future__ import annotations

from offbeat.method import Mix, Mixing, Replica, Vec, pack, scalar, unpack, whole


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
        own = [self._me.moments(order) for order in orders]
        values = [moments.value for moments in own]
        counts = [scalar(float(moments.are_there), self._me.x) for moments in own]
        means = unpack(await Mix(pack(*values, *counts), W), *values, *counts)
        for moments, mean, share in zip(own, means[: len(own)], means[len(own) :], strict=True):
            if share.item():
                moments.adopt(_over(mean, share.item()))


def _over(mean: Vec, share: float) -> Vec:
    return mean if share == 1.0 else mean / share
