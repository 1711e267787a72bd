"""Non-blocking SGD, after He and Dube (2022)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from offbeat.method import (
    Axes,
    Batch,
    Body,
    Codec,
    Done,
    Edge,
    Facts,
    Mix,
    Mixing,
    Paper,
    Replica,
    Stop,
    Vec,
    Weighting,
    between,
    matchings,
    method,
    one_of,
    pack,
    topology,
    units,
    unpack,
    whole,
)
from offbeat.method import micro as cutting
from offbeat.strategies.averaging import Gossip, Underway, named
from offbeat.strategies.common import sends_all, whole_or

PAPER = Paper(
    name="nonblocking",
    full_name="Non-blocking SGD",
    title="Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches",
    authors="He, Haoze and Dube, Parijat",
    year=2022,
    venue="arXiv preprint arXiv:2211.00889",
    arxiv="2211.00889",
    axes=Axes(
        what="(sum of gradients, count)",
        when="when the bell rings",
        whom="everyone, a server, a graph or matchings",
        wait="one micro-batch",
        merge="sum / count",
    ),
    laws=(
        "nobody late: large-batch allreduce",
        "micro = 1: allreduce, dpsgd(order='atc') or matcha",
        "every sample is used exactly once",
    ),
    confidence="8 micro-batches and the bell from the first author's earlier project",
)


def facts(over: object, **others: object) -> Facts:
    """Along a graph a worker meets its neighbours; only the tally goes to all, and nobody waits for it."""
    everyone = over in ("allreduce", "server")
    return Facts(meets="everyone" if everyone else "others", waits_where_it_begins=everyone, cuts_batches=True)


@method(PAPER, facts)
def nonblocking(
    micro: int | Literal["auto"] = 8,
    over: str | Iterable[Edge] = "allreduce",
    stop: str | int | float = "first",
    weighting: Weighting = "samples",
    at_least: int = 1,
    scale_lr: bool = False,
    budget: float = 0.5,
    codec: Codec | str | None = None,
) -> Body:
    """Stop computing when the first worker is through its batch; use exactly what was finished.

    A worker's batch is cut into micro-batches. The first worker that is through its batch rings a bell, and the others
    stop after the micro-batch that they are in. The weights do not change inside a round, so nothing is stale. Samples
    that were not reached come first next time, so nothing is lost. A round lasts as long as the fastest worker's batch
    and one micro-batch more.

    ``micro``: how many micro-batches a batch is cut into. ``micro="auto"``: 8 at first; a worker that is usually
    stopped cuts its own batches finer, up to 64, until it does 16 in a round.
    ``over``: ``"allreduce"``; ``"server"`` (rank 0 updates, then sends the weights); a graph (``"ring"``, …, or edges);
    or ``"matcha"``. ``budget``: that of ``"matcha"``.
    ``stop``: ``"first"`` (the bell), ``"3 workers"`` (when so many are through), ``"250ms"`` (each worker's own
    deadline), or ``"auto"`` (a deadline learned from the times whole batches take). A whole number is short for
    workers, a float for seconds.
    ``weighting``: ``"samples"`` counts each finished sample alike, ``"workers"`` each worker.
    ``at_least``: how many micro-batches a worker does in any case.
    ``scale_lr``: whether the learning rate is scaled with the share of all micro-batches that were finished.

    *When it helps*: workers of unequal speed, for good or for a while; batches of uneven cost. The most common real
    case.
    *When it hurts*: very many micro-batches, since each has its overhead; non-uniform data, since slow workers count
    for less.
    *Suggested settings*: ``micro="auto"`` where one worker is several times slower than the others, who wait for one of
    its micro-batches at most; else 8. If every worker has a share of the data of its own, let it be endless, and count
    epochs by ``sum(optimizer.samples_used)``: a fixed share lasts as long as the slowest worker needs for it.
    *Departures*: the paper's weighting is not confirmed. Here each finished sample counts alike
    (``weighting="samples"``), which is the gradient of one process on the union of all finished samples.

    Example: ``ob.nonblocking(micro="auto", over="ring", stop="2 workers")``
    """
    whole_or("micro", micro, 1, "auto")
    one_of("weighting", weighting, ("samples", "workers"))
    whole("at_least", at_least, 0)
    codec = sends_all(codec)
    between("budget", budget, 0.0, 1.0)
    if over == "matcha" and budget == 0:
        raise ValueError("over='matcha' with a budget of 0 never mixes; use a number over 0 and up to 1")
    ending = meant(stop)
    whom = over if isinstance(over, str) and over in ("allreduce", "server", "matcha") else named(over)

    async def body(me: Replica) -> None:
        P, x, gossip = me.size, me.x, Gossip(me.sends(codec))
        if isinstance(ending, int) and ending > P:
            raise ValueError(f"nonblocking: the bell waits for {ending} workers, but there are {P}; use stop=1 to {P}")
        mem = me.recall(n=cutting.USUAL_PIECES if micro == "auto" else micro, did=[], whole=[], times=[], used=[0] * P)
        me.report(micro_batches=mem.n, samples_used=mem.used)
        graph = None if whom in ("allreduce", "server") else schedule(whom, me, budget)
        news = Underway(me, topology.everyone(P)(0), None)  # along a graph, the tally of a round comes a round later
        await news.resume()
        first = me.t  # its times are those of warming up

        def count(samples: Sequence[int]) -> None:
            mem.used = [a + b for a, b in zip(mem.used, samples, strict=True)]
            me.report(samples_used=mem.used)

        def learn(tally: Tally) -> None:
            if ending == "auto" and me.t > first:
                mem.times = [*mem.times, *tally.whole_s][-8 * max(P, 8) :]

        def adapt(done: Done | None) -> None:
            if micro == "auto" and done is not None and done.of:
                mem.did, mem.whole = [*mem.did, done.pieces], [*mem.whole, done.of]
                if len(mem.did) == cutting.ROUNDS_TO_ADAPT:
                    mem.n = cutting.adapted_micro(mem.n, list(zip(mem.did, mem.whole, strict=True)))
                    me.report(micro_batches=mem.n)
                    mem.did, mem.whole = [], []

        async def hear() -> None:
            if news.sent is not None:
                mixed = await news.finish()
                tally = Tally.read(mixed, P, averaged(mixed, P))
                count([0 if rank == me.rank else k for rank, k in enumerate(tally.samples)])
                learn(tally)

        async for r in me.steps():
            n = mem.n
            done = await Batch(r, n, rule(ending, min(at_least, n), mem.times))
            own = Tally.of(me, done)
            adapt(done)
            if graph is None:
                acc, weight = _share(done, weighting, me)
                A, W, tally = await _sum(me, acc, weight, own, me.sends(codec), whom == "server")
                if whom == "allreduce" or me.rank == 0:
                    me.step(A / W if W else None, tally.share if scale_lr else 1.0)
                tally = await _served(me, tally) if whom == "server" else tally
                count(tally.samples)
                learn(tally)
            else:
                if done is not None and done.samples:
                    me.step(done.total / float(done.samples), done.pieces / done.of if scale_lr else 1.0)
                if (M := graph(r)) is not None:
                    gossip.apply(x, await gossip.ask(x, M))
                await hear()
                count(own.samples)
                await news.begin(own.line())
        await hear()

    return body


Ending = int | float | Literal["first", "auto"]  # so many workers, so many seconds


def meant(stop: str | int | float) -> Ending:
    """What ``stop`` says, in numbers."""
    sentence = f"nobody can stop at {stop!r}; use 'first', 'auto', a number of workers, '3 workers', or a time, '250ms'"
    if isinstance(stop, str):
        if stop == "first":
            return "first"
        if stop == "auto":
            return "auto"
        try:
            stop = units.parse_number_of(stop, "worker") if "worker" in stop else units.parse_seconds(stop)
        except ValueError:
            raise ValueError(sentence) from None
    if isinstance(stop, bool) or not stop > 0:
        raise ValueError(sentence)
    return stop


def rule(ending: Ending, at_least: int, times_s: list[float]) -> Stop:
    """The rule of a round; ``times_s`` are those that whole batches took."""
    if ending == "first":
        return Stop(1, None, at_least)
    if ending == "auto":
        return Stop(None, cutting.learned_deadline_s(times_s), at_least)
    return Stop(ending, None, at_least) if isinstance(ending, int) else Stop(None, ending, at_least)


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
    """Who did how much in a round: of each worker the share of its batch, its samples, and its time (-1: none)."""

    shares: tuple[float, ...]
    samples: tuple[int, ...]
    seconds: tuple[float, ...]
    count: int = 1  # of so many workers

    @classmethod
    def of(cls, me: Replica, done: Done | None) -> Tally:
        """One's own entries; the sum of all workers' is the tally."""
        before, after = (0,) * me.rank, (0,) * (me.size - me.rank - 1)
        if done is None:
            return cls((0.0,) * me.size, (0,) * me.size, (*before, -1.0, *after))
        share = done.pieces / done.of if done.of else 0.0
        return cls((*before, share, *after), (*before, done.samples, *after), (*before, done.whole_s or -1.0, *after))

    def line(self, *more: float) -> Vec:
        """As a vector to be mixed. Never a phantom: what it decides is decided in a simulation of time alone, too."""
        return Vec((torch.tensor([*self.shares, *self.samples, *self.seconds, *more], dtype=torch.float64),))

    @staticmethod
    def read(line: Vec, P: int, times: int = 1) -> Tally:
        """Of ``P`` workers, from a mixed vector: ``times`` its numbers, which is how many it is the mean of."""
        values = [times * value for value in line.tolist()]
        shares = tuple(round(value, 9) for value in values[:P])  # a mean of P, times P, may round
        return Tally(shares, tuple(round(value) for value in values[P : 2 * P]), tuple(values[2 * P : 3 * P]), times)

    @property
    def share(self) -> float:
        """Of the batches of all who came."""
        return sum(self.shares) / self.count

    @property
    def whole_s(self) -> list[float]:
        """How long whole batches took, or would have taken."""
        return [s for s in self.seconds if s > 0]


def _share(done: Done | None, weighting: Weighting, me: Replica) -> tuple[Vec, float]:
    """What one worker adds to the sum, and its weight there."""
    if done is None or not done.samples:
        return me.x.zeros_like(), 0.0
    if weighting == "samples":
        return done.total, float(done.samples)
    return done.total / float(done.samples), 1.0


async def _sum(
    me: Replica, acc: Vec, weight: float, own: Tally, codec: Codec | None, to_server: bool
) -> tuple[Vec, float, Tally]:
    """(Σ acc, Σ weight, the tally) for all, or for rank 0 alone; one message where no codec is used."""
    P = me.size
    W = _to_rank_0(P) if to_server else topology.everyone(P)(0)
    facts = own.line(weight, *_uses(me, acc, weight))
    if codec is None:
        A, line = unpack(await Mix(pack(acc, facts), W), acc, facts)
    else:
        A, line = await Mix(acc, W, codec), await Mix(facts, W)
    weights, *counts = line.tolist()[3 * P :]
    A.used = tuple(count > 0 for count in counts) or None
    return A * float(P), P * weights, Tally.read(line, P, P if to_server else averaged(line, P))


def averaged(mean: Vec, P: int) -> int:
    """How many tallies a mean is of: fewer than ``P`` where some have died, who say nothing of their time."""
    return sum(value != 0 for value in mean.tolist()[2 * P : 3 * P])


def _uses(me: Replica, acc: Vec, weight: float) -> list[bool]:
    """Which parameters one worker's share has gradients for; nothing where that is not known."""
    return list(acc.used or [True] * me.parameters) if weight else [False] * me.parameters


async def _served(me: Replica, tally: Tally) -> Tally:
    """Everybody takes rank 0's weights, and its tally."""
    line = tally.line()
    x, line = unpack(await Mix(pack(me.x, line), _from_rank_0(me.size)), me.x, line)
    me.x.copy_(x)
    return Tally.read(line, me.size)


@lru_cache(maxsize=8)
def _to_rank_0(size: int) -> Mixing:
    """Rank 0 gets the mean of all; the others keep what they have."""
    return Mixing.from_rows(size, [dict.fromkeys(range(size), 1.0 / size), *({r: 1.0} for r in range(1, size))], "to 0")


@lru_cache(maxsize=8)
def _from_rank_0(size: int) -> Mixing:
    """Everybody takes rank 0's."""
    return Mixing.from_rows(size, [{0: 1.0}] * size, "from 0")
