"""Local SGD with a constant period (CPSGD), after Stich (2019)."""

from __future__ import annotations

from typing import Literal

from offbeat.method import Axes, Body, Codec, Facts, Grad, Paper, Replica, method, topology
from offbeat.strategies.averaging import Averager
from offbeat.strategies.by_speed import Pace, by_speed, steps_and_pace
from offbeat.strategies.common import coded
from offbeat.strategies.desloc import MomentsToo, every

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
        "moments='1/1': optimisers remember the same on all workers after every average",
        "pace='speed', all equally fast: equals pace='equal' bit for bit, unless a codec draws",
    ),
    confidence="period 8 is the constant-period baseline of the ADPSGD paper (from memory, medium)",
)

PERIOD = 8


@method(PAPER, Facts(meets="everyone", waits_where_it_begins=True))
def local_sgd(
    period: int | Literal["speed"] = PERIOD,
    codec: Codec | str | None = None,
    pace: Pace | None = None,
    moments: int | str | None = None,
) -> Body:
    """Take H steps alone, then average the weights of all.

    w_i ← w_i − γ g_i, and after every H-th step w_i ← (1/P) Σ_j w_j.

    ``period``: H. ``codec``: of the displacement since the last average, which then travels instead of the weights: a
    rounding error of the size of the weights would swallow what was learned. What it loses is sent with the next
    average.
    ``pace="speed"``: the fastest worker takes H steps between two averages, every other one as many as it manages in
    that time, ⌊v_k / max v · H⌋ and at least 1, with the speeds v of the last period. A worker counts in the average by
    its steps (DyLU, arXiv:2401.09135). ``period="speed"``: the same with the default H. A number alone is an
    ``"equal"`` pace.
    ``moments``: what becomes of the inner optimiser's moments, such as Adam's. With ``None`` each worker keeps them to
    itself. ``moments=3``: every third average of the weights averages them too. ``moments="6/3"``: the first moments
    (of gradients) are averaged every sixth, the second ones (of their squares) every third time (DES-LOC,
    arXiv:2505.22549). They travel without the codec.

    *When it helps*: a thin network, or steps whose unevenness averages out over H of them before anyone waits.
    *When it hurts*: a large H lets the replicas drift, and accuracy falls. All workers wait for one that is always
    slow, unless ``pace="speed"``. That wants data that is handed out as it is used: where every worker has the same
    number of batches, the fast ones are through early. Such a run cannot be stopped and resumed, or averaged, half-way.
    Where lateness is chance, the speeds of one period say nothing of the next. First moments that are averaged more
    often than the second ones, DES-LOC's own ``"3/6"``, let Adam diverge where some gradients are zero on some workers.
    *Suggested settings*: period 4 to 16; a shorter one early in training (or ``adaptive``, which finds it). With
    ``pace="speed"`` at least as long as the slowest worker is slower than the fastest, better ten times that.
    *Departures*: ``pace`` and ``moments`` are of other papers. In DyLU averages are asynchronous and no worker may be
    late; here one may be late by 5%. Speeds are those of the last period, of computing alone. In DES-LOC the second
    moments are averaged half as often as the first.

    Example: ``ob.local_sgd(period=8, codec=ob.codec.qsgd(bits=8))``
    """
    H, pace = steps_and_pace(period, pace, PERIOD)
    codec = coded(codec)
    K = every(moments)

    async def paced(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        average, moments_too = Averager(me, codec), MomentsToo(me, K)

        async def averaged(weight: float) -> None:
            me.model.copy_(await average(everyone(0), weight))
            await moments_too.averaged(everyone(0))

        await by_speed(me, H, averaged)

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        average, moments_too = Averager(me, codec), MomentsToo(me, K)
        async for t in me.steps():
            me.step(await Grad())
            if (t + 1) % H == 0:
                me.model.copy_(await average(everyone(t)))
                await moments_too.averaged(everyone(t))

    return body if pace == "equal" else paced
