"""WAGMA-SGD, wait-avoiding group model averaging, after Li et al. (2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from offbeat.method import (
    Absent,
    Axes,
    Body,
    CatchUp,
    Channel,
    Codec,
    Got,
    Nodes,
    Open,
    Paper,
    Replica,
    Vec,
    Wait,
    Window,
    method,
    nothing_lost,
    one_of,
    topology,
    whole,
)
from offbeat.strategies.common import Sync, optional, own_gradient, rules, sends_all
from offbeat.strategies.desloc import MomentsBeside, both_every

PAPER = Paper(
    name="wagma",
    full_name="WAGMA-SGD (wait-avoiding group model averaging)",
    title="Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group Averaging",
    authors="Li, Shigang and Ben-Nun, Tal and Nadiradze, Giorgi and Di Girolamo, Salvatore and Dryden, Nikoli and "
    "Alistarh, Dan and Hoefler, Torsten",
    year=2020,
    venue="IEEE Transactions on Parallel and Distributed Systems",
    arxiv="2005.00124",
    axes=Axes(
        what="weights",
        when="every step; all every τ",
        whom="rotating groups of √P",
        wait="first",
        merge="mean, or (S·mean + own)/(S + 1) if late",
    ),
    laws=(
        "group = P, nobody late, plain SGD: equals allreduce",
        "group = 1: local SGD with period τ",
        "nobody late: exact consensus after ⌈log_S P⌉ gradient-free rounds",
    ),
    confidence="S = √P and τ = 10 from the released code; the S + 1 rule from memory, supported by it",
)


@method(PAPER)
def wagma(
    group: int | None = None,
    tau: int | None = 10,
    wait: str | int | float | Wait = "first",
    merge: Literal["paper", "correct"] = "paper",
    catch_up: CatchUp = "current",
    sync: Sync | None = None,
    staleness: int | None = None,
    late: int = 0,
    grace: Window = 0.0,
    per_node: int = 1,
    codec: Codec | str | None = None,
    moments: int | None = None,
) -> Body:
    """Average weights in rotating groups without waiting, all of them every τ steps.

    After each local step the worker deposits its weights. The first worker of all to arrive starts the round in every
    group. The last deposit of a worker that is still computing answers for it. A worker in time takes the group's mean.
    A late one blends it with its own newer weights: (S · mean + W') / (S + 1). Groups of about √P rotate, so that what
    one worker knows reaches all in ⌈log_S P⌉ rounds. Round v is a full one iff (v + 1) mod ``tau`` = 0.

    ``group``: S, the size of the groups, by default about √P.
    ``tau``: τ, from one full round, for which all wait, to the next; with ``None`` no round is full.
    ``wait``: who starts a round: ``"first"``, ``"majority"``, ``"3 workers"`` or ``"50%"``, as in ``eager``.
    ``merge="paper"``: a late worker blends, as above. ``merge="correct"``: the deposit follows the rounds while its
    worker computes, and the worker adds its step to it. So the mean of all weights is preserved, whoever is late.
    ``catch_up``: as in ``eager``.
    ``sync="bounded"``: a bound replaces the full rounds: nothing older than ``staleness`` rounds is ever averaged in.
    ``staleness``: the bound, by default ``tau``.
    ``late=1``: a round is hidden behind the next step's computation. That implies ``merge="correct"``, and
    ``sync="bounded"`` unless ``sync="barrier"`` is asked for: nothing hides a round that waits for all.
    ``grace``: how long a round that may start waits for others, as in ``eager``, but by default for nobody.
    ``per_node=8``: eight consecutive ranks average their gradients in step, over the fast links inside a machine, and
    are one of the P workers to the groups.
    ``codec``: of messages between nodes. What it loses is given to the next round.
    ``moments=10``: after every tenth round the inner optimiser's moments, such as Adam's, are averaged too, in a round
    of all workers of their own. The last values of the absent answer for them.

    *When it helps*: stragglers that change from step to step, at a scale where one all-reduce a step is too much.
    *When it hurts*: very small τ (everybody waits again) or very large τ (replicas drift). With ``merge="paper"`` the
    mean is not preserved when someone is late. At equal samples, with nobody slow, a Transformer with AdamW ended 4 and
    9 % above DDP's loss with 2 and 4 workers, with ``merge="correct"`` 0.5 and 3 %; one with a plateau 8 %, with
    ``late=1`` 4 % (docs/late-gradients.md). With momentum nothing was lost.
    *Suggested settings*: the defaults; ``wait=0.5, sync="bounded", staleness=20`` at scale, with ``group=8`` or so;
    ``merge="correct"`` with few workers, or with momentum.
    *Departures*: groups fit every number of workers. Global rounds (``catch_up="current"``; the paper's is
    ``"every_step"``), the bound instead of the barrier, and ``merge="correct"``, which preserves the mean, are ours.

    Example: ``ob.wagma(group=8, merge="correct")``
    """
    whole("per_node", per_node, 1)
    optional("group", group)
    codec = sends_all(codec)
    one_of("merge", merge, ("paper", "correct"))
    K = both_every(moments)
    corrects = merge == "correct" or late > 0
    absent: Absent = "shared" if corrects else "last"
    how = rules(
        wait=wait,
        absent=absent,
        full_every=optional("tau", tau),
        catch_up=catch_up,
        sync=sync,
        staleness=staleness,
        late=late,
        grace=grace,
    )

    def channel(me: Replica, apply: Callable[[list[Got]], None], holds: Callable[[], Vec | None]) -> Channel:
        P = Nodes(me.size, per_node).count
        lost = me.recall(lost=nothing_lost(me.x) if me.sends(codec) else None).lost
        Q = None if me.memory.anchor is None else me.sends(codec)
        return Channel("wagma", topology.groups(P, group), how.among(P), apply, Q, holds, per_node, lost)

    def common_beginning(me: Replica) -> Vec | None:
        """Where something is coded. (A run that is resumed on other hosts goes on as it began, and has no other.)"""
        anchor: Vec | None = me.recall(anchor=me.x.clone() if me.sends(codec) else None).anchor
        return anchor

    async def paper(me: Replica) -> None:
        # With a codec the displacement from the common beginning travels. (A nearer anchor, such as the last full
        # average, would be wrong: an absent worker's tray may still hold a displacement from an older one.)
        start = common_beginning(me)

        def mine() -> Vec:
            return me.x if start is None else me.x - start

        def average(results: list[Got]) -> None:
            if not results:
                return
            got = results[-1]
            S, mean = got.count, got.value if start is None else start + got.value
            if S == 1:  # its own weights, or older ones
                return
            if got.fresh or got.full:
                me.x.copy_(mean)
            else:
                me.x.add_(mean, alpha=float(S)).mul_(1.0 / (S + 1))

        partial, moments_too = channel(me, average, mine), MomentsBeside(me, K, per_node)
        await Open(partial, mine())
        await moments_too.open()
        async for t in me.own_steps(per_node):
            me.step(await own_gradient(me, per_node))
            average(await partial.mix(mine(), t))
            await moments_too.averaged(t)
        async for got in partial.rest(mine):  # one without gradients adopts every result
            if got.count > 1:  # a group of one would give it back its own older weights
                me.x.copy_(got.value if start is None else start + got.value)
        await moments_too.rest()

    async def correct(me: Replica) -> None:
        start = common_beginning(me)
        alone = Nodes(me.size, per_node).count == 1

        def adopt(results: list[Got]) -> None:
            if results and not alone:  # nobody else changes what one holds
                me.x.copy_(results[-1].value if start is None else start + results[-1].value)

        partial, moments_too = channel(me, adopt, lambda: None), MomentsBeside(me, K, per_node)
        await Open(partial, me.x if start is None else me.x - start)
        await moments_too.open()
        async for t in me.own_steps(per_node):
            x_hat = partial.keep(me.x)
            me.step(await own_gradient(me, per_node))
            step = x_hat.way_to(me.x)  # x − x̂
            adopt(await partial.mix(step, t))
            await moments_too.averaged(t)
        async for got in partial.rest(lambda: None):
            adopt([got])
        await moments_too.rest()

    body = correct if corrects else paper
    return body
