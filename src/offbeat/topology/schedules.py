"""Schedules: a pure function of the step that gives a mixing matrix, for every number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from typing import ParamSpec

import numpy as np

from offbeat.topology import graphs, rotations
from offbeat.topology.graphs import Edge, Workers, edges, members_of, refuse_unless
from offbeat.topology.hierarchy import Nodes
from offbeat.topology.matrix import Mixing, Row

P = ParamSpec("P")

_RECENT = 64


def _remembered(make: Callable[P, Schedule]) -> Callable[P, Schedule]:
    """Every worker of a simulation asks for the same schedule: make it once. (Lists of ranks are not remembered.)"""
    made = lru_cache(maxsize=256)(make)

    @wraps(make)
    def ask(*args: P.args, **kwargs: P.kwargs) -> Schedule:
        try:
            return made(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError:  # something that cannot be hashed, or wrong arguments: their own error is clearer
            return make(*args, **kwargs)

    return ask


@dataclass(frozen=True)
class Schedule:
    """A mixing matrix for every step: ``schedule(t)``. It repeats after ``period`` steps (None: it never does)."""

    name: str
    members: tuple[int, ...]
    size: int
    period: int | None
    rule: Callable[[int], Mixing] = field(repr=False)
    _made: dict[int, Mixing] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def workers(self) -> int:
        """How many take part."""
        return len(self.members)

    def __call__(self, t: int) -> Mixing:
        key = t if self.period is None else t % self.period
        if (made := self._made.get(key)) is None:
            if self.period is None and len(self._made) >= _RECENT:
                self._made.clear()
            self._made[key] = made = _placed(self.rule(key), self.members, self.size, self.name)
        return made

    def is_row_stochastic(self) -> bool:
        """Whether every step's matrix is."""
        return all(w.is_row_stochastic() for w in self._sample())

    def is_column_stochastic(self) -> bool:
        """Whether every step's matrix is."""
        return all(w.is_column_stochastic() for w in self._sample())

    def is_doubly_stochastic(self) -> bool:
        """Whether every step's matrix is."""
        return all(w.is_doubly_stochastic() for w in self._sample())

    def spectral_gap(self) -> float:
        """1 − the factor by which one step shrinks the spread among those who take part, over a whole period.

        The factor is σ₂(W_{K−1} … W_0)^(1/K), the second largest singular value of the product over the period K; for
        a fixed symmetric W this is 1 − |λ₂|. For random pairs it is the root of λ₂ of E[WᵀW], known in closed form.
        """
        p = self.workers
        if p == 1:
            return 1.0
        if self.period is None:
            return 1.0 - math.sqrt(0.5 if p % 2 else (p - 2) / (2 * (p - 1)))
        product = np.eye(p)
        for t in range(self.period):
            product = self.rule(t).matrix() @ product
        second = float(np.linalg.svd(product - 1.0 / p, compute_uv=False)[0])  # the mean is taken out: σ₂ is first
        return 1.0 if second < 1e-12 else 1.0 - second ** (1.0 / self.period)

    def __str__(self) -> str:
        turns = {None: "never repeats", 1: "fixed"}.get(self.period, f"repeats after {self.period} steps")
        shown = [str(self(t)) for t in range(self.period or 1)] if self.size <= 16 and (self.period or 1) <= 8 else []
        return "\n".join([f"{self.name} of {self.workers} workers, {turns}", *shown])

    def _sample(self) -> list[Mixing]:
        return [self(t) for t in range(self.period or _RECENT)]


@_remembered
def everyone(workers: Workers, *, size: int | None = None) -> Schedule:
    """The mean of all, every step."""
    members, size = members_of(workers, size)
    whole = Mixing.uniform_blocks(len(members), [range(len(members))])
    return Schedule("everyone", members, size, 1, partial(_same, whole))


@_remembered
def complete(workers: Workers, *, size: int | None = None) -> Schedule:
    """The complete graph: the same matrix as `everyone`."""
    made = everyone(workers, size=size)
    return Schedule("complete", made.members, made.size, 1, made.rule)


@_remembered
def ring(workers: Workers, *, size: int | None = None) -> Schedule:
    """Oneself and both neighbours, a third each (two workers: a half each)."""
    return _fixed("ring", workers, size)


@_remembered
def grid(workers: Workers, *, size: int | None = None) -> Schedule:
    """A grid as square as the number of workers allows: 12 gives 3 × 4, a prime gives a line."""
    return _fixed("grid", workers, size)


@_remembered
def torus(workers: Workers, *, size: int | None = None) -> Schedule:
    """The grid with its borders joined: 12 gives 3 × 4, a prime gives a ring."""
    return _fixed("torus", workers, size)


@_remembered
def hypercube(workers: Workers, *, size: int | None = None) -> Schedule:
    """Ranks that differ in one bit. Without all 2^n corners it still is connected, a little less evenly."""
    return _fixed("hypercube", workers, size)


@_remembered
def exponential(workers: Workers, *, size: int | None = None) -> Schedule:
    """The static exponential graph: i and i ± 2^k modulo P, for all 2^k < P."""
    return _fixed("exponential", workers, size)


