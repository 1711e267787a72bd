"""Synchronous SGD: the baseline of all the others."""

from __future__ import annotations

from offbeat.method import Axes, Body, Facts, GradMix, Paper, Replica, method, topology

PAPER = Paper(
    name="allreduce",
    full_name="Synchronous SGD (full communication)",
    title="PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    authors="Li, Shen and Zhao, Yanli and Varma, Rohan and Salpekar, Omkar and others",
    year=2020,
    venue="Proceedings of the VLDB Endowment",
    arxiv="2006.15704",
    axes=Axes(what="gradient", when="every step", whom="everyone"),
    laws=("equals one process with a batch P times as large", "replicas are bitwise equal"),
)


@method(PAPER, Facts(meets="everyone", waits_where_it_begins=True))
def allreduce() -> Body:
    """Average every gradient among all workers, every step, while backward still runs.

    w ← w − γ · (1/P) Σ g_i, over the workers that still have data. All other methods are measured against it: replicas
    stay bitwise equal, and the result is that of one process with a batch P times as large.

    *When it helps*: workers of equal speed on a quick network, and results that must not depend on the number of
    workers.
    *When it hurts*: every step takes as long as the slowest worker's.
    *Suggested settings*: there are none. The learning rate is that of DDP; from that of one process, scale it with P,
    and warm it up.

    Example: ``ob.attach(optimizer, model, ob.allreduce())``
    """

    async def body(me: Replica) -> None:
        everyone = topology.everyone(me.size)
        async for t in me.steps():
            me.step(await GradMix(everyone(t)))

    return body
