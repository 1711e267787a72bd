"""**DaSGD: delayed averaging.** Local SGD that does not wait for its average: training goes on while it travels, and
d steps later it is blended in.

After every τ-th step the mean A of all weights is begun; d local steps later w_i ← ξ·w_i + (1 − ξ)·A. The result does
not depend on how long the exchange took, only the waiting does: none, if d steps last longer than it.

*When it helps*: a network whose average takes about d steps; steps that are a little uneven.
*When it hurts*: the paper's blend throws away (1 − ξ) of what was learned during the delay; the mean of all workers
afterwards is mean_snapshot + ξ·(mean_now − mean_snapshot). ``merge="correct"`` adds A − snapshot instead, loses
nothing and needs no ξ (this is CoCoD-SGD's rule). A chronically slow worker is still waited for.
*Suggested settings*: the smallest d whose steps last as long as the average; τ = 4 to 16; ξ = 0.25.
*Departures*: none in ``merge="paper"``. BatchNorm statistics stay with their worker until the closing average, as in
the authors' code. With a codec the displacement since the last average travels; ``"correct"`` then keeps the mean up
to the codec's rounding.
"""

from __future__ import annotations

from typing import Literal

from offbeat import topology
from offbeat.method.effects import Grad
from offbeat.method.paper import Axes, Paper
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy, between, whole
from offbeat.strategies.averaging import Underway
from offbeat.tensors.codec import Codec, sent_to

PAPER = Paper(
    name="dasgd",
    full_name="DaSGD (local SGD with delayed averaging)",
    summary="average the weights of all in the background, and blend the result in d steps later",
    title="DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging",
    authors=(
        "Zhou, Qinggang and Zhang, Yawen and Li, Pengcheng and Liu, Xiaoyong and Yang, Jun and Wang, Runsheng "
        "and Huang, Ru"
    ),
    year=2020,
    venue="arXiv preprint arXiv:2006.00441",
    arxiv="2006.00441",
    axes=Axes(what="weights", when="every τ steps", whom="everyone", late="d steps later", merge="blend, or correct"),
    helps="an average that takes about as long as d steps is hidden behind them",
    hurts="the blend discards 1 − ξ of what was learned during the delay (merge='correct' does not)",
    laws=(
        "delay=0, xi=0: equals local_sgd; with period=1 and plain SGD, allreduce",
        "after the blend the mean is mean_snapshot + ξ · (mean_now − mean_snapshot); with merge='correct' it is kept",
        "xi=1: independent runs",
        "the weights do not depend on how long the exchange took",
    ),
    confidence="τ = 4, d = 1, ξ = 0.25 (read in the authors' script)",
)


def dasgd(
    period: int = 4,
    delay: int = 1,
    xi: float = 0.25,
    merge: Literal["paper", "correct"] = "paper",
    codec: Codec | None = None,
) -> Strategy:
    """Begin an average of all weights every ``period`` steps and merge it ``delay`` steps later (0: at once).

    ``merge="paper"``: w ← xi · w + (1 − xi) · average; ``"correct"``: w ← w + average − what I had sent.

    Example: ``ob.dasgd(period=8, delay=2, merge="correct")``
    """
    whole("dasgd", "period", period, 1)
    whole("dasgd", "delay", delay, 0)
    between("dasgd", "xi", xi, 0, 1)
    if delay >= period:
        raise ValueError(
            f"dasgd: a delay of {delay} steps does not fit a period of {period}, in which the next average begins; "
            f"use a delay of 0 to {period - 1}"
        )
    if merge not in ("paper", "correct"):
        raise ValueError(f"dasgd: there is no merge {merge!r}; use 'paper' or 'correct'")
    tau, d = period, delay

    async def body(me: Replica) -> None:
        w, everyone, Q = me.x, topology.everyone(me.size), sent_to(codec, me.size - 1)
        mem = me.recall(A=w.clone() if Q else None)  # the last average: the same on all, so codecs start from it
        average = Underway(me, everyone(0), Q)
        await average.resume()

        async def blend() -> None:
            sent, mixed = average.sent, await average.finish()
            A = mixed if Q is None else mem.A.add_(mixed)
            if merge == "correct":
                assert sent is not None
                w.add_(sent.mul_(-1.0).add_(mixed))  # nobody needs it any more
            else:
                w.mul_(xi).add_(A, alpha=1 - xi)

        async for k in me.steps():
            me.step(await Grad())
            if (k + 1) % tau == 0:
                await average.begin(w.clone() if Q is None else w - mem.A)
            if (k + 1) % tau == d and average.sent is not None:
                await blend()
        if average.sent is not None:
            await blend()

    settings = {"period": period, "delay": delay, "xi": xi, "merge": merge, "codec": codec}
    return Strategy(PAPER, dasgd, settings, body)
