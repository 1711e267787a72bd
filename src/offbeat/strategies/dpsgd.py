"""D-PSGD, decentralized parallel SGD, after Lian et al. (2017)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from offbeat.method import Axes, Begin, Body, Codec, Edge, Finish, Grad, Paper, Replica, method, one_of, topology
from offbeat.strategies.averaging import Gossip, named
from offbeat.strategies.common import sends_all
from offbeat.strategies.desloc import MomentsToo, every

PAPER = Paper(
    name="dpsgd",
    full_name="D-PSGD (decentralized parallel SGD)",
    title=(
        "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized Parallel "
        "Stochastic Gradient Descent"
    ),
    authors="Lian, Xiangru and Zhang, Ce and Zhang, Huan and Hsieh, Cho-Jui and Zhang, Wei and Liu, Ji",
    year=2017,
    venue="Advances in Neural Information Processing Systems",
    arxiv="1705.09056",
    axes=Axes(what="weights", when="every step", whom="neighbours on a graph", wait="neighbours"),
    laws=(
        "the mean of the weights moves by the mean of the updates alone, whatever the codec loses",
        "the complete graph with order='atc' equals allreduce",
    ),
)


@method(PAPER)
def dpsgd(
    graph: str | Iterable[Edge] = "ring",
    order: Literal["cta", "atc"] = "cta",
    codec: Codec | str | None = None,
    moments: int | str | None = None,
) -> Body:
    """Average the weights with the neighbours on a graph, every step, hidden behind the gradient.

    x_{k+1,i} = Σ_j W_ij x_{k,j} − γ g_i(x_{k,i}): the neighbours' weights travel while the gradient is computed, so the
    exchange is hidden behind it. Nobody ever talks to all.

    ``graph``: a name, or a list of edges between ranks.
    ``order="cta"``: combine then adapt, as above and in the paper. ``order="atc"``: adapt then combine. The gradient
    step comes first and the mix follows, x_{k+1} = W (x_k − γ g). That contracts better but is not hidden.
    ``moments``: as in ``local_sgd``, but mixed along the graph.

    *When it helps*: many workers and a network with a high latency or no good all-reduce; each sends to few others.
    *When it hurts*: on a large ring news travel slowly, and the replicas drift apart. A slow worker still delays its
    neighbours, and after some steps theirs.
    *Suggested settings*: ``"ring"`` up to about 16 workers, ``"exponential"`` or ``"torus"`` beyond.
    *Departures*: none. Neighbours have Metropolis weights (a third each on a ring). A codec carries the weights in
    difference form, which keeps the mean exact. Its rounding bounds how closely the replicas can agree.

    Example: ``ob.dpsgd("torus")``
    """
    graph = named(graph)
    codec = sends_all(codec)
    one_of("order", order, ("cta", "atc"))
    K = every(moments)

    async def body(me: Replica) -> None:
        x, W, gossip, moments_too = me.x, topology.graph(graph, me.size), Gossip(me.sends(codec)), MomentsToo(me, K)
        async for k in me.steps():
            if order == "cta":
                ticket = await Begin(gossip.ask(x, W(k)))
                g = await Grad()
                gossip.apply(x, await Finish(ticket))
                me.step(g)
            else:
                me.step(await Grad())
                gossip.apply(x, await gossip.ask(x, W(k)))
            await moments_too.averaged(W(k))

    return body
