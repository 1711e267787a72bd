"""**DiLoCo**, and **Streaming DiLoCo**: hundreds of local steps, then one step of an outer optimiser.

Every H inner steps each worker's way since the last exchange, Δ_i = θ_old − θ_i, is averaged and taken for a gradient
by Nesterov's momentum: buf ← μ·buf + Δ, θ ← θ_old − η·(Δ + μ·buf), and all go on from θ. The inner optimiser (AdamW in
the paper) keeps its state and is never reset.

Streaming: with ``fragments`` F the model is cut into F pieces that take turns, one every H/F steps, so that the peak
of traffic is F times lower. With ``overlap`` τ a piece sets out τ steps before its turn and training goes on meanwhile;
``merge`` α is the weight that one's own copy keeps, θ_i ← (1 − α)·θ + α·θ_i.

*When it helps*: clusters far apart, or a network so thin that an average every few steps is out of the question.
*When it hurts*: early in training, and with H so large that the workers part; plain SGD without momentum gains little.
With overlap and merge=0 the τ steps during the flight are discarded for that piece.
*Suggested settings*: H = 100 to 500 with AdamW inside; streaming: fragments of a few layers, overlap 1 to 5, merge=0.5,
and a codec of 4 bits (Δ is what travels, so its rounding error shrinks with it).
*Departures*: fragments are contiguous stretches of the weights, as equal as possible (the paper strides over layers).
BatchNorm statistics stay with their worker until the closing average.
"""

from __future__ import annotations

from offbeat import topology
from offbeat.method.effects import Grad
from offbeat.method.paper import Axes, Paper
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy, between, whole
from offbeat.strategies.averaging import Underway
from offbeat.tensors.codec import Codec

PAPER = Paper(
    name="diloco",
    full_name="DiLoCo and Streaming DiLoCo",
    summary="take hundreds of steps alone, then let an outer Nesterov step follow the workers' mean way",
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
    helps="clusters far apart: hundreds of times fewer bytes, spread out and hidden when streaming",
    hurts="early training; workers that part when H is large; overlap without merge discards steps",
    laws=(
        "outer_lr=1, outer_momentum=0: equals local_sgd; with period=1 and plain SGD, allreduce",
        "fragments=1, overlap=0, merge=0: replicas are bitwise equal after every outer step",
        "the outer copies are the same on all workers at all times",
        "merge=1: the local weights take no notice",
    ),
    departures="contiguous fragments (Streaming DiLoCo, arXiv:2501.18512, strides over layers)",
    confidence="H = 500, outer_lr 0.7, momentum 0.9 (from memory, high); streaming settings (medium)",
)


def diloco(
    period: int = 500,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    fragments: int = 1,
    overlap: int = 0,
    merge: float = 0.0,
    codec: Codec | None = None,
) -> Strategy:
    """An outer Nesterov step on the workers' mean displacement every ``period`` steps.

    Streaming: ``fragments`` pieces in turn, each sent ``overlap`` steps ahead; the local copy keeps a share ``merge``.

    Example: ``ob.diloco(period=100, fragments=4, overlap=5, merge=0.5, codec=ob.codec.qsgd(4))``
    """
    whole("diloco", "period", period, 1)
    whole("diloco", "fragments", fragments, 1)
    whole("diloco", "overlap", overlap, 0)
    eta = between("diloco", "outer_lr", outer_lr, 0, float("inf"))
    mu = between("diloco", "outer_momentum", outer_momentum, 0, 1)
    alpha = between("diloco", "merge", merge, 0, 1)
    if period % fragments:
        raise ValueError(
            f"diloco: a period of {period} steps cannot be shared by {fragments} fragments; "
            f"use a period that is a multiple of {fragments}"
        )
    n = period // fragments
    if overlap >= n:
        raise ValueError(
            f"diloco: an overlap of {overlap} steps does not fit the {n} steps between two fragments; "
            f"use 0 to {n - 1}, fewer fragments or a longer period"
        )

    def turn(steps: int) -> int:
        """The fragment that was last sent when ``steps`` steps are done."""
        return ((steps + overlap) // n - 1) % fragments

    async def body(me: Replica) -> None:
        mem = me.recall(theta=me.x.clone(), buf=me.x.zeros_like())
        x, theta, buf = (v.fragments(fragments) for v in (me.x, mem.theta, mem.buf))
        average = Underway(me, topology.everyone(me.size)(0), codec)
        await average.resume()

        async def outer_step(f: int) -> None:
            delta = await average.finish()
            buf[f].mul_(mu).add_(delta)
            theta[f].add_(delta + buf[f] * mu, alpha=-eta)
            x[f].copy_(theta[f] if alpha == 0 else theta[f] * (1 - alpha) + x[f] * alpha)

        async for t in me.steps():
            me.step(await Grad())
            if (t + 1 + overlap) % n == 0:
                f = turn(t + 1)
                await average.begin(theta[f] - x[f])
            if (t + 1) % n == 0 and average.sent is not None:
                await outer_step(turn(t + 1))
        if average.sent is not None:
            await outer_step(turn(me.t))

    settings = {
        "period": period,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "fragments": fragments,
        "overlap": overlap,
        "merge": merge,
        "codec": codec,
    }
    return Strategy(PAPER, diloco, settings, body)
