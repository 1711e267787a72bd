"""Self-clocked averaging: the five papers' ideas in one method, which has no period to choose.

Why the defaults are what they are; figures are losses at equal samples or of the studies (`records/tried.md` has more).

- *Pairs of those who have handed in.* A worker that computes is not needed and its line is not used. By a schedule most
  groups would average nothing new, and whoever has learned something is drawn back to older weights.
- *All together, up to 4 workers.* In pairs with a pause a character model ended 5.9 % above all-reduce, all together
  1.2 % below. A quorum of half costs 0.5 to 1.3 points of that, for half of the bytes. *Up to 16 on one host*: one sum
  stands for what eight pairs would make; 16 workers of four speeds lose 28 % on digits, and win 3 % on a Transformer.
- *Pause 1.* After n steps of an exchange n more are taken first: half of the bytes, and each hand-in is worth more.
- *Period 1 beyond 4 workers.* A period of 2 is as good on digits, and worse than the best rival on Fashion-MNIST, on a
  Transformer and with 1,024 workers where messages are cheap.
- *``int8`` between hosts.* The period is the message's, so a quarter of the bytes is four times as many exchanges: to
  the best rival's loss in 0.36 of the time instead of 0.53 to 0.6. It is chosen by the number of hosts, once: measuring
  would let timing decide, and a run that is resumed elsewhere has no common beginning for displacements.
- *Draw 2, with a codec, up to 16 workers.* Two drawn ones that were in no round for longest: +1.5 % over all-reduce
  instead of +3.3 % with one. Among 32 and more, most of those who compute are slow and old (up to 28 % worse).
- *Outer momentum is off.* The push is a movement of the worker's own, made after a result was taken and before the next
  step, and ``before`` are the weights without it, so that it is handed in, also by a worker that stands or rests. So
  the sum of all weights changes by steps and pushes. Without the factor 1 − p/n it is a second momentum (+11 to +21 %).
  A checkpoint holds u, but not where the way began: after a resume the first way is shorter.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
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
    Window,
    checked_window,
    codec,
    method,
    nothing_lost,
    one_of,
    pacing,
    topology,
    whole,
)
from offbeat.strategies.common import fading, own_gradient, quorum, sends_all, whole_or
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
        when="whenever the last exchange is through",
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
        "outer_momentum=0: the sum of all weights and of what coding lost changes only by the workers' own steps; what "
        "was lost last is unpaid at the end: of int8 a level at most, 1/127 of the longest way from the beginning",
        "no exchange takes longer than the period: outer_momentum changes nothing",
        "nobody waits, unless a bound makes it",
    ),
    confidence="a method of this project; its defaults come from a study of three small tasks (docs/choosing.md)",
)

MEASURED = 25  # takings, after which a period by spread begins to move
LOW, HIGH, CAP = 0.7, 1.3, 64
FEW = 4  # workers, whose messages are few: they meet all together
ON_ONE_HOST = 16  # up to so many do where they share memory: there a round of all costs less than many of pairs
HALF, EIGHTH = 0.5, 0.125  # who must have handed in where all meet together, and where groups do
BETWEEN_HOSTS = codec.int8()
DRAWING = 16  # up to so many workers draw others; among more, what is drawn is too often old
SQUARES = 16  # beyond so many workers the newest gradient's own square would show


@method(PAPER)
def self_clocked(
    period: int | Literal["spread"] = 1,
    group: int | Literal["auto"] | None = "auto",
    wait: str | int | float | Wait = "auto",
    late: int = 1,
    meet: Literal["arrived", "all"] = "arrived",
    pause: float | Literal["auto"] = "auto",
    draw: int | Literal["auto"] = "auto",
    staleness: int | None = None,
    grace: Window = 0.0,
    per_node: int = 1,
    codec: Codec | Literal["auto"] | str | None = "auto",
    squares: int | Literal["auto"] = "auto",
    outer_momentum: float = 0.0,
    moments: int | None = None,
) -> Body:
    """Compute; whenever the last exchange is through, hand in what was learned since, and take what came of the others.

    Each worker trains with its own optimiser and its own moments. After a step it looks whether the round that it
    handed in for is over. If so, it hands in how far it has moved since, takes the newest mean of its group, with its
    own movement on top, and goes on; if not, it goes on computing. So the period is not a setting: it is how long an
    exchange takes, on a quick network every step, on a thin one every tenth, and it follows the network as it
    changes. A slow worker hands in as often as its own exchanges end, with fewer steps in each.

    ``period``: the fewest steps between two exchanges, or ``"spread"``: each worker holds its distance from the means
    it takes in proportion to the learning rate, as ``adaptive`` does. ``group``: how many average in a round (``None``:
    everyone, the absent with what they handed in last). Groups are made of those who have handed in, each with others
    that it has not met lately; with ``meet="all"`` they rotate by a schedule over everyone, and what the absent handed
    in last answers for them. ``wait``: a round starts when so many have handed in; ``"first"``, ``"3 workers"``,
    ``"50%"`` or a fraction, which nobody waits for: they compute on. ``pause``: after an exchange during which n steps
    were taken, ``pause`` times n more are taken before the next one, so that with 1 about half of the network's time is
    used. ``draw=2``: where exchanges are so quick that whoever hands in finds nobody else there, it averages with one
    who computes, and then with another; up to four times the bytes, and more is learned from each sample. ``late=0``:
    wait for the round instead of computing on. ``staleness``, with ``meet="all"``: a round waits for whoever would
    otherwise bring something older than so many rounds; ``grace``, likewise: how long a round that may start waits for
    others, as in ``eager``. ``per_node=8``: eight consecutive ranks average their gradients in step and count as one
    worker outside; the ``codec`` is for what travels between nodes, and what it loses is given to the next round. Where
    workers are on several hosts it is ``int8``: a quarter of the bytes, so that four exchanges end in the time of one,
    for two more copies of the weights; on one host, where bytes cost less than coding them, there is none.
    ``squares=4``: where the optimiser is Adam, it divides by the squares that the mean of four workers' gradients would
    have, m² + (v − m²)/4, not by its own, which hold four times the noise; all workers together then learn as fast as
    with Adam on the mean. ``"auto"`` is what suits the number of workers: up to 4 of them, and up to 16 on one host,
    ``group=None, pause=0, wait=0.5``, all together as soon as half have handed in; else ``group=2, pause=1,
    wait=0.125``, and up to 16 of them ``draw=2`` where there is a codec, whose savings pay for it, else 0; and as many
    ``squares`` as workers, up to 16.
    ``outer_momentum=0.4``: where messages take long and some workers are slow for good, a few hundredths of the time
    are saved: as in SlowMo a worker goes on in the direction that it has come, by that share of its way from taking to
    taking and of those before, times 1 − p/n where n steps lie between two takings and the period asks for p. It hands
    that in as its own, and it takes two more copies of the weights.
    ``moments=10``: at every tenth hand-in what the optimiser remembers, such as Adam's moments, is averaged, too, in a
    round of all workers, which is waited for; what the absent handed in last answers for them. Else each keeps its own.

    *When it helps*: nobody knows beforehand who will be late, or how long a message takes.
    *When it hurts*: where all workers are alike and the network is quick, ``allreduce`` learns more from each sample:
    at equal samples the loss of a Transformer was up to 1.7 % higher with 16 workers, 5 % in pairs that do not draw, as
    more than 16 meet; these were not measured (docs/choosing.md). Up to 4 workers send more there than it does.
    *Suggested settings*: the defaults.

    Example: ``ob.self_clocked(group=4)``
    """
    whole_or("period", period, 1, "spread")
    whole_or("group", group, 1, None, "auto")
    whole("per_node", per_node, 1)
    asked = None if wait == "auto" else quorum(wait)
    whole_or("squares", squares, 1, "auto")
    fading(outer_momentum)
    given = sends_all(codec, "auto")
    K = both_every(moments)
    if late not in (0, 1):
        raise ValueError(f"late is {late!r}, but a result can be 0 or 1 rounds late")
    one_of("meet", meet, ("arrived", "all"))
    if pause != "auto" and (isinstance(pause, bool) or not (isinstance(pause, int | float) and 0 <= pause < math.inf)):
        raise ValueError(f"a pause of {pause!r} means nothing; use a number, 0 or more, or 'auto'")
    whole_or("draw", draw, 0, "auto")
    if draw not in (0, "auto") and (meet != "arrived" or group not in (2, "auto")):
        raise ValueError(
            f"draw={draw} makes pairs of one that has arrived and one that computes, but here group={group!r} and "
            f'meet={meet!r}; leave draw out, or use group=2 and meet="arrived"'
        )
    if staleness is not None:
        whole("staleness", staleness, 1 + late)
    about_absent = [f"staleness={staleness}"] if staleness is not None else []
    about_absent += [f"grace={grace!r}"] if checked_window(grace) else []
    if meet == "arrived" and group is not None and about_absent:
        raise ValueError(
            f"{' and '.join(about_absent)} {'is' if len(about_absent) == 1 else 'are'} about those who are absent, "
            f'whom groups of those who have arrived do without; say meet="all", or group=None'
        )

    async def body(me: Replica) -> None:
        nodes = Nodes(me.size, per_node)
        P, mine = nodes.count, nodes.of(me.rank)
        together = P <= FEW or (me.hosts == 1 and P <= ON_ONE_HOST and draw in (0, "auto"))
        least = 1 if period == "spread" else period
        S = (None if together else 2) if group == "auto" else group
        rest = (0.0 if together else 1.0) if pause == "auto" else pause
        all_meet = S is None or S >= P
        needed = quorum(HALF if late and all_meet else EIGHTH) if asked is None else asked
        workers = min(SQUARES if squares == "auto" else squares, P)
        beta = outer_momentum if P > 1 else 0.0
        blocks = topology.everyone(P) if all_meet else topology.groups(P, S)
        coded = me.hosts > 1 if codec == "auto" else me.sends(given) is not None
        mem = me.recall(
            start=me.x.clone() if coded else None,  # with a codec, the displacement from the common beginning travels
            lost=nothing_lost(me.x) if coded else None,
            p=least,
            C2=0.0,
            samples=0,
            steps=0,  # since I last handed in
            u=me.x.zeros_like() if beta else None,  # the outer momentum
        )
        # A run that is resumed on other hosts goes on as it began: they have no common beginning to start from anew.
        Q = None if mem.start is None else BETWEEN_HOSTS if codec == "auto" else given
        sent = me.sends(Q)
        draws = (2 if Q is not None and P <= DRAWING else 0) if draw == "auto" else draw
        # Whatever is handed in counts for the next round, however old the weights it was made with.
        how = Rules(
            needed,
            "shared",
            bound=staleness,
            late=late,
            good_for=math.inf,
            pool=S if meet == "arrived" else None,
            draws=draws if S == 2 and meet == "arrived" else 0,
            grace=checked_window(grace),
        )
        before, moved = me.x, False  # my weights when I last handed in, or came, and whether they have moved since
        left = me.x.clone() if beta else me.x  # my weights when I was last left to myself
        through, took = False, 0  # whether that exchange is over, and the steps that were taken meanwhile

        def since() -> Vec | None:
            """How far I have moved since I handed in; from now on that is handed in."""
            nonlocal moved, through, took
            way = before.way_to(me.x) if moved else None
            moved, mem.steps, through, took = False, 0, False, 0
            return way

        talking = me.reported.talking or Talking()
        me.report(talking=talking, coded=sent.name if sent else "")

        def adopt(results: list[Got]) -> None:
            nonlocal talking
            if results and P > 1:  # nobody else changes what one holds
                ages = {rank: age for rank, age in results[-1].contributors.items() if nodes.of(rank) != mine}
                talking = talking.took(list(ages.values()))
                mean = results[-1].value if Q is None else mem.start + results[-1].value
                if period == "spread":
                    _follow_spread(me, mem, mean)
                me.x.copy_(mean)

        def push(n: int) -> None:
            """After n steps: x = left + d + βu, u = βu + d, where d is the way since I was left to myself."""
            nonlocal moved, before
            before, moved = partial.keep(me.x), True
            ahead = mem.u * (beta * max(0.0, 1.0 - mem.p / n))
            mem.u = ahead + (me.x - left)
            me.x.add_(ahead)
            left.copy_(me.x)

        partial = Channel("self_clocked", blocks, how.among(P), adopt, sent, since, per_node, mem.lost)
        moments_too = MomentsBeside(me, K, per_node)
        await Open(partial, me.x if Q is None else me.x - mem.start)
        await moments_too.open()
        async for t in me.own_steps(per_node):
            if not moved:
                before = partial.keep(me.x)
            me.step(await own_gradient(me, per_node), mean_of=workers)
            moved, mem.steps = True, mem.steps + 1
            through = through or await partial.through(t)
            took += not through
            if through and mem.steps >= max(mem.p, (1 + rest) * took):
                n, way = mem.steps, since()
                assert way is not None
                talking = talking.handed_in()
                results = await partial.mix(way, t)
                adopt(results)
                if results and beta:
                    push(n)
                await moments_too.averaged(t)
            elif not through and mem.steps >= mem.p:
                talking = talking.waiting()
            else:
                talking = talking.stepped()
            me.report(talking=talking)
        async for got in partial.rest(since):
            adopt([got])
        await moments_too.rest()

    return body


def _follow_spread(me: Replica, mem: SimpleNamespace, mean: Vec) -> None:
    """A longer period while I am near the means I take, a shorter one where I am far from them."""
    apart, pace = me.square_norm(mean - me.x).item(), pacing.Pace(mem.p, mem.C2, mem.samples)
    if mem.samples < MEASURED:
        pace = pacing.sampled(pace, apart, me.lr)
    else:
        pace = pacing.adapted(pace, apart, me.lr, LOW, HIGH, CAP)
    mem.p, mem.C2, mem.samples = pace.p, pace.C2, pace.samples
    me.report(period=mem.p)
