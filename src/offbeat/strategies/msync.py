"""m-synchronous SGD, after Begunov and Tyurin (2026)."""

from __future__ import annotations

from offbeat.method import Axes, Body, Channel, Codec, Got, Grad, Open, Paper, Replica, Wait, method, topology
from offbeat.strategies.common import quorum, rules, sends_all

PAPER = Paper(
    name="msync",
    full_name="m-synchronous SGD",
    title="Do We Need Asynchronous SGD? On the Near-Optimality of Synchronous Methods",
    authors="Begunov, Grigory and Tyurin, Alexander",
    year=2026,
    venue="arXiv preprint arXiv:2602.03802",
    arxiv="2602.03802",
    axes=Axes(
        what="gradient",
        when="every step",
        whom="everyone",
        wait="the first m",
        late="never: it is dropped",
        merge="mean",
    ),
    laws=(
        "m = P: equals allreduce bit for bit",
        "a gradient is applied once, in the round it was made for, or never",
        "replicas are equal bit for bit at all times",
    ),
    confidence="title, authors and abstract read; the algorithm from a second-hand reading; no suggested m was seen",
)


@method(PAPER)
def msync(m: str | int | float | Wait = "75%", codec: Codec | str | None = None) -> Body:
    """Step with the mean of the first m gradients, and drop the others.

    Each worker makes one gradient a round, at the weights that all share. When m are there, all workers take the step x
    ← x − γ (1/m) Σ g over those. A gradient that comes later is lost, and its worker begins anew at the new weights.

    ``m``: a number of workers, or a share of them: ``6``, ``"6 workers"``, ``0.75`` or ``"75%"`` (rounded up). A
    gradient that comes while the round is starting is in it, and counts.

    *When it helps*: a few workers are late now and then, or always, and what they would have learned can be spared. No
    gradient is ever stale, so every learning rate of ``allreduce`` with a batch of m is right.
    *When it hurts*: many workers are late by a little: what is dropped was paid for. A worker that is always too late
    never learns anything from its own data.
    *Suggested settings*: m a little below the number of workers that are usually in time.
    *Departures*: a late worker is not interrupted. It ends its gradient, finds it dropped, and goes on with the current
    round. Two that are ready at the same moment both count, also beyond m.

    Example: ``ob.msync("90%")``
    """
    codec = sends_all(codec)
    how = rules(
        wait=quorum(m), absent="drop", full_every=None, catch_up="current", sync="barrier", staleness=None, late=0
    )

    async def body(me: Replica) -> None:
        P = me.size

        def update(results: list[Got]) -> None:
            for got in results:
                if count := len(got.contributors):  # sums come divided by all there were
                    me.step(got.value if count == got.count else got.value * (got.count / count))

        partial = Channel("msync", topology.everyone(P), how.among(P), update, me.sends(codec))
        await Open(partial, None)
        async for t in me.own_steps():
            if (g := await Grad()) is not None:
                update(await partial.mix(g, t))
        async for got in partial.rest(lambda: None):
            update([got])

    return body
