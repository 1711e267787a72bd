"""NoLoCo, after Kolehmainen et al. (2025)."""

from __future__ import annotations

from offbeat.method import Axes, Body, Grad, Mix, Paper, Replica, between, method, pack, topology, unpack, whole
from offbeat.strategies.common import fading
from offbeat.strategies.desloc import MomentsToo, every

PAPER = Paper(
    name="noloco",
    full_name="NoLoCo (no all-reduce, low communication)",
    title="NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
    authors="Kolehmainen, Jari and Blagoev, Nikolay and Donaghy, John and Ersoy, Oğuzhan and Nies, Christopher",
    year=2025,
    venue="arXiv preprint arXiv:2506.10911",
    arxiv="2506.10911",
    axes=Axes(
        what="displacement and slow weights",
        when="every H steps",
        whom="random pairs",
        wait="one's pair",
        merge="outer optimiser",
    ),
    laws=(
        "all workers draw the same pairs",
        "the pulls within a pair cancel: Σφ moves by momentum and β · ΣΔ alone",
        "two workers, outer_lr=1, outer_momentum=0: equals local_sgd",
    ),
    confidence="H = 50, outer_lr 0.7, momentum 0.5 (read in the authors' configurations)",
)


@method(PAPER)
def noloco(
    period: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    pull: float | None = None,
    moments: int | str | None = None,
) -> Body:
    """Take H steps alone, then an outer momentum step together with one random peer.

    This is DiLoCo without any exchange among all. Every H inner steps the workers are paired at random (alike on all,
    from the seed and the outer round's number). A worker has slow weights φ and fast weights θ. With the means over the
    pair, m ← μ·m + β·mean(θ − φ) + γ·(mean(φ) − φ), φ ← φ + m, θ ← φ. The last term, the pull, draws the slow weights
    of all workers together over the rounds.

    ``period``: H. ``outer_lr``: β. ``outer_momentum``: μ. ``pull``: γ, by default β.
    ``moments``: as in ``local_sgd``, but averaged with the peer.

    *When it helps*: workers spread over the internet. A round takes one message to one peer, and nobody waits for all.
    *When it hurts*: the replicas are never equal. With few workers DiLoCo costs little more. A pair waits for its
    slower half.
    *Suggested settings*: H = 50, an adaptive inner optimiser; momentum about 0.5, lower than DiLoCo's.
    *Departures*: the pull is the outer learning rate unless given, as in the authors' code (the paper has it as a
    coefficient of its own). With an odd number of workers one takes its outer step alone. The paper's random routing
    between pipeline stages is not part of this.

    Example: ``ob.noloco(period=50)``
    """
    whole("period", period, 1)
    beta = between("outer_lr", outer_lr, 0, float("inf"))
    mu = fading(outer_momentum)
    gamma = beta if pull is None else between("pull", pull, 0, float("inf"))
    K = every(moments)

    async def body(me: Replica) -> None:
        theta, pairs = me.x, topology.pairs(me.size, me.seed)
        mem = me.recall(phi=theta.clone(), m=theta.zeros_like())
        phi, m, moments_too = mem.phi, mem.m, MomentsToo(me, K)
        async for t in me.steps():
            me.step(await Grad())
            if (t + 1) % period == 0:
                delta = theta - phi
                W = pairs((t + 1) // period - 1)
                mixed = await Mix(pack(delta, phi), W)
                mean_delta, mean_phi = unpack(mixed, delta, phi)
                m.mul_(mu).add_(mean_delta, alpha=beta).add_(mean_phi - phi, alpha=gamma)
                phi.add_(m)
                theta.copy_(phi)
                await moments_too.averaged(W)

    return body
