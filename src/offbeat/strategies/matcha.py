"""MATCHA, matching decomposition sampling, after Wang et al. (2019)."""

from __future__ import annotations

from collections.abc import Iterable

from offbeat.method import Axes, Body, Codec, Edge, Grad, Paper, Replica, between, matchings, method, topology
from offbeat.strategies.averaging import Gossip, named
from offbeat.strategies.common import sends_all
from offbeat.strategies.desloc import MomentsToo, every

PAPER = Paper(
    name="matcha",
    full_name="MATCHA (matching decomposition sampling)",
    title="MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling",
    authors="Wang, Jianyu and Sahu, Anit Kumar and Yang, Zhouyi and Joshi, Gauri and Kar, Soummya",
    year=2019,
    venue="arXiv preprint arXiv:1905.09435",
    arxiv="1905.09435",
    axes=Axes(what="weights", when="every step, at random", whom="random matchings of a graph", wait="neighbours"),
    laws=(
        "the mean of the weights is preserved by mixing, whatever the codec loses",
        "all workers draw the same matchings",
        "budget=1 mixes along the whole graph at every step",
    ),
    confidence="budget 0.5 (read in the authors' code)",
)


@method(PAPER)
def matcha(
    graph: str | Iterable[Edge] = "ring",
    budget: float = 0.5,
    codec: Codec | str | None = None,
    moments: int | str | None = None,
) -> Body:
    """Average the weights along random matchings of a graph, within a communication budget.

    The graph is cut into matchings, in which each worker talks to one other at most. Each step switches some of them
    on, the vital ones more often. Matching j is on with probability p_j (drawn alike on all workers), and x ← W_k (x −
    γ g) with W_k = I − α Σ_j B_j L_j. The p_j make the expected graph as well connected as the budget allows (largest
    λ₂ of Σ p_j L_j), and α makes the replicas draw together fastest (see ``offbeat.topology.matchings``).

    ``graph``: a name, or a list of edges between ranks.
    ``budget``: the share of the matchings that are on, on average.
    ``moments``: as in ``local_sgd``, but mixed along the matchings that are on.

    *When it helps*: a sparse, uneven graph and a thin network. With a budget of 0.5 half of the messages are sent.
    Bridges are kept, and dense regions are thinned out.
    *When it hurts*: steps without any active matching let the replicas drift. Planning takes seconds beyond some
    hundred workers.
    *Suggested settings*: budget 0.5; 1 sends all along the graph at every step.
    *Departures*: none. Matchings come from an edge colouring, as in the paper. A codec carries the weights in
    difference form, which keeps the mean exact. Its rounding bounds how closely the replicas can agree.

    Example: ``ob.matcha("torus", budget=0.3)``
    """
    graph = named(graph)
    codec = sends_all(codec)
    between("budget", budget, 0, 1)
    if budget == 0:
        raise ValueError("a budget of 0 never mixes; use a number over 0 and up to 1")
    K = every(moments)

    async def body(me: Replica) -> None:
        x, gossip, moments_too = me.x, Gossip(me.sends(codec)), MomentsToo(me, K)
        plan = matchings.plan(topology.edges(graph, me.size), me.size, budget)
        async for k in me.steps():
            me.step(await Grad())
            B = matchings.active(plan, me.seed, k)
            if any(B):
                W = matchings.mixing(plan, B)
                gossip.apply(x, await gossip.ask(x, W))
                await moments_too.averaged(W)

    return body
