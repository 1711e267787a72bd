"""SGP, stochastic gradient push, after Assran et al. (2019)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from offbeat.method import Axes, Body, Codec, Edge, Grad, Mixing, Paper, Replica, method, pack, scalar, topology
from offbeat.strategies.averaging import Gossip, named
from offbeat.strategies.common import sends_all
from offbeat.strategies.desloc import MomentsToo, every

PAPER = Paper(
    name="sgp",
    full_name="SGP (stochastic gradient push)",
    title="Stochastic Gradient Push for Distributed Deep Learning",
    authors="Assran, Mahmoud and Loizou, Nicolas and Ballas, Nicolas and Rabbat, Michael",
    year=2019,
    venue="International Conference on Machine Learning",
    arxiv="1811.10792",
    axes=Axes(
        what="numerator and weight", when="every step", whom="one peer, exponential distances", wait="those who send"
    ),
    laws=(
        "Σx and Σω are conserved by mixing, whatever the codec loses",
        "everyone with everyone equals allreduce",
    ),
    confidence="order of the peers and equal shares (read in the authors' code)",
)


@method(PAPER)
def sgp(
    graph: str | Iterable[Edge] = "one_peer_exponential",
    codec: Codec | str | None = None,
    moments: int | str | None = None,
) -> Body:
    """Push a share of the weights to one peer a step along a directed graph, and correct for the imbalance.

    This is gossip in one direction. In each step every worker pushes a share of itself to a peer, keeps the rest, and
    waits for no answer. Beside the weights x_i each worker carries a number ω_i that is pushed the same way. If a
    worker receives more than it gave away, both grow alike, and z_i = x_i / ω_i is right again: gradients are taken at
    z. The default graph is SGP's directed exponential one, a single peer a step: +1, −1, +2, −2, +4, … in turn. So news
    reach P workers in about 2·log₂ P steps, while each sends one message a step.

    ``graph``: a name, or a list of edges between ranks.
    ``moments``: as in ``local_sgd``, but pushed along the graph.

    *When it helps*: many workers, a network where one message a step is affordable and an all-reduce is not.
    *When it hurts*: a slow worker holds up those it sends to; the replicas differ a little at all times.
    *Suggested settings*: the default graph. On every graph a worker splits itself evenly among itself and its
    receivers.
    *Departures*: none. The overlapped variant (OSGP) is not part of it. A codec carries the weights in difference form,
    which conserves Σx and Σω exactly. Its rounding bounds how closely the replicas can agree.

    Example: ``ob.sgp()``
    """
    graph = named(graph)
    codec = sends_all(codec)
    K = every(moments)

    async def body(me: Replica) -> None:
        A, gossip, moments_too = topology.graph(graph, me.size), Gossip(me.sends(codec)), MomentsToo(me, K)
        mem = me.recall(omega=scalar(1.0, me.x))
        x, omega = me.x, mem.omega
        numerator_and_weight = pack(x, omega)
        async for k in me.steps():
            g = await Grad()  # at z = x/ω, which is what the model holds between steps
            x.mul_(omega)
            me.step(g)
            gossip.apply(numerator_and_weight, await gossip.ask(numerator_and_weight, pushed(A(k))))
            x.copy_(x / omega)
            await moments_too.averaged(pushed(A(k)))

    return body


@lru_cache(maxsize=256)
def pushed(W: Mixing) -> Mixing:
    """The same links, weighted by the sender: it keeps, and sends to each receiver, 1/(receivers + 1)."""
    share = [1.0 / (len(W.receivers(rank)) + 1) for rank in range(W.size)]
    rows = [{j: share[j] for j in (rank, *W.senders(rank))} for rank in range(W.size)]
    made = Mixing.from_rows(W.size, rows, W.name)
    return W if made == W else made
