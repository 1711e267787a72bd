"""QSGD, after Alistarh et al. (2017)."""

from __future__ import annotations

from offbeat.method import Axes, Body, Facts, GradMix, Paper, Replica, codec, method, topology, whole

PAPER = Paper(
    name="qsgd",
    full_name="QSGD (quantised gradients)",
    title="QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    authors="Alistarh, Dan and Grubic, Demjan and Li, Jerry and Tomioka, Ryota and Vojnovic, Milan",
    year=2017,
    venue="Advances in Neural Information Processing Systems",
    arxiv="1610.02132",
    axes=Axes(what="gradient, quantised", when="every step", whom="everyone"),
    laws=(
        "right on average, with bounded variance",
        "many bits: equals allreduce",
        "replicas are bitwise equal",
    ),
    confidence="buckets of 512 for 4 bits and 64 for 2 (from memory, medium); 8 bits as compared with in ADPSGD",
)


@method(PAPER, Facts(meets="everyone", waits_where_it_begins=True))
def qsgd(bits: int = 8, bucket: int = 512) -> Body:
    """Average every gradient among all workers, in a few bits a number, rounded at random so as to be right on average.

    Each worker cuts its gradient into buckets. Of each number it sends the level between 0 and the bucket's largest
    magnitude: a = s·|v_k| / ‖v‖ is rounded up with probability a − ⌊a⌋, down otherwise, so E[Q(v)] = v. All workers
    gather all messages and average what they decode: w ← w − γ · (1/P) Σ Q(g_i).

    ``bits``: of a number, 2 to 16, the sign included. ``bucket``: how many numbers share a scale.

    *When it helps*: synchronous training of few workers on a thin network. The gradient shrinks to bits/32 of its size.
    *When it hurts*: every worker receives P messages: beyond about 2 · 32/bits workers a plain all-reduce sends less.
    (``eager("everyone", codec=…)`` sums in two phases, and sends two.) The exchange cannot overlap with backward. If
    the bits are few, the noise costs steps.
    *Suggested settings*: 8 bits are close to lossless; 4 bits with buckets of 512; 2 bits with buckets of 64.
    *Departures*: buckets are scaled by their largest magnitude, as in the paper's experiments (its theory takes the
    2-norm: ``ob.codec.qsgd(norm="l2")``). Codes have a fixed width instead of Elias's. A worker's own share is
    quantised too, unless it is alone.

    Example: ``ob.qsgd(bits=4)``
    """
    whole("bits", bits, 2)
    whole("bucket", bucket, 1)
    Q = codec.qsgd(bits, bucket)

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        async for t in me.steps():
            me.step(await GradMix(everyone(t), Q, gathers=True))

    return body
