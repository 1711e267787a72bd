"""AD-PSGD, asynchronous decentralised SGD, after Lian et al. (2018). Not ADPSGD, which is ``adaptive``."""

from __future__ import annotations

from collections.abc import Iterable

from offbeat.method import (
    Add,
    Axes,
    Begin,
    Body,
    Edge,
    Finish,
    Grad,
    Meet,
    Paper,
    Replica,
    Retire,
    Share,
    draw,
    method,
    topology,
)
from offbeat.strategies.averaging import named
from offbeat.strategies.desloc import MomentsBeside, both_every

PAPER = Paper(
    name="ad_psgd",
    full_name="AD-PSGD (asynchronous decentralised SGD)",
    title="Asynchronous Decentralized Parallel Stochastic Gradient Descent",
    authors="Lian, Xiangru and Zhang, Wei and Zhang, Ce and Liu, Ji",
    year=2018,
    venue="International Conference on Machine Learning",
    arxiv="1710.06952",
    axes=Axes(
        what="weights", when="every step", whom="a drawn neighbour", wait="nobody", late="while computing", merge="half"
    ),
    laws=("the sum of all weights changes only by steps taken", "no order of arrivals can lock", "P = 1: serial SGD"),
)


@method(PAPER)
def ad_psgd(graph: str | Iterable[Edge] = "exponential", moments: int | None = None) -> Body:
    """Average with one neighbour at a time while computing; add one's own step to the result.

    While a worker computes a gradient at x̂, its weights are averaged with those of a neighbour that it draws, and with
    those of each worker that draws it. Then its own step is added to the result: x ← x − γ g(x̂). The neighbour does
    not stop for that. So a slow worker delays nobody, and no order of arrivals can lock.

    ``graph``: whose neighbours are drawn from, anew in each step: a name, or a list of edges between ranks.
    ``moments=10``: after every tenth step the inner optimiser's moments, such as Adam's, are averaged in a round of all
    workers. The last values of the absent answer for them.

    *When it helps*: workers of lasting unequal speed; a network where only neighbours can talk cheaply.
    *When it hurts*: many workers on a thin graph: agreement spreads slowly. A gradient is stale by the averages that
    came in while it was computed. Between hosts a step waits until the worker's own visit is back, so a slow link
    delays the workers whose visits cross it. At equal samples, with nobody slow, a Transformer with AdamW ended 2 %
    above DDP's loss with 4 workers.
    *Suggested settings*: the exponential graph (the default), whose neighbours are near everyone.
    *Departures*: each side adds half of the difference of the two snapshots, so that the sum is preserved exactly.
    Every worker is active and passive, since nobody stops for a meeting; the paper splits workers to avoid deadlock.
    Not to be confused with ``adaptive`` (ADPSGD).

    Example: ``ob.ad_psgd()``
    """
    graph, K = named(graph), both_every(moments)

    async def body(me: Replica) -> None:
        whom = topology.graph(graph, me.size)
        await Share(me.x, neighbours(whom, me.rank))
        memory, moments_too = me.x.clone(), MomentsBeside(me, K)
        await moments_too.open()
        async for t in me.own_steps():
            near = whom(t).senders(me.rank)
            peer = near[draw.below(len(near), me.seed, t, me.rank)] if near else me.rank
            meeting = await Begin(Meet(peer))
            x_hat = memory.copy_(me.x)
            me.step(await Grad())
            await Finish(meeting)
            me.x.copy_(await Add(x_hat.way_to(me.x)))
            await moments_too.averaged(t)
        me.x.copy_(await Retire())
        await moments_too.rest()

    return body


def neighbours(whom: topology.Schedule, rank: int) -> tuple[int, ...]:
    """Everyone that ``rank`` ever meets, whoever of the two asks."""
    met = {j for t in range(whom.period or 1) for j in (*whom(t).senders(rank), *whom(t).receivers(rank))}
    return tuple(sorted(met))
