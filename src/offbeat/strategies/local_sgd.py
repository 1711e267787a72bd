"""Local SGD with a constant period (CPSGD), after Stich (2019)."""

from __future__ import annotations

from offbeat.method import Axes, Body, Codec, Facts, Grad, Paper, Replica, method, topology, whole
from offbeat.strategies.averaging import Averager

PAPER = Paper(
    name="local_sgd",
    full_name="Local SGD (constant period)",
    title="Local SGD Converges Fast and Communicates Little",
    authors="Stich, Sebastian U.",
    year=2019,
    venue="International Conference on Learning Representations",
    arxiv="1805.09767",
    axes=Axes(what="weights", when="every H steps", whom="everyone"),
    laws=("period=1 with plain SGD equals allreduce", "the mean of the weights is preserved by averaging"),
    confidence="period 8 is the constant-period baseline of the ADPSGD paper (from memory, medium)",
)


@method(PAPER, Facts(meets="everyone", waits_where_it_begins=True))
def local_sgd(period: int = 8, codec: Codec | None = None) -> Body:
    """Take H steps alone, then average the weights of all.

    w_i ← w_i − γ g_i, and after every H-th step w_i ← (1/P) Σ_j w_j. Momentum stays local.

    ``period``: H. With a ``codec`` the displacement since the last average travels, not the weights: a rounding error
    of the size of the weights would swallow what was learned. What it loses is sent with the next average.

    *When it helps*: a thin network, or steps whose unevenness averages out over H of them before anyone waits.
    *When it hurts*: a large H lets the replicas drift, and accuracy falls; a chronically slow worker is still waited
    for.
    *Suggested settings*: period 4 to 16; a shorter one early in training (or ``adaptive``, which finds it).

    Example: ``ob.local_sgd(period=8, codec=ob.codec.qsgd(bits=8))``
    """
    whole("period", period, 1)

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        average = Averager(me, codec)
        async for t in me.steps():
            me.step(await Grad())
            if (t + 1) % period == 0:
                me.model.copy_(await average(everyone(t)))

    return body
