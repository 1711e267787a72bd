"""DaSGD, delayed averaging, after Zhou et al. (2020)."""

from __future__ import annotations

from typing import Literal

from offbeat.method import (
    Axes,
    Body,
    Codec,
    Facts,
    Grad,
    Paper,
    Replica,
    between,
    method,
    one_of,
    topology,
    whole,
)
from offbeat.strategies.averaging import Underway
from offbeat.strategies.common import coded
from offbeat.strategies.desloc import MomentsToo, every

PAPER = Paper(
    name="dasgd",
    full_name="DaSGD (local SGD with delayed averaging)",
    title="DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging",
    authors=(
        "Zhou, Qinggang and Zhang, Yawen and Li, Pengcheng and Liu, Xiaoyong and Yang, Jun and Wang, Runsheng "
        "and Huang, Ru"
    ),
    year=2020,
    venue="arXiv preprint arXiv:2006.00441",
    arxiv="2006.00441",
    axes=Axes(what="weights", when="every τ steps", whom="everyone", late="d steps later", merge="blend, or correct"),
    laws=(
        "delay=0, xi=0: equals local_sgd; with period=1 and plain SGD, allreduce",
        "after the blend the mean is mean_snapshot + ξ · (mean_now − mean_snapshot); with merge='correct' it is kept",
        "xi=1: independent runs",
        "the weights do not depend on how long the exchange took",
    ),
    confidence="τ = 4, d = 1, ξ = 0.25 (read in the authors' script)",
)


@method(PAPER, lambda delay, **_: Facts(meets="everyone", waits_where_it_begins=delay == 0))
def dasgd(
    period: int = 4,
    delay: int = 1,
    xi: float = 0.25,
    merge: Literal["paper", "correct"] = "paper",
    codec: Codec | str | None = None,
    moments: int | str | None = None,
) -> Body:
    """Average the weights of all in the background, and blend the result in d steps later.

    This is local SGD that does not wait for its average. After every τ-th step the mean A of all weights is begun.
    After d more local steps it is blended in: w_i ← ξ·w_i + (1 − ξ)·A. The result does not depend on how long the
    exchange took. Only the waiting does: there is none if d steps last longer than the exchange.

    ``period``: τ. ``delay``: d, below τ; 0 means at once. ``xi``: ξ.
    ``merge="paper"``: the blend above. ``merge="correct"``: w ← w + A − what this worker had sent. That loses nothing
    and needs no ``xi``; it is CoCoD-SGD's rule.
    ``moments``: as in ``local_sgd``. Their average is not hidden.

    *When it helps*: a network whose average takes about d steps; steps that are a little uneven.
    *When it hurts*: the paper's blend throws away (1 − ξ) of what was learned during the delay: the mean of all workers
    afterwards is mean_snapshot + ξ·(mean_now − mean_snapshot). All workers wait for one that is always slow. At equal
    samples a GPT with AdamW that begins with a plateau ended 12 % above all-reduce, digits with momentum 5 %.
    *Suggested settings*: the smallest d whose steps last as long as the average; τ = 4 to 16; ξ = 0.25.
    *Departures*: none with ``merge="paper"``. BatchNorm statistics stay with their worker until the closing average, as
    in the authors' code. With a codec the displacement since the last average travels. What it loses is sent with the
    next one, so ``"correct"`` then keeps the mean up to one rounding.

    Example: ``ob.dasgd(period=8, delay=2, merge="correct")``
    """
    whole("period", period, 1)
    codec = coded(codec)
    whole("delay", delay, 0)
    between("xi", xi, 0, 1)
    if delay >= period:
        raise ValueError(
            f"a delay of {delay} steps does not fit a period of {period}, in which the next average begins; "
            f"use a delay of 0 to {period - 1}"
        )
    one_of("merge", merge, ("paper", "correct"))
    tau, d, K = period, delay, every(moments)

    async def body(me: Replica) -> None:
        w, everyone = me.x, topology.everyone(me.size)
        # The last average: the same on all, so codecs start from it. (Resumed on other hosts, it goes on as it began.)
        A = me.recall(A=w.clone() if me.sends(codec) else None).A
        average, moments_too = Underway(me, everyone(0), None if A is None else codec), MomentsToo(me, K)
        await average.resume()

        async def blend() -> None:
            sent, mixed = average.sent, await average.finish()
            mean = mixed if A is None else A.add_(mixed)
            if merge == "correct":
                assert sent is not None
                w.add_(sent.taken_from_(mixed))  # nobody needs it any more
            else:
                w.mul_(xi).add_(mean, alpha=1 - xi)
            await moments_too.averaged(everyone(0))

        async for k in me.steps():
            me.step(await Grad())
            if (k + 1) % tau == 0:
                await average.begin(w.clone() if A is None else w - A)
            if (k + 1) % tau == d and average.sent is not None:
                await blend()
        if average.sent is not None:
            await blend()

    return body
