"""Self-clocked averaging: the five papers' ideas in one method, which has no period to choose.

Why the defaults are what they are; figures are losses at equal samples or of the studies (`records/tried.md` has more).

- *Pairs of those who have handed in.* A worker that computes is not needed and its line is not used. By a schedule most
  groups would average nothing new, and whoever has learned something is drawn back to older weights.
- *All together, up to 4 workers.* In pairs with a pause a character model ended 5.9 % above all-reduce, all together
  1.2 % below. A quorum of half costs 0.5 to 1.3 points of that, for half of the bytes. *Up to 16 on one host*: one sum
  stands for what eight pairs would make; 16 workers of four speeds lose 28 % on digits, and win 3 % on a Transformer.
- *Pause 1.* After n steps of an exchange n more are taken first: half of the bytes, and each hand-in is worth more.
- *Period 1.* A period of 2 is as good on digits, and worse than the best rival on Fashion-MNIST, on a Transformer and
  with 1,024 workers where messages are cheap. By the spread of the replicas: 11 % lower to 10 % higher.
- *``int8`` between hosts.* The period is the message's, so a quarter of the bytes is four times as many exchanges: to
  the best rival's loss in 0.36 of the time instead of 0.53 to 0.6. It is chosen by the number of hosts, once: measuring
  would let timing decide, and a run that is resumed elsewhere has no common beginning for displacements.
- *Draw 2, with a codec, up to 16 workers.* Two drawn ones that were in no round for longest: +1.5 % over all-reduce
  instead of +3.3 % with one. Among 32 and more, most of those who compute are slow and old (up to 28 % worse).
- *Squares of all, up to 16.* With its own squares Adam ends 2.6 to 2.8 % above all-reduce, with those 0.5 % below.
- *No moments of others.* With them 8 workers of uneven speed ended 1 to 2 % lower, for 43 % more bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from offbeat.method import (
    Axes,
    Body,
    Channel,
    Codec,
    Got,
    Nodes,
    Open,
    Paper,
    Replica,
    Rules,
    Talking,
    Vec,
    Wait,
    codec,
    method,
    nothing_lost,
    topology,
    whole,
)
from offbeat.strategies.common import own_gradient, quorum, sends_all, whole_or
from offbeat.strategies.desloc import MomentsBeside, both_every

PAPER = Paper(
    name="self_clocked",
    full_name="Self-clocked averaging",
    title="Offbeat: Self-clocked Averaging",
    authors="Offbeat contributors",
    year=2026,
    venue="Offbeat",
    axes=Axes(
        what="weights",
        when="whenever the last exchange is complete",
        whom="pairs or groups of those who have handed in, or everyone",
        wait="a quorum",
        late="at the next exchange",
        merge="the mean, with one's own later steps on top",
    ),
    laws=(
        "one worker: plain training bit for bit",
        'everyone, wait="everyone", late=0, codec=None, period H: equals local_sgd(H)',
        "the same with late=1, pause=0, and no exchange longer than the period: DaSGD that keeps the mean "
        '(merge="correct"), with a delay of H, as long as its period',
        "the sum of all weights and of what coding lost changes only by the workers' own steps; what was lost last is "
        "unpaid at the end: of int8 a level at most, 1/127 of the longest way from the beginning",
        "nobody waits, unless late=0 makes it",
    ),
    confidence="a method of this project; its defaults come from a study of three small tasks (docs/study.md)",
)

FEW = 4  # workers, whose messages are few: they meet all together
ON_ONE_HOST = 16  # up to so many do where they share memory: there a round of all costs less than many of pairs
HALF, EIGHTH = 0.5, 0.125  # who must have handed in where all meet together, and where groups do
BETWEEN_HOSTS = codec.int8()
DRAWING = 16  # up to so many workers draw others; among more, what is drawn is too often old
SQUARES = 16  # beyond so many workers the newest gradient's own square would show


@method(PAPER)
def self_clocked(
    period: int = 1,
    group: int | Literal["auto"] | None = "auto",
    wait: str | int | float | Wait = "auto",
    late: int = 1,
    pause: float | Literal["auto"] = "auto",
    draw: int | Literal["auto"] = "auto",
    per_node: int = 1,
    codec: Codec | Literal["auto"] | str | None = "auto",
    squares: int | Literal["auto"] = "auto",
    moments: int | None = None,
) -> Body:
    """Compute on; whenever the last exchange is complete, hand in the steps since, and take the average with others.

    Each worker trains with its own optimiser and its own moments. After a step it checks whether the round that it
    handed in for is over. If so, it hands in how far it has moved since, takes the newest mean of its group, adds its
    own movement, and goes on. If not, it computes on. So the period is the time of an exchange: one step on a quick
    network, ten on a thin one, and it follows the network as that changes. A slow worker hands in as often as its own
    exchanges end, with fewer steps in each.

    ``period``: the fewest steps between two exchanges. ``group``: how many average in a round, of those who have handed
    in, each with others that it has not met lately (``None``: everyone, the absent with what they handed in last).
    ``wait``: a round starts when so many have handed in; ``"first"``, ``"3 workers"``, ``"50%"`` or a fraction.
    Meanwhile the others compute on. ``pause``: after an exchange during which n steps were taken, ``pause`` times n
    more are taken before the next one, so that with 1 about half of the network's time is used. ``draw=2``: if
    exchanges are so quick that a worker finds nobody else there, it averages with one that computes, and then
    with another; up to four times the bytes, and more is learned from each sample. ``late=0``: wait for the round
    instead of computing on. ``per_node=8``: eight consecutive ranks average their gradients in step and count as one
    worker outside. ``codec``: of messages between nodes; the next round gets what it loses. If workers are on several
    hosts it is ``int8``: a quarter of the bytes, so that four exchanges end in the time of one, for two more copies
    of the weights. On one host, where bytes cost less than coding them, there is none.
    ``squares=4``: if the optimiser is Adam, it divides by the squares that the mean of four workers' gradients would
    have, m² + (v − m²)/4, not by its own, which hold four times the noise; all workers together then learn as fast as
    with Adam on the mean. ``moments=10``: at every tenth hand-in the optimiser's state, such as Adam's moments, is
    averaged too, in a round of all workers, for which all wait; the last values of the absent answer for them. By
    default each keeps its own.

    ``"auto"`` suits the number of workers. Up to 4 of them, and up to 16 on one host, use ``group=None, pause=0,
    wait=0.5``: all together as soon as half have handed in. Otherwise it is ``group=2, pause=1, wait=0.125``, for up to
    16 of them with ``draw=2`` where there is a codec, whose savings pay for it. ``squares`` is the number of workers,
    up to 16.

    *When it helps*: nobody knows beforehand who will be late, or how long a message takes.
    *When it hurts*: where all workers are alike and the network is quick, ``allreduce`` learns more from each sample:
    at equal samples the loss of a Transformer was up to 1.7 % higher with 16 workers, 5 % in pairs that do not draw, as
    more than 16 meet; these were not measured (docs/study.md). Up to 4 workers send more there than it does. A GPT
    with AdamW that begins on a plateau stays there longer with old results. At equal samples it ended 8 to 12 % above
    where an exchange takes half a step, 5 and 14 % with 8 and 16 workers of few rows each, and 0.8 % below with 4 and
    free messages. With more than four workers on one host and AdamW, ``eager(stale="drop", sync_every=None)`` ended at
    most 0.6 % above; with SGD or four speeds it was worse than this.
    *Suggested settings*: the defaults.

    Example: ``ob.self_clocked(group=4)``
    """
    whole("period", period, 1)
    whole_or("group", group, 1, None, "auto")
    whole("per_node", per_node, 1)
    asked = None if wait == "auto" else quorum(wait)
    whole_or("squares", squares, 1, "auto")
    given = sends_all(codec, "auto")
    K = both_every(moments)
    if late not in (0, 1):
        raise ValueError(f"late is {late!r}, but a result can be 0 or 1 rounds late")
    if pause != "auto" and (isinstance(pause, bool) or not (isinstance(pause, int | float) and 0 <= pause < math.inf)):
        raise ValueError(f"a pause of {pause!r} means nothing; use a number, 0 or more, or 'auto'")
    whole_or("draw", draw, 0, "auto")
    if draw not in (0, "auto") and group not in (2, "auto"):
        raise ValueError(
            f"draw={draw} makes pairs of one that has arrived and one that computes, but here group={group!r}; leave "
            f"draw out, or use group=2"
        )

    def suited(P: int, hosts: int, is_coded: bool) -> Suited:
        """The settings for so many workers: those that were given, or what is best for so many."""
        together = P <= FEW or (hosts == 1 and P <= ON_ONE_HOST and draw in (0, "auto"))
        S = (None if together else 2) if group == "auto" else group
        all_meet = S is None or S >= P
        drawn = (2 if is_coded and P <= DRAWING else 0) if draw == "auto" else draw
        return Suited(
            S,
            quorum(HALF if late and all_meet else EIGHTH) if asked is None else asked,
            (0.0 if together else 1.0) if pause == "auto" else pause,
            drawn if S == 2 else 0,
            min(SQUARES if squares == "auto" else squares, P),
        )

    async def body(me: Replica) -> None:
        nodes = Nodes(me.size, per_node)
        P = nodes.count
        coded = me.hosts > 1 if codec == "auto" else me.sends(given) is not None
        # With a codec, the displacement from the common beginning travels. A run that is resumed on other hosts goes on
        # as it began: they have no common beginning to start from anew. ``steps``: since I last handed in.
        mem = me.recall(start=me.x.clone() if coded else None, lost=nothing_lost(me.x) if coded else None, steps=0)
        Q = None if mem.start is None else BETWEEN_HOSTS if codec == "auto" else given
        sent, suits = me.sends(Q), suited(P, me.hosts, Q is not None)
        # Whatever is handed in counts for the next round, however old the weights it was made with.
        how = Rules(suits.wait, "shared", late=late, good_for=math.inf, pool=suits.group, draws=suits.draw)
        x_hat, moved = me.x, False  # my weights when I last handed in, or came, and whether they have moved since
        through, took = False, 0  # whether that exchange is over, and the steps that were taken meanwhile

        def way() -> Vec | None:
            """x − x̂, how far I have moved since I handed in; from now on that is handed in."""
            nonlocal moved, through, took
            made = x_hat.way_to(me.x) if moved else None
            moved, mem.steps, through, took = False, 0, False, 0
            return made

        def adopt(results: list[Got]) -> None:
            if results and P > 1:  # nobody else changes what one holds
                newest = results[-1]
                ages = [age for rank, age in newest.contributors.items() if nodes.of(rank) != nodes.of(me.rank)]
                tell(lambda talking: talking.took(ages))
                me.x.copy_(newest.value if Q is None else mem.start + newest.value)

        def tell(told: Callable[[Talking], Talking]) -> None:
            me.report(talking=told(me.reported.talking or Talking()))

        blocks = topology.everyone(P) if suits.group is None or suits.group >= P else topology.groups(P, suits.group)
        partial = Channel("self_clocked", blocks, how.among(P), adopt, sent, way, per_node, mem.lost)
        moments_too = MomentsBeside(me, K, per_node)
        me.report(talking=me.reported.talking or Talking(), coded=sent.name if sent else "")
        await Open(partial, me.x if Q is None else me.x - mem.start)
        await moments_too.open()
        async for t in me.own_steps(per_node):
            if not moved:
                x_hat = partial.keep(me.x)
            me.step(await own_gradient(me, per_node), mean_of=suits.squares)
            moved, mem.steps = True, mem.steps + 1
            through = through or await partial.through(t)
            took += not through
            if through and mem.steps >= max(period, (1 + suits.pause) * took):
                learned = way()
                assert learned is not None
                adopt(await partial.mix(learned, t))
                await moments_too.averaged(t)
                tell(Talking.handed_in)
            else:
                tell(Talking.stepped if through or mem.steps < period else Talking.waiting)
        async for got in partial.rest(way):
            adopt([got])
        await moments_too.rest()

    return body


@dataclass(frozen=True)
class Suited:
    """What is left to choose when the workers are known: how many meet, when, how often, and how far they step."""

    group: int | None
    wait: Wait
    pause: float
    draw: int
    squares: int
