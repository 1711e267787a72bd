"""Local SGD with a constant period (CPSGD), after Stich (2019)."""

from __future__ import annotations

from offbeat.method import Axes, Body, Codec, Facts, Grad, Paper, Replica, method, one_of, topology, whole
from offbeat.strategies.averaging import Averager
from offbeat.strategies.by_speed import PACES, Pace, by_speed

PAPER = Paper(
    name="local_sgd",
    full_name="Local SGD (constant period)",
    title="Local SGD Converges Fast and Communicates Little",
    authors="Stich, Sebastian U.",
    year=2019,
    venue="International Conference on Learning Representations",
    arxiv="1805.09767",
    axes=Axes(what="weights", when="every H steps", whom="everyone"),
    laws=(
        "period=1 with plain SGD equals allreduce",
        "the mean of the weights is preserved by averaging",
        "pace='speed', all equally fast: equals pace='equal' bit for bit, unless a codec draws",
    ),
    confidence="period 8 is the constant-period baseline of the ADPSGD paper (from memory, medium)",
)


@method(PAPER, Facts(meets="everyone", waits_where_it_begins=True))
def local_sgd(period: int = 8, codec: Codec | None = None, pace: Pace = "equal") -> Body:
    """Take H steps alone, then average the weights of all.

    w_i ← w_i − γ g_i, and after every H-th step w_i ← (1/P) Σ_j w_j. Momentum stays local.

    ``period``: H. With a ``codec`` the displacement since the last average travels, not the weights: a rounding error
    of the size of the weights would swallow what was learned. What it loses is sent with the next average.

    ``pace="speed"``: the fastest worker takes H steps between two averages, every other one as many as it manages in
    that time, ⌊v_k / max v · H⌋ and at least 1, with the speeds v of the last period; a worker counts in the average by
    its steps (DyLU, arXiv:2401.09135).

    *When it helps*: a thin network, or steps whose unevenness averages out over H of them before anyone waits.
    *When it hurts*: a large H lets the replicas drift, and accuracy falls; a chronically slow worker is still waited
    for, unless ``pace="speed"``. That wants data that is handed out as it is used: where every worker has the same
    number of batches, the fast ones are through early. Such a run cannot be stopped and resumed, or averaged, half-way.
    *Suggested settings*: period 4 to 16; a shorter one early in training (or ``adaptive``, which finds it). With
    ``pace="speed"`` at least as long as the slowest worker is slower than the fastest, better ten times that.
    *Departures*: ``pace`` is of another paper, in which averages are asynchronous; speeds are those of the last period,
    of computing alone.

    Example: ``ob.local_sgd(period=8, codec=ob.codec.qsgd(bits=8))``
    """
    whole("period", period, 1)
    one_of("pace", pace, PACES)

    async def paced(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        average = Averager(me, codec)

        async def averaged(weight: float) -> None:
            me.model.copy_(await average(everyone(0), weight))

        await by_speed(me, period, averaged)

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        average = Averager(me, codec)
        async for t in me.steps():
            me.step(await Grad())
            if (t + 1) % period == 0:
                me.model.copy_(await average(everyone(t)))

    return body if pace == "equal" else paced
