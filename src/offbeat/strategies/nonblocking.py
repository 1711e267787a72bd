"""**Non-blocking SGD.** A worker's batch is cut into micro-batches; when the first worker is through its batch it rings
a bell, and the others stop after the micro-batch they are in. The update uses exactly what was finished.

The weights do not change inside a round, so nothing is stale; what was not reached comes first next time, so nothing is
lost. A round lasts as long as the fastest worker's batch and one micro-batch more.

*When it helps*: workers of unequal speed, for good or for a while; batches of uneven cost. The most common real case.
*When it hurts*: very many micro-batches (each has its overhead); non-uniform data, since slow workers count for less.
*Suggested settings*: ``micro=8``; ``micro="auto"`` finds a number; ``stop="auto"`` learns a deadline from the times seen.
*Departures*: the paper's weighting is not confirmed; here each finished sample counts alike (``weighting="samples"``),
which is the gradient of one process on the union of all finished samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from offbeat import matchings, topology
from offbeat.codec import Codec
from offbeat.effects import Batch, Done, Mix
from offbeat.paper import Axes, Paper
from offbeat.replica import Replica
from offbeat.stopping import Stop, Weighting, adapted_micro, learned_deadline_s
from offbeat.strategies.averaging import Gossip, named
from offbeat.strategy import Strategy, between, one_of, whole
from offbeat.topology import Edge, Mixing
from offbeat.vector import Vec, numbers, pack, unpack

PAPER = Paper(
    name="nonblocking",
    full_name="Non-blocking SGD",
    summary="stop computing when the first worker is through its batch; use exactly what was finished",
    title="Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches",
    authors="He, Haoze and Dube, Parijat",
    year=2022,
    venue="arXiv preprint",
    arxiv="2211.00889",
    axes=Axes(
        what="(sum of gradients, count)",
        when="when the bell rings",
        whom="everyone, a server, a graph or matchings",
        wait="one micro-batch",
        merge="sum / count",
    ),
    helps="workers of unequal speed, batches of uneven cost",
    hurts="many micro-batches cost overhead; slow workers' data counts for less",
    laws=(
        "nobody late: large-batch allreduce",
        "micro = 1: allreduce, dpsgd(order='atc') or matcha",
        "every sample is used exactly once",
    ),
    departures="weighting by samples is ours; the paper's is not confirmed",
    confidence="8 micro-batches and the bell from the first author's earlier project",
)


def nonblocking(
    micro: int | Literal["auto"] = 8,
    over: str | tuple[tuple[int, int], ...] = "allreduce",
    stop: str | int | float = "first",
    weighting: Weighting = "samples",
    at_least: int = 1,
    scale_lr: bool = False,
    budget: float = 0.5,
    codec: Codec | None = None,
) -> Strategy:
    """Rounds that end when the bell rings.

    ``over``: "allreduce", "server" (rank 0 updates, then sends the weights), a graph ("ring", …, or edges) or "matcha"
    (with ``budget``). ``stop``: "first" (the bell), a whole number (when so many workers are through), a fraction of a
    second or more as a float (each worker's own deadline), or "auto" (a deadline learned from the times whole batches
    took). ``weighting``: "samples" counts each finished sample alike, "workers" each worker. ``scale_lr`` scales the
    learning rate with the share of all micro-batches that were finished.
    """
    if micro != "auto":
        whole("nonblocking", "micro", micro, 1)
    one_of("nonblocking", "weighting", weighting, ("samples", "workers"))
    whole("nonblocking", "at_least", at_least, 0)
    between("nonblocking", "budget", budget, 0.0, 1.0)
    rule(stop, at_least, [])
    over = over if over in ("allreduce", "server", "matcha") else named(over)

    async def body(me: Replica) -> None:
        P, x, gossip = me.size, me.x, Gossip(codec)
        mem = me.recall(n=8 if micro == "auto" else micro, times=[], used=[0.0] * me.size)
        graph = None if over in ("allreduce", "server") else schedule(over, me, budget)
        async for r in me.steps():
            n = mem.n
            done = await Batch(r, n, rule(stop, min(at_least, n), mem.times))
            if graph is None:
                acc, weight = _share(done, weighting, me)
                A, tally = await _sum(me, acc, Tally.of(me, done, weight), codec)
                f = tally.pieces / (P * n) if scale_lr else 1.0
                if over == "allreduce" or me.rank == 0:
                    me.step(A / tally.weight if tally.weight else None, f)
                if over == "server":
                    x.copy_(await Mix(x, _from_rank_0(P)))
            else:
                if done is not None and done.samples:
                    me.step(done.total / float(done.samples), done.pieces / n if scale_lr else 1.0)
                if (W := graph(r)) is not None:
                    gossip.apply(x, await gossip.ask(x, W))
                _, tally = await _sum(me, None, Tally.of(me, done, 0.0), None)
            mem.used = [a + b for a, b in zip(mem.used, tally.samples, strict=True)]
            if stop == "auto":
                mem.times = [*mem.times, *tally.whole_s][-256:]
            if micro == "auto":
                mem.n = adapted_micro(n, tally.fewest)

    return Strategy(
        PAPER,
        nonblocking,
        {
            "micro": micro,
            "over": over,
            "stop": stop,
            "weighting": weighting,
            "at_least": at_least,
            "scale_lr": scale_lr,
            "budget": budget,
            "codec": codec,
        },
        body,
    )


def rule(stop: str | int | float, at_least: int, times_s: list[float]) -> Stop:
    """The stop rule from its short form."""
    if stop == "first":
        return Stop(1, None, at_least)
    if stop == "auto":
        return Stop(None, learned_deadline_s(times_s), at_least)
    if isinstance(stop, int) and not isinstance(stop, bool) and stop >= 1:
        return Stop(stop, None, at_least)
    if isinstance(stop, float) and stop > 0:
        return Stop(None, stop, at_least)
    raise ValueError(
        f"nonblocking: nobody can stop at {stop!r}; use 'first', 'auto', a number of workers, or seconds as a float"
    )


def schedule(over: str | tuple[Edge, ...], me: Replica, budget: float) -> Callable[[int], Mixing | None]:
    """The mixing of round r, or None if nobody mixes in it."""
    if over != "matcha":
        return topology.graph(over, me.size)
    plan = matchings.plan(topology.edges("ring", me.size), me.size, budget)

    def drawn(r: int) -> Mixing | None:
        B = matchings.active(plan, me.seed, r)
        return matchings.mixing(plan, B) if any(B) else None

    return drawn


@dataclass(frozen=True)
class Tally:
    """Who did how much in a round: Σ of weights; of each worker micro-batches (−1: it has no data), samples, time."""

    weight: float
    done: tuple[float, ...]
    samples: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, me: Replica, done: Done | None, weight: float) -> Tally:
        """One's own line; the sum of all workers' is the tally."""

        def line(value: float) -> tuple[float, ...]:
            return tuple(value if rank == me.rank else 0.0 for rank in range(me.size))

        if done is None:
            return cls(weight, line(-1.0), line(0.0), line(0.0))
        return cls(weight, line(float(done.pieces)), line(float(done.samples)), line(done.whole_s or 0.0))

    @property
    def pieces(self) -> float:
        return sum(m for m in self.done if m > 0)

    @property
    def fewest(self) -> int:
        return int(min((m for m in self.done if m >= 0), default=0))

    @property
    def whole_s(self) -> list[float]:
        """How long whole batches took, of those who did theirs."""
        return [s for s in self.seconds if s > 0]


def _share(done: Done | None, weighting: Weighting, me: Replica) -> tuple[Vec, float]:
    """What one worker adds to the sum, and its weight there."""
    if done is None or not done.samples:
        return me.x.zeros_like(), 0.0
    if weighting == "samples":
        return done.total, float(done.samples)
    return done.total / float(done.samples), 1.0


async def _sum(me: Replica, acc: Vec | None, own: Tally, codec: Codec | None) -> tuple[Vec, Tally]:
    """(Σ acc, the tally), alike on all; one message where no codec is used."""
    P, everyone = me.size, topology.everyone(me.size)(0)
    facts = numbers([own.weight, *own.done, *own.samples, *own.seconds], me.x)
    if acc is None:
        A, line = me.x, await Mix(facts, everyone)
    elif codec is None:
        A, line = unpack(await Mix(pack(acc, facts), everyone), acc, facts)
    else:
        A, line = await Mix(acc, everyone, codec), await Mix(facts, everyone)
    weight, *rest = [P * value for value in line.tolist()]
    counts = tuple(round(m, 6) for m in rest[: 2 * P])
    return A * float(P), Tally(weight, counts[:P], counts[P:], tuple(rest[2 * P :]))


@lru_cache(maxsize=8)
def _from_rank_0(size: int) -> Mixing:
    """Everybody takes rank 0's weights."""
    return Mixing.from_rows(size, [{0: 1.0}] * size, "from rank 0")
