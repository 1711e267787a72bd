"""eager-SGD, after Li et al. (2020)."""

from __future__ import annotations

from typing import Literal

from offbeat.method import (
    Absent,
    Axes,
    Body,
    CatchUp,
    Channel,
    Codec,
    Facts,
    Got,
    Nodes,
    Open,
    Paper,
    Replica,
    Wait,
    Window,
    method,
    one_of,
    topology,
    waiting,
    whole,
)
from offbeat.strategies.common import Sync, optional, own_gradient, quorum, rules, sends_all

PAPER = Paper(
    name="eager",
    full_name="eager-SGD (partial collectives)",
    title="Taming Unbalanced Training Workloads in Deep Learning with Partial Collective Operations",
    authors="Li, Shigang and Ben-Nun, Tal and Di Girolamo, Salvatore and Alistarh, Dan and Hoefler, Torsten",
    year=2020,
    venue="ACM SIGPLAN Symposium on Principles and Practice of Parallel Programming",
    arxiv="1908.04207",
    axes=Axes(
        what="gradient", when="every step", whom="everyone", wait="first, majority, or a quorum", merge="sum / P"
    ),
    laws=("nobody late: equals allreduce bit for bit", "every gradient is applied exactly once"),
    confidence="sync_every 33 is the released code's limiter of 32",
)


def facts(wait: str | int | float | Wait, sync_every: int | None, late: int, grace: Window, **others: object) -> Facts:
    """Without a window the others' gradients come in after the first one's round, and with ``late=1`` all do."""
    in_step = sync_every == 1 or (not late and (bool(grace) or quorum(wait) == waiting.everyone))
    return Facts(late_gradients=not in_step)


@method(PAPER, facts)
def eager(
    wait: str | int | float | Wait = "first",
    sync_every: int | None = 33,
    stale: Literal["carry", "drop", "fade"] = "carry",
    apply: Literal["queue", "latest"] = "queue",
    catch_up: CatchUp = "current",
    sync: Sync | None = None,
    staleness: int | None = None,
    late: int = 0,
    grace: Window = "auto",
    per_node: int = 1,
    codec: Codec | str | None = None,
) -> Body:
    """Sum gradients without waiting for the late ones; they are carried over, each applied once.

    Gradients are summed by *partial* collectives: a round starts without waiting for everybody. A worker that is still
    computing contributes nothing, or the gradient that it could not deliver before. Its late gradient is carried over
    and applied later, exactly once. Every sum is divided by P. Round v is full iff (v + 1) mod ``sync_every`` = 0.

    ``wait``: who starts a round. ``"first"`` is the paper's solo all-reduce, ``"majority"`` its majority all-reduce (a
    drawn initiator); ``"3 workers"`` or ``"50%"`` is a hard quorum. A whole number is a number of workers, a float a
    fraction.
    ``sync_every``: from one full round, for which all wait, to the next; with ``None`` no round is full.
    ``stale``: a late gradient is carried over to the next round and counts in full (``"carry"``, the paper), or as 1 /
    (1 + the rounds it has missed) (``"fade"``), or is lost (``"drop"``).
    ``apply="queue"``: late results are applied in order, each once, so replicas stay equal without copies between them.
    ``apply="latest"``: the paper's rule.
    ``catch_up="current"``: a late worker joins the current round. ``catch_up="every_step"``: it goes through every
    round that it has missed, as in the paper.
    ``sync="bounded"``: a bound replaces full rounds: no gradient older than ``staleness`` rounds is ever applied.
    ``staleness``: the bound, by default ``sync_every``.
    ``late=1``: the round is hidden behind the next step's computation. That implies ``sync="bounded"`` unless
    ``sync="barrier"`` is asked for: nothing hides a round that waits for all.
    ``grace``: how long a round that may start waits for those who are about to come: as long as that makes more
    gradients a second fresh (``"auto"``), or so many seconds, or until all are there. With 0 it waits for nobody, as in
    the paper.
    ``per_node=8``: eight consecutive ranks average their gradients in step, over the fast links inside a machine, and
    count as one worker outside.
    ``codec``: of messages between nodes. What it loses is lost: sent later, it would be a gradient of other weights. So
    it must be one that sends every number.

    *When it helps*: a different worker is late each step. With ``catch_up="current"`` also when always the same one is.
    *When it hurts*: ``"first"`` among many workers: almost nothing in a round is fresh, and a large learning rate
    diverges. ``late=1`` and ``grace=0`` with Adam, of which ``attach`` warns: a gradient that is one step old cost a
    small Transformer 11 to 16% of loss at equal samples, and a GPT never got off its plateau (+30%), at any learning
    rate. With momentum it takes a quarter to a half of the rate. ``self_clocked`` and ``wagma(late=1)``, where each
    worker's own step is never late, do not pay that.
    *Suggested settings*: ``wait=0.5, sync="bounded", staleness=20`` at scale. Add ``stale="fade"`` where another worker
    is late each step, but hardly ever ``"drop"`` (docs/late-gradients.md). Under heavy-tailed step times use
    ``wait=0.25`` with ``stale="fade"``, which bears twice the learning rate. That is not for momentum 0.9 with much
    lateness. The paper's own behaviour is ``catch_up="every_step", grace=0``.
    *Departures*: late results are applied in order, each once (``apply="queue"``). Global rounds
    (``catch_up="current"``), hard quorums, the bound and the window are ours.

    Example: ``ob.eager(wait="50%", sync="bounded", staleness=20)``
    """
    whole("per_node", per_node, 1)
    one_of("stale", stale, ("carry", "drop", "fade"))
    codec = sends_all(codec)
    one_of("apply", apply, ("queue", "latest"))
    absent: Absent = "drop" if stale == "drop" else "carry"
    how = rules(
        wait=wait,
        absent=absent,
        full_every=optional("sync_every", sync_every),
        catch_up=catch_up,
        sync=sync,
        staleness=staleness,
        late=late,
        fade=stale == "fade",
        grace=grace,
        spares=apply == "queue",
    )

    async def body(me: Replica) -> None:
        def update(results: list[Got]) -> None:
            for got in results if apply == "queue" else results[-1:]:
                me.step(got.value)

        nodes = Nodes(me.size, per_node)
        partial = Channel(
            "eager",
            topology.everyone(nodes.count),
            how.among(nodes.count),
            update,
            me.sends(codec),
            per_node=per_node,
        )
        await Open(partial, None)
        async for t in me.own_steps(per_node):
            if (g := await own_gradient(me, per_node)) is not None:
                update(await partial.mix(g, t))
        async for got in partial.rest(lambda: None):
            update([got])

    return body
