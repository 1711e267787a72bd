"""**Local SGD** with a constant period (CPSGD): H steps alone, then the mean of all weights.

w_i ← w_i − γ g_i, and after every H-th step w_i ← (1/P) Σ_j w_j. Momentum stays local.

*When it helps*: a thin network; uneven steps, since H of them average out before anyone waits.
*When it hurts*: a large H lets the replicas drift, and accuracy falls; a chronically slow worker is still waited for.
*Suggested settings*: period 4 to 16; a shorter one early in training (or ``adaptive``, which finds it).
With a codec the displacement since the last average travels, not the weights: a rounding error of the size of the
weights would swallow what was learned.
"""

from __future__ import annotations

from offbeat import topology
from offbeat.method.effects import Grad
from offbeat.method.paper import Axes, Paper
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy, whole
from offbeat.strategies.averaging import Averager
from offbeat.tensors.codec import Codec

PAPER = Paper(
    name="local_sgd",
    full_name="Local SGD (constant period)",
    summary="take H steps alone, then average the weights of all",
    title="Local SGD Converges Fast and Communicates Little",
    authors="Stich, Sebastian U.",
    year=2019,
    venue="International Conference on Learning Representations",
    arxiv="1805.09767",
    axes=Axes(what="weights", when="every H steps", whom="everyone"),
    helps="a thin network, or steps whose unevenness averages out over H of them",
    hurts="replicas drift apart when H is large; a chronic straggler is still waited for",
    laws=("period=1 with plain SGD equals allreduce", "the mean of the weights is preserved by averaging"),
    confidence="period 8 is the constant-period baseline of the ADPSGD paper (from memory, medium)",
)


def local_sgd(period: int = 8, codec: Codec | None = None) -> Strategy:
    """Average the weights of all workers every ``period`` steps.

    Example: ``ob.local_sgd(period=8, codec=ob.codec.qsgd(bits=8))``
    """
    whole("local_sgd", "period", period, 1)

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        average = Averager(me, codec)
        async for t in me.steps():
            me.step(await Grad())
            if (t + 1) % period == 0:
                me.model.copy_(await average(everyone(t)))

    return Strategy(PAPER, local_sgd, {"period": period, "codec": codec}, body)
