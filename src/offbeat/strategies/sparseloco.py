"""SparseLoCo, after Sarfi et al. (2025)."""

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
    codec,
    method,
    nothing_lost,
    topology,
    whole,
)
from offbeat.strategies.common import coded
from offbeat.strategies.desloc import MomentsToo, every

PAPER = Paper(
    name="sparseloco",
    full_name="SparseLoCo",
    title="Communication Efficient LLM Pre-training with SparseLoCo",
    authors="Sarfi, Amir and Thérien, Benjamin and Lidin, Joel and Belilovsky, Eugene",
    year=2025,
    venue="arXiv preprint arXiv:2508.15706",
    arxiv="2508.15706",
    axes=Axes(
        what="the largest numbers of a displacement",
        when="every H steps",
        whom="everyone",
        merge="outer step without momentum",
    ),
    laws=(
        "nothing left out, α = 1: equals local_sgd, whatever β is",
        "what a worker owes is the discounted sum of what it did not send: e = Σ_t β^(n − t) (Δ_t − ŝ_t)",
        "replicas are bitwise equal after every outer step",
    ),
    confidence=(
        "H = 30, β = 0.95, k = 64 of 4096 and α = 1 from summaries and the authors' later runs; the paper's 2-bit code "
        "is known in outline, and ours may cut its bins elsewhere"
    ),
)
TOP_64 = codec.topk(64)


@method(PAPER, Facts(meets="everyone", waits_where_it_begins=True))
def sparseloco(
    period: int = 30,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    codec: Codec | str | None = TOP_64,
    moments: int | str | None = None,
) -> Body:
    """Take H steps alone, then send the few largest numbers of the displacement; the rest fades and comes later.

    Every H steps a worker adds its displacement Δ_i = θ_old − θ_i to what it still owes, e ← β·e + Δ_i. It sends the
    largest numbers of that in a few bits, ŝ_i = Q(e), and owes the rest: e ← e − ŝ_i. All step from where they were: θ
    ← θ_old − α·(1/P) Σ_j ŝ_j. What is owed works as an outer momentum that nobody has to send: a direction that many
    rounds share piles up until it is among the largest.

    ``period``: H. ``decay``: β. ``outer_lr``: α.
    ``codec``: Q. ``topk(k)`` takes the k largest of every 4096 numbers in 14 bits each. Any other codec will do, and
    with ``None`` all of Δ travels uncoded. All workers get every worker's message, as their sum would no longer be
    sparse.
    ``moments``: as in ``local_sgd``. They travel in full, and cost far more bytes than all else.

    *When it helps*: links so thin that one Δ in full is too much: a message of ``topk(64)`` is 128 times shorter.
    *When it hurts*: short runs, in which much is still owed at the end; a sound link, where ``diloco`` loses nothing;
    very many workers, since each receives a message from every other.
    *Suggested settings*: the defaults with AdamW inside; k = 64 to 128; α nearer 0.65 late in a long run.
    *Departures*: chunks are stretches of all weights of a dtype, not of one tensor. BatchNorm statistics stay with
    their worker until the closing average.

    Example: ``ob.sparseloco(period=30, codec=ob.codec.topk(128))``
    """
    whole("period", period, 1)
    codec = coded(codec)
    beta = between("decay", decay, 0, 1)
    alpha = between("outer_lr", outer_lr, 0, float("inf"))
    K = every(moments)

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        mem = me.recall(theta=me.x.clone(), e=nothing_lost(me.x))
        theta, e, moments_too = mem.theta, mem.e, MomentsToo(me, K)
        async for t in me.steps():
            me.step(await Grad())
            if (t + 1) % period == 0:
                e.mul_(beta)
                s = await Mix(theta - me.x, everyone(t), codec, lost=e, gathers=True)
                me.x.copy_(theta.add_(s, alpha=-alpha))
                await moments_too.averaged(everyone(t))

    return body
