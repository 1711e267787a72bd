"""**Synchronous SGD.** Every worker's gradient is averaged with everybody's, every step, while backward still runs.

The baseline of all the others: w ← w − γ · (1/P) Σ g_i. Replicas stay bitwise equal, and the result is that of one
process with a batch P times as large.

*When it helps*: workers of equal speed, a quick network, and results that must not depend on the number of workers.
*When it hurts*: every step takes as long as the slowest worker's.
*Suggested settings*: none to make. Scale the learning rate with P, and warm it up.
"""

from __future__ import annotations

from offbeat import topology
from offbeat.method.effects import GradMix
from offbeat.method.paper import Axes, Paper
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy

PAPER = Paper(
    name="allreduce",
    full_name="Synchronous SGD (full communication)",
    summary="average every gradient among all workers, overlapped with backward",
    title="PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    authors="Li, Shen and Zhao, Yanli and Varma, Rohan and Salpekar, Omkar and others",
    year=2020,
    venue="Proceedings of the VLDB Endowment",
    arxiv="2006.15704",
    axes=Axes(what="gradient", when="every step", whom="everyone"),
    helps="workers of equal speed on a quick network",
    hurts="every step lasts as long as the slowest worker's",
    laws=("equals one process with a batch P times as large", "replicas are bitwise equal"),
)


def allreduce() -> Strategy:
    """Synchronous SGD: the gradient averaged over all workers that still have data.

    Example: ``ob.attach(optimizer, model, ob.allreduce())``
    """

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        async for t in me.steps():
            me.step(await GradMix(everyone(t)))

    return Strategy(PAPER, allreduce, {}, body)
