"""**D-PSGD: decentralized parallel SGD.** Every worker averages with its neighbours on a graph, every step; nobody ever
talks to all.

x_{k+1,i} = Σ_j W_ij x_{k,j} − γ g_i(x_{k,i}): the neighbours' weights travel while the gradient is computed, so the
exchange is hidden behind it (``order="cta"``, combine then adapt: the paper's). With ``order="atc"`` (adapt then
combine) the gradient step comes first and the mix follows: x_{k+1} = W (x_k − γ g), which contracts better but is not
hidden.

*When it helps*: many workers and a network with a high latency or no good all-reduce; each sends to few others.
*When it hurts*: on a large ring, news travel slowly and the replicas drift apart; a slow worker still holds up its
neighbours, and after some steps theirs.
*Suggested settings*: ``"ring"`` up to about 16 workers, ``"exponential"`` or ``"torus"`` beyond.
*Departures*: none; neighbours have Metropolis weights (a third each on a ring). A codec carries the weights in
difference form, which keeps the mean exact; its rounding bounds how closely the replicas can agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from offbeat import topology
from offbeat.method.effects import Begin, Finish, Grad
from offbeat.method.paper import Axes, Paper
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy
from offbeat.strategies.averaging import Gossip, named
from offbeat.tensors.codec import Codec
from offbeat.topology import Edge

PAPER = Paper(
    name="dpsgd",
    full_name="D-PSGD (decentralized parallel SGD)",
    summary="average the weights with the neighbours on a graph, every step, hidden behind the gradient",
    title=(
        "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized Parallel "
        "Stochastic Gradient Descent"
    ),
    authors="Lian, Xiangru and Zhang, Ce and Zhang, Huan and Hsieh, Cho-Jui and Zhang, Wei and Liu, Ji",
    year=2017,
    venue="Advances in Neural Information Processing Systems",
    arxiv="1705.09056",
    axes=Axes(what="weights", when="every step", whom="neighbours on a graph", wait="neighbours"),
    helps="many workers, high latency: each sends to its few neighbours only",
    hurts="on a sparse graph the replicas drift; a slow worker holds up its neighbours",
    laws=(
        "the mean of the weights moves by the mean of the updates alone, whatever the codec loses",
        "the complete graph with order='atc' equals allreduce",
    ),
)


def dpsgd(
    graph: str | Iterable[Edge] = "ring", order: Literal["cta", "atc"] = "cta", codec: Codec | None = None
) -> Strategy:
    """Mix the weights with one's neighbours on ``graph`` (a name, or a list of edges between ranks), every step.

    Example: ``ob.dpsgd("torus")``
    """
    graph = named(graph)
    if order not in ("cta", "atc"):
        raise ValueError(f"dpsgd: there is no order {order!r}; use 'cta' (combine then adapt) or 'atc'")

    async def body(me: Replica) -> None:
        x, W, gossip = me.x, topology.graph(graph, me.size), Gossip(codec)
        async for k in me.steps():
            if order == "cta":
                ticket = await Begin(gossip.ask(x, W(k)))
                g = await Grad()
                gossip.apply(x, await Finish(ticket))
                me.step(g)
            else:
                me.step(await Grad())
                gossip.apply(x, await gossip.ask(x, W(k)))

    return Strategy(PAPER, dpsgd, {"graph": graph, "order": order, "codec": codec}, body)
