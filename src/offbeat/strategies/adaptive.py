"""ADPSGD, adaptive periodic averaging, after Jiang and Agrawal (2020). Not AD-PSGD, which is ``ad_psgd``."""

from __future__ import annotations

from offbeat.method import (
    Axes,
    Body,
    Codec,
    Facts,
    Grad,
    Mix,
    Paper,
    Replica,
    between,
    method,
    pacing,
    pack,
    scalar,
    topology,
    units,
    unpack,
    whole,
)
from offbeat.strategies.averaging import Averager
from offbeat.strategies.common import coded
from offbeat.strategies.desloc import MomentsToo, every

PAPER = Paper(
    name="adaptive",
    full_name="ADPSGD (adaptive periodic averaging)",
    title="Adaptive Periodic Averaging: A Practical Approach to Reducing Communication in Distributed Learning",
    authors="Jiang, Peng and Agrawal, Gagan",
    year=2020,
    venue="arXiv preprint arXiv:2007.06134",
    arxiv="2007.06134",
    axes=Axes(what="weights", when="adaptive to the spread of the replicas", whom="everyone"),
    laws=(
        "low=0 and high=inf: equals local_sgd",
        "period=1 and low=0 with plain SGD equals allreduce",
        "the mean of the weights is preserved by averaging",
        "the period moves by one at most, and alike on all workers",
    ),
    confidence="the constants 0.7, 1.3, period 4 and a quarter of the run (from memory, medium to low)",
)


@method(PAPER, Facts(meets="everyone", waits_where_it_begins=True))
def adaptive(
    period: int = 4,
    sampling: float | str = 0.25,
    low: float = 0.7,
    high: float = 1.3,
    cap: int = 64,
    codec: Codec | str | None = None,
    moments: int | str | None = None,
) -> Body:
    """Average the weights of all with a period that follows the spread of the replicas.

    This is local SGD that finds its own period: short while the replicas drift apart fast, long while they stay
    together. At each average the workers also measure their spread, S_k = (1/n) Σ_i ‖w̄ − w_i‖². In the first part of
    the run the period stays p, and C₂, the mean of S_k/γ_k, is taken. From then on S_k is held near γ_k · C₂: below 0.7
    of it p grows by one, above 1.3 of it p shrinks by one. (The paper calls it ADPSGD, ADaptive Periodic averaging.
    That is not AD-PSGD, Asynchronous Decentralized, which is ``ad_psgd``.)

    ``period``: p at the beginning. ``cap``: the largest p.
    ``low``: the bound below which p grows. ``high``: the bound above which it shrinks.
    ``sampling``: the first part of the run: a share, ``"25%"`` or a number up to 1, or steps, ``"1000 steps"`` or a
    larger number. If the length of the run is not known, a share means 25 periods.
    ``moments``: as in ``local_sgd``.

    *When it helps*: a thin network, and a period that nobody wants to tune, or that changes with the learning rate.
    After each decay of the learning rate the period grows by itself.
    *When it hurts*: short runs, since the first quarter only measures; a warm-up from a tiny learning rate, where the
    first measurements are unlike the later ones. All workers wait for one that is always slow.
    *Suggested settings*: the defaults.
    *Departures*: none known. The paper's first epoch with p = 1 is left out, and p has a cap. The rule takes the mean
    of the workers' learning rates, so that workers whose schedulers have come to different points decide alike.

    Example: ``ob.adaptive(period=4, sampling="1000 steps")``
    """
    whole("period", period, 1)
    codec = coded(codec)
    whole("cap", cap, 1)
    measured_steps(sampling, period, None)
    between("low", low, 0, float("inf"))
    between("high", high, 0, float("inf"))
    if period > cap:
        raise ValueError(f"a period of {period} is over its cap of {cap}; use a period of 1 to {cap}")
    if low > high:
        raise ValueError(f"low is {low:g} and high is {high:g}; low must not be over high")

    K = every(moments)

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        average, moments_too = Averager(me, codec), MomentsToo(me, K)
        K_s = measured_steps(sampling, period, me.horizon)
        mem = me.recall(p=period, cnt=0, C2=0.0, samples=0)
        me.report(period=mem.p)
        async for k in me.steps():
            g, gamma = await Grad(), scalar(me.lr, me.x)  # before the step: a scheduler may move on with it
            me.step(g)
            mem.cnt += 1
            if mem.cnt < mem.p:
                continue
            mean = await average(everyone(k))
            apart = me.square_norm(unpack(mean, me.x)[0] - me.x)
            S, gamma = unpack(await Mix(pack(apart, gamma), everyone(k)), apart, gamma)
            me.model.copy_(mean)
            await moments_too.averaged(everyone(k))
            pace = pacing.Pace(mem.p, mem.C2, mem.samples)
            if k < K_s:
                pace = pacing.sampled(pace, S.item(), gamma.item())
            else:
                pace = pacing.adapted(pace, S.item(), gamma.item(), low, high, cap)
            mem.p, mem.C2, mem.samples, mem.cnt = pace.p, pace.C2, pace.samples, 0
            me.report(period=mem.p)

    return body


def measured_steps(sampling: float | str, period: int, horizon: int | None) -> float:
    """How many steps the yardstick is taken for."""
    if isinstance(sampling, str):
        if "step" in sampling:
            return units.parse_number_of(sampling, "step")
        if not sampling.endswith("%"):
            raise ValueError(f"sampling is {sampling!r}, but must be a share of the run, '25%', or '1000 steps'")
        sampling = between("sampling, as a share,", units.parse_share(sampling), 0, 1)
    return pacing.sampling_steps(between("sampling", sampling, 0, float("inf")), period, horizon)
