"""Ringmaster ASGD, after Maranjyan, Tyurin and Richtárik (2025)."""

from __future__ import annotations

import math
from typing import Literal

from offbeat.method import (
    Axes,
    Body,
    Channel,
    Codec,
    Facts,
    Got,
    Nodes,
    Open,
    Paper,
    Replica,
    Rules,
    method,
    topology,
    waiting,
    whole,
)
from offbeat.strategies.common import own_gradient, sends_all, whole_or

PAPER = Paper(
    name="ringmaster",
    full_name="Ringmaster ASGD",
    title="Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity",
    authors="Maranjyan, Artavazd and Tyurin, Alexander and Richtárik, Peter",
    year=2025,
    venue="International Conference on Machine Learning",
    arxiv="2501.16168",
    axes=Axes(
        what="gradient", when="when it is ready", whom="everyone", wait="nobody", merge="sum / P; older than R: dropped"
    ),
    laws=(
        "no gradient is applied at R or more versions after the one it was taken at",
        "R = ∞: every gradient is applied exactly once (asynchronous SGD)",
        "R = 1: only fresh gradients; if rounds take no time, eager('first', None, stale='drop') bit for bit",
        "nobody late: equals allreduce bit for bit, whatever R is",
        "at equal versions all workers hold the same bits",
    ),
    confidence="Algorithm 1 as others tell it, without the paper at hand; R = P is the largest its authors tune over",
)


def facts(threshold: object, **others: object) -> Facts:
    """A gradient is late as soon as another one has come before it."""
    return Facts(late_gradients=threshold != 1)


@method(PAPER, facts)
def ringmaster(
    threshold: int | Literal["workers"] | None = "workers", per_node: int = 1, codec: Codec | str | None = None
) -> Body:
    """Apply every gradient as soon as it is there, unless the weights have moved on R times since it was begun.

    This is asynchronous SGD. A worker takes a gradient at version k_i of the weights. As soon as it arrives, it makes
    the next version, and nobody is waited for. If it arrives at version k with k − k_i ≥ R, it is dropped. Its worker
    takes the newest weights either way. Versions decide, never the clock.

    ``threshold``: R. With ``"workers"`` it is as many as there are; with ``None`` nothing is ever dropped.
    ``per_node=8``: eight consecutive ranks average their gradients in step, over the fast links inside a machine, and
    count as one worker outside. ``codec``: of messages between nodes. It must be one that sends every number.

    In theory, for gradients with variance σ² of a loss with L-Lipschitz gradient, to come to ‖∇f‖² ≤ ε: R = max(1,
    ⌈σ²/ε⌉) and γ = min(1/(2RL), ε/(4Lσ²)), where γ = lr / P, as a gradient counts 1/P here.

    *When it helps*: workers whose speeds differ much, for good or by turns: the fast ones set the pace, and what a slow
    one brings is used while it is fresh enough.
    *When it hurts*: a worker in whose step the others make R versions never contributes, and neither do its data. Each
    version costs a sum among all, which is much for large models and many workers. Adam, of which ``attach`` warns: a
    GPT did not get off its plateau (+29 % of all-reduce's loss, with R = 1 +23 %). The digits took half of the rate or
    less, with momentum too.
    *Suggested settings*: R = P, P/4 or P/16; the smaller R, the larger a learning rate it bears. The threshold drops
    what ``eager(sync="bounded")`` would wait for.
    *Departures*: there is no server: every worker keeps the weights and applies the same sums in the same order.
    Gradients that arrive together make one version, and each counts 1/P, so that the learning rate is that of
    ``allreduce``. A gradient that is bound to come too late is still computed to its end (the paper's second variant
    would stop it).

    Example: ``ob.ringmaster(threshold=4)``
    """
    whole_or("threshold", threshold, 1, "workers", None)
    whole("per_node", per_node, 1)
    codec = sends_all(codec)

    async def body(me: Replica) -> None:
        P = Nodes(me.size, per_node).count
        R = P if threshold == "workers" else math.inf if threshold is None else threshold

        def update(results: list[Got]) -> None:
            for got in results:
                me.step(got.value)

        how = Rules(waiting.first, "drop", good_for=R)
        arrivals = Channel("ringmaster", topology.everyone(P), how, update, me.sends(codec), per_node=per_node)
        await Open(arrivals, None)
        async for t in me.own_steps(per_node):
            if (g := await own_gradient(me, per_node)) is not None:
                update(await arrivals.mix(g, t))
        async for got in arrivals.rest(lambda: None):
            update([got])

    return body
