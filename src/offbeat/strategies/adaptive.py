"""**ADPSGD: adaptive periodic averaging.** Local SGD that finds its own period: average often while the replicas drift
apart fast, seldom when they stay together.

At each average the workers also measure their spread, S_k = (1/n) Σ_i ‖w̄ − w_i‖². In the first part of the run the
period stays p and C₂, the mean of S_k/γ_k, is taken. From then on S_k is held near γ_k · C₂: below 0.7 of it p grows by
one, above 1.3 of it p shrinks by one. (ADPSGD, ADaptive Periodic averaging; not AD-PSGD, Asynchronous Decentralized.)

*When it helps*: where local SGD does, and nobody knows the right period, or it changes with the learning rate: after
each decay of the learning rate the period climbs by itself.
*When it hurts*: short runs (the first quarter only measures); a warm-up from a tiny learning rate makes the first
measurements unlike the later ones; a chronically slow worker is still waited for.
*Suggested settings*: the defaults. ``sampling`` is the share of the run that is measured, or above 1 a number of steps;
where the length of the run is not known, a share means 25 periods.
*Departures*: none known; the paper's first epoch with p = 1 is left out, p is capped. The learning rate of the rule is
the workers' mean, so that workers whose schedulers have come to different points decide alike.
"""

from __future__ import annotations

from offbeat import topology
from offbeat.method.effects import Grad, Mix
from offbeat.method.paper import Axes, Paper
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy, between, whole
from offbeat.rounds import pacing
from offbeat.rounds.pacing import Pace
from offbeat.strategies.averaging import Averager
from offbeat.tensors.codec import Codec
from offbeat.tensors.vector import pack, scalar, unpack

PAPER = Paper(
    name="adaptive",
    full_name="ADPSGD (adaptive periodic averaging)",
    summary="average the weights of all with a period that follows the spread of the replicas",
    title="Adaptive Periodic Averaging: A Practical Approach to Reducing Communication in Distributed Learning",
    authors="Jiang, Peng and Agrawal, Gagan",
    year=2020,
    venue="arXiv preprint arXiv:2007.06134",
    arxiv="2007.06134",
    axes=Axes(what="weights", when="adaptive to the spread of the replicas", whom="everyone"),
    helps="a thin network, and a period that nobody wants to tune",
    hurts="short runs, of which the first quarter only measures; a chronic straggler is still waited for",
    laws=(
        "low=0 and high=inf: equals local_sgd",
        "period=1 and low=0 with plain SGD equals allreduce",
        "the mean of the weights is preserved by averaging",
        "the period moves by one at most, and alike on all workers",
    ),
    departures="no special first epoch; the period is capped",
    confidence="the constants 0.7, 1.3, period 4 and a quarter of the run (from memory, medium to low)",
)


def adaptive(
    period: int = 4,
    sampling: float = 0.25,
    low: float = 0.7,
    high: float = 1.3,
    cap: int = 64,
    codec: Codec | None = None,
) -> Strategy:
    """Average the weights of all workers every p steps; p begins at ``period`` and follows their spread, up to ``cap``.

    Example: ``ob.adaptive(period=4, sampling=1000)``
    """
    whole("adaptive", "period", period, 1)
    whole("adaptive", "cap", cap, 1)
    between("adaptive", "sampling", sampling, 0, float("inf"))
    between("adaptive", "low", low, 0, float("inf"))
    between("adaptive", "high", high, 0, float("inf"))
    if period > cap:
        raise ValueError(f"adaptive: a period of {period} is over its cap of {cap}; use a period of 1 to {cap}")
    if low > high:
        raise ValueError(f"adaptive: low is {low:g} and high is {high:g}; low must not be over high")

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        average = Averager(me, codec)
        K_s = pacing.sampling_steps(sampling, period, me.horizon)
        mem = me.recall(p=period, cnt=0, C2=0.0, samples=0)
        async for k in me.steps():
            g, gamma = await Grad(), scalar(me.lr, me.x)  # before the step: a scheduler may move on with it
            me.step(g)
            mem.cnt += 1
            if mem.cnt < mem.p:
                continue
            mean = await average(everyone(k))
            apart = (unpack(mean, me.x)[0] - me.x).square_norm()
            S, gamma = unpack(await Mix(pack(apart, gamma), everyone(k)), apart, gamma)
            me.model.copy_(mean)
            pace = Pace(mem.p, mem.C2, mem.samples)
            if k < K_s:
                pace = pacing.sampled(pace, S.item(), gamma.item())
            else:
                pace = pacing.adapted(pace, S.item(), gamma.item(), low, high, cap)
            mem.p, mem.C2, mem.samples, mem.cnt = pace.p, pace.C2, pace.samples, 0

    settings = {"period": period, "sampling": sampling, "low": low, "high": high, "cap": cap, "codec": codec}
    return Strategy(PAPER, adaptive, settings, body)
