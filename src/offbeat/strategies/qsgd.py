"""**QSGD.** Synchronous SGD whose gradients travel as a few bits a number, rounded at random so that they are right
on average.

Each worker cuts its gradient into buckets and sends, for each number, its level between 0 and the bucket's largest
magnitude: a = s·|v_k| / ‖v‖ is rounded up with probability a − ⌊a⌋, down otherwise, so E[Q(v)] = v. Everybody gathers
everybody's message and averages what it decodes: w ← w − γ · (1/P) Σ Q(g_i).

*When it helps*: synchronous training on a thin network, with few workers: the gradient shrinks to bits/32 of its size.
*When it hurts*: quantised numbers cannot be summed on the way, so every worker receives P messages: beyond about
2 · 32/bits workers a plain all-reduce sends less. The exchange cannot overlap with backward.
*Suggested settings*: 8 bits are close to lossless; 4 bits with buckets of 512; 2 bits with buckets of 64.
*Departures*: buckets are scaled by their largest magnitude, as in the paper's experiments (its theory takes the
2-norm: ``ob.codec.qsgd(norm="l2")``); codes have a fixed width instead of Elias's; one's own share is quantised too,
but for a worker alone.
"""

from __future__ import annotations

from offbeat import topology
from offbeat.method.effects import GradMix
from offbeat.method.paper import Axes, Paper
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy, whole
from offbeat.tensors import codec

PAPER = Paper(
    name="qsgd",
    full_name="QSGD (quantised gradients)",
    summary="average every gradient among all workers, in a few bits a number",
    title="QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    authors="Alistarh, Dan and Grubic, Demjan and Li, Jerry and Tomioka, Ryota and Vojnovic, Milan",
    year=2017,
    venue="Advances in Neural Information Processing Systems",
    arxiv="1610.02132",
    axes=Axes(what="gradient, quantised", when="every step", whom="everyone"),
    helps="synchronous training of few workers on a thin network",
    hurts="every worker receives P messages, after backward; the noise costs steps when the bits are few",
    laws=(
        "right on average, with bounded variance",
        "many bits: equals allreduce",
        "replicas are bitwise equal",
    ),
    departures="max-norm buckets (the paper's practice), codes of fixed width",
    confidence="buckets of 512 for 4 bits and 64 for 2 (from memory, medium); 8 bits as compared with in ADPSGD",
)


def qsgd(bits: int = 8, bucket: int = 512) -> Strategy:
    """Synchronous SGD with gradients of ``bits`` bits (2 to 16, the sign included), scaled per ``bucket`` numbers.

    Example: ``ob.qsgd(bits=4)``
    """
    whole("qsgd", "bits", bits, 2)
    whole("qsgd", "bucket", bucket, 1)
    Q = codec.qsgd(bits, bucket)

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        async for t in me.steps():
            me.step(await GradMix(everyone(t), Q))

    return Strategy(PAPER, qsgd, {"bits": bits, "bucket": bucket}, body)