@_remembered
def one_peer_exponential(workers: Workers, *, size: int | None = None) -> Schedule:
    """SGP's graph: at step t everyone keeps a half and sends a half to the peer i + hop, hop = +1, −1, +2, −2, +4, …

    Hops are modulo P, repeats and oneself dropped: 8 workers take +1 −1 +2 −2 +4 in turn.
    """
    members, size = members_of(workers, size)
    p = len(members)
    hops = tuple(dict.fromkeys(h % p for h in graphs.hops(p))) or (0,)
    return Schedule("one_peer_exponential", members, size, len(hops), partial(_one_peer, p, hops))


@_remembered
def groups(workers: Workers, group: int | None = None, *, size: int | None = None) -> Schedule:
    """Rotating groups of ``group`` workers (default about √P), each averaging within itself.

    Where P and the group S are powers of two this is WAGMA's butterfly: from any step on, all replicas are exactly at
    the global mean after ⌈log_S P⌉ steps. For every other number the sizes differ by at most one, none over S, and what
    one worker knows reaches all others about as fast: within ⌈log_S P⌉ + 1 steps (checked for every P up to 64).
    A group of 1 never mixes.
    """
    members, size = members_of(workers, size)
    p = len(members)
    if group is None:
        group = rotations.usual_group(p)
    fits = isinstance(group, int) and not isinstance(group, bool) and 1 <= group <= p
    refuse_unless(fits, f"a group of {group!r} does not fit {p} workers; use a whole number from 1 to {p}")
    rounds = rotations.rounds(p, group)
    return Schedule(f"groups of {group}", members, size, len(rounds), partial(_blocks_of, p, rounds))


@_remembered
def nodes(workers: int, per_node: int) -> Schedule:
    """Consecutive ranks in nodes of ``per_node``, each averaging within itself, and with nobody else ever."""
    parts = Nodes(workers, per_node)
    blocks = [parts.ranks(node) for node in range(parts.count)]
    inside = Mixing.uniform_blocks(workers, blocks)
    return Schedule(f"nodes of {per_node}", tuple(range(workers)), workers, 1, partial(_same, inside))


@_remembered
def pairs(workers: Workers, seed: int = 0, *, size: int | None = None) -> Schedule:
    """A random perfect matching a round, drawn from (seed, round); with an odd number, one worker keeps its own."""
    members, size = members_of(workers, size)
    return Schedule("pairs", members, size, None, partial(_pairs, len(members), seed))


@_remembered
def graph(name_or_edges: str | Iterable[Edge], workers: Workers, *, size: int | None = None) -> Schedule:
    """The schedule of that name, or the fixed graph of these edges between ranks.

    Ranks of the edges that take no part have their neighbours linked in their stead: what was connected stays so.
    """
    if isinstance(name_or_edges, str):
        graphs.by_name(name_or_edges)  # refuses a name that it does not know
        return _NAMED[name_or_edges](workers, size=size)
    members, size = members_of(workers, size)
    place = {rank: k for k, rank in enumerate(members)}
    local = [(place[i], place[j]) for i, j in edges(name_or_edges, members, size=size)]
    return Schedule("edges", members, size, 1, partial(_same, Mixing.from_edges(len(members), local)))


_NAMED: Mapping[str, Callable[..., Schedule]] = {
    factory.__name__: factory
    for factory in (ring, complete, everyone, exponential, one_peer_exponential, grid, torus, hypercube)
}


# ----------------------------------------------------------------------------------- how each schedule makes its W


def _same(mixing: Mixing, t: int) -> Mixing:
    return mixing


def _blocks_of(p: int, rounds: Sequence[Iterable[Iterable[int]]], t: int) -> Mixing:
    return Mixing.uniform_blocks(p, rounds[t])


def _one_peer(p: int, hops: Sequence[int], t: int) -> Mixing:
    return Mixing.from_rows(p, [{i: 0.5, (i - hops[t]) % p: 0.5} if hops[t] else {i: 1.0} for i in range(p)])


def _pairs(p: int, seed: int, t: int) -> Mixing:
    return Mixing.uniform_blocks(p, rotations.matching(p, seed, t))


def _fixed(name: str, workers: Workers, size: int | None) -> Schedule:
    members, size = members_of(workers, size)
    W = Mixing.from_edges(len(members), graphs.by_name(name)(len(members)))
    return Schedule(name, members, size, 1, partial(_same, W))


def _placed(local: Mixing, members: tuple[int, ...], size: int, name: str) -> Mixing:
    """The matrix among P workers, moved to the ranks they have; everybody else keeps what they have."""
    if members == tuple(range(size)):
        return Mixing(size, local.rows, name)
    rows: list[Row] = [((rank, 1.0),) for rank in range(size)]
    moved = {id(row): tuple((members[j], weight) for j, weight in row) for row in local.rows}
    for rank, row in zip(members, local.rows, strict=True):
        rows[rank] = moved[id(row)]
    return Mixing(size, tuple(rows), name)
