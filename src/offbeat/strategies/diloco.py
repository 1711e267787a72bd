"""DiLoCo, after Douillard et al. (2023), and Streaming DiLoCo (2025)."""

from __future__ import annotations

from typing import Literal

from offbeat.method import Axes, Body, Codec, Facts, Grad, Paper, Replica, between, method, topology, whole
from offbeat.strategies.averaging import Underway
from offbeat.strategies.by_speed import Pace, by_speed, steps_and_pace
from offbeat.strategies.common import coded, fading
from offbeat.strategies.desloc import MomentsToo, every

PAPER = Paper(
    name="diloco",
    full_name="DiLoCo and Streaming DiLoCo",
    title="DiLoCo: Distributed Low-Communication Training of Language Models",
    authors=(
        "Douillard, Arthur and Feng, Qixuan and Rusu, Andrei A. and Chhaparia, Rachita and Donchev, Yani and "
        "Kuncoro, Adhiguna and Ranzato, Marc'Aurelio and Szlam, Arthur and Shen, Jiajun"
    ),
    year=2023,
    venue="arXiv preprint arXiv:2311.08105",
    arxiv="2311.08105",
    axes=Axes(
        what="displacement",
        when="every H steps, fragment by fragment",
        whom="everyone",
        late="at once, or τ steps later",
        merge="outer optimiser",
    ),
    laws=(
        "outer_lr=1, outer_momentum=0: equals local_sgd; with period=1 and plain SGD, allreduce",
        "fragments=1, overlap=0, merge=0: replicas are bitwise equal after every outer step",
        "the outer copies are the same on all workers at all times",
        "merge=1: the local weights take no notice",
        "pace='speed', all equally fast: equals pace='equal' bit for bit, unless a codec draws",
    ),
    confidence="H = 500, outer_lr 0.7, momentum 0.9 (from memory, high); streaming settings (medium)",
)

PERIOD = 500


@method(PAPER, lambda overlap, **_: Facts(meets="everyone", waits_where_it_begins=overlap == 0))
def diloco(
    period: int | Literal["speed"] = PERIOD,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    fragments: int = 1,
    overlap: int = 0,
    merge: float = 0.0,
    codec: Codec | str | None = None,
    pace: Pace | None = None,
    moments: int | str | None = None,
) -> Body:
    """Take hundreds of steps alone, then let an outer Nesterov step follow the workers' mean displacement.

    Every H inner steps each worker's displacement since the last exchange, Δ_i = θ_old − θ_i, is averaged. Nesterov's
    momentum takes the mean for a gradient: buf ← μ·buf + Δ, θ ← θ_old − η·(Δ + μ·buf), and all go on from θ. The inner
    optimiser (AdamW in the paper) keeps its state and is never reset.

    ``period``: H. ``outer_lr``: η. ``outer_momentum``: μ.
    ``fragments``: F pieces of the model take turns, one every H/F steps (Streaming DiLoCo). The peak of traffic is F
    times lower. ``overlap``: a piece sets out so many steps, τ, before its turn, and training goes on meanwhile.
    ``merge``: α, the weight that a worker's own copy keeps then, θ_i ← (1 − α)·θ + α·θ_i.
    ``pace="speed"``: a worker takes as many of the H steps as it manages while the fastest takes all of them, and its
    displacement counts by them, as in ``local_sgd``. ``period="speed"``: the same with the default H.
    ``moments``: as in ``local_sgd``, counted in outer steps. Their average is waited for, also with overlap.

    *When it helps*: clusters far apart, or a network so thin that an average every few steps is out of the question.
    *When it hurts*: early in training, and with H so large that the workers part. Plain SGD without momentum gains
    little. With overlap and merge=0 the τ steps during the flight are discarded for that piece.
    *Suggested settings*: H = 100 to 500 with AdamW inside. For streaming: fragments of a few layers, overlap 1 to 5,
    merge=0.5, and a codec of 4 bits. It codes Δ, so its rounding error shrinks with Δ, and is sent with the next one.
    *Departures*: fragments are contiguous stretches of the weights, as equal as possible (Streaming DiLoCo,
    arXiv:2501.18512, strides over layers). BatchNorm statistics stay with their worker until the closing average.

    Example: ``ob.diloco(period=100, fragments=4, overlap=5, merge=0.5, codec=ob.codec.qsgd(4))``
    """
    H, pace = steps_and_pace(period, pace, PERIOD)
    codec = coded(codec)
    whole("fragments", fragments, 1)
    whole("overlap", overlap, 0)
    eta = between("outer_lr", outer_lr, 0, float("inf"))
    mu = fading(outer_momentum)
    alpha = between("merge", merge, 0, 1)
    if pace == "speed" and (fragments > 1 or overlap):
        raise ValueError(
            f"pace='speed' sends the whole model when a worker is through its steps, not {fragments} fragments with an "
            f"overlap of {overlap}; use fragments=1 and overlap=0, or an equal pace"
        )
    if H % fragments:
        raise ValueError(
            f"a period of {H} steps cannot be shared by {fragments} fragments; "
            f"use a period that is a multiple of {fragments}"
        )
    n, K = H // fragments, every(moments)
    if overlap >= n:
        raise ValueError(
            f"an overlap of {overlap} steps does not fit the {n} steps between two fragments; "
            f"use 0 to {n - 1}, fewer fragments or a longer period"
        )

    def turn(steps: int) -> int:
        """The fragment that was last sent when ``steps`` steps are done."""
        return ((steps + overlap) // n - 1) % fragments

    async def body(me: Replica) -> None:
        mem = me.recall(theta=me.x.clone(), buf=me.x.zeros_like())
        x, theta, buf = (v.fragments(fragments) for v in (me.x, mem.theta, mem.buf))
        everyone = topology.everyone(me.size)(0)
        average, moments_too = Underway(me, everyone, codec), MomentsToo(me, K)
        await average.resume()

        async def outer_step(f: int) -> None:
            delta = await average.finish()
            buf[f].mul_(mu).add_(delta)
            theta[f].add_(delta + buf[f] * mu, alpha=-eta)
            x[f].copy_(theta[f] if alpha == 0 else theta[f] * (1 - alpha) + x[f] * alpha)
            await moments_too.averaged(everyone)

        async def averaged(weight: float) -> None:
            delta = theta[0] - x[0]
            await average.begin(delta if weight == 1.0 else delta.mul_(weight))
            await outer_step(0)

        if pace == "speed":
            await by_speed(me, H, averaged)
            return
        async for t in me.steps():
            me.step(await Grad())
            if (t + 1 + overlap) % n == 0:
                f = turn(t + 1)
                await average.begin(theta[f] - x[f], f)
            if (t + 1) % n == 0 and average.sent is not None:
                await outer_step(turn(t + 1))
        if average.sent is not None:
            await outer_step(turn(me.t))

    return body
