"""Who mixes with whom: the mixing matrix W_t, and the schedules that give one for every step.

``ring(8)(t)`` is the `Mixing` of step ``t``: row i says what worker i takes from whom, x_i ← Σ_j W_ij x_j. Both can be
printed, asked whether they are doubly stochastic, and asked for their spectral gap. Every schedule works for every
number of workers from 1 up, and for any set of ranks: ``ring([0, 2, 5], size=6)`` mixes among those three and leaves
the others alone, which is what is wanted after a death. A schedule is a pure function of the step: workers that ask
for the same step get the same matrix, without talking.

======================== =========================================================================================
`everyone`, `complete`   the mean of all
`ring`, `grid`, `torus`  neighbours; grid and torus are as square as the number allows (a prime gives a line, a ring)
`hypercube`              ranks that differ in one bit; where P is no power of two, the corners that exist
`exponential`            ranks 1, 2, 4, … away, all at once
`one_peer_exponential`   the same, one peer a step in turn, directed (SGP)
`groups`                 rotating groups (WAGMA): what one worker knows reaches all others in about log_S P steps
`pairs`                  a random matching a round (NoLoCo)
======================== =========================================================================================

Fixed undirected graphs get Metropolis weights, W_ij = 1 / (1 + max(deg i, deg j)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial, wraps
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from offbeat import draw

P = ParamSpec("P")
Edge = tuple[int, int]
Row = tuple[tuple[int, float], ...]
Workers = int | Sequence[int]

_TOLERANCE = 1e-9
_RECENT = 64


# ---------------------------------------------------------------------------------------------------- the matrix W


@dataclass(frozen=True)
class Mixing:
    """One mixing matrix, stored by its rows. Make one with `uniform_blocks`, `from_rows` or `from_edges`.

    ``rows[i]`` holds the pairs (j, W_ij) in ascending j: those that are not zero, and always oneself.
    """

    size: int
    rows: tuple[Row, ...]
    name: str = field(default="mixing", compare=False)

    @classmethod
    def uniform_blocks(cls, size: int, blocks: Iterable[Iterable[int]], name: str = "blocks") -> Mixing:
        """Each block averages within itself; ranks in no block keep what they have."""
        rows: list[Row] = [((rank, 1.0),) for rank in range(size)]
        seen: set[int] = set()
        for members in (sorted(block) for block in blocks):
            row = tuple((rank, 1.0 / len(members)) for rank in members)  # one row, shared by all of the block
            for rank in members:
                _refuse_unless(0 <= rank < size, f"rank {rank} is not one of 0 … {size - 1}; name ranks that exist")
                _refuse_unless(rank not in seen, f"rank {rank} is in a block twice; blocks must not overlap")
                seen.add(rank)
                rows[rank] = row
        return cls(size, tuple(rows), name)

    @classmethod
    def from_rows(cls, size: int, rows: Sequence[Mapping[int, float]], name: str = "rows") -> Mixing:
        """From one mapping {sender: weight} for each rank, whatever the weights are."""
        _refuse_unless(len(rows) == size, f"{len(rows)} rows were given for {size} ranks; give one row a rank")
        for rank, row in enumerate(rows):
            for j in row:
                _refuse_unless(
                    0 <= j < size,
                    f"row {rank} takes from rank {j}, but ranks are 0 … {size - 1}; name ranks that exist",
                )
        kept = ({rank: 0.0} | {j: float(w) for j, w in row.items() if w} for rank, row in enumerate(rows))
        return cls(size, tuple(tuple(sorted(row.items())) for row in kept), name)

    @classmethod
    def from_edges(cls, size: int, edges: Iterable[Edge], name: str = "edges") -> Mixing:
        """Metropolis weights on an undirected graph: symmetric, and doubly stochastic for every graph."""
        links = [set[int]() for _ in range(size)]
        for i, j in _clean(edges, size):
            links[i].add(j)
            links[j].add(i)
        rows = []
        for rank, near in enumerate(links):
            row = {j: 1.0 / (1 + max(len(near), len(links[j]))) for j in near}
            regular = all(len(links[j]) <= len(near) for j in near)
            rows.append(row | {rank: 1.0 / (1 + len(near)) if regular else 1.0 - math.fsum(row.values())})
        return cls.from_rows(size, rows, name)

    def row(self, rank: int) -> Mapping[int, float]:
        """What ``rank`` takes from whom: {j: W[rank, j]}, ascending, itself included."""
        return self._maps[rank]

    def senders(self, rank: int) -> tuple[int, ...]:
        """The others that ``rank`` hears from, ascending."""
        return self._senders[rank]

    def receivers(self, rank: int) -> tuple[int, ...]:
        """The others that hear from ``rank``, ascending."""
        return self._receivers[rank]

    def block(self, rank: int) -> tuple[int, ...] | None:
        """The ranks, itself included, that average evenly among themselves and with nobody else; else None.

        Where there is one, a plain all-reduce among these ranks performs the exchange.
        """
        return self._blocks[rank]

    def matrix(self) -> NDArray[np.float64]:
        """W as a dense array, (size, size)."""
        dense = np.zeros((self.size, self.size))
        for rank, row in enumerate(self.rows):
            for j, weight in row:
                dense[rank, j] = weight
        return dense

    def is_row_stochastic(self) -> bool:
        """Every row sums to 1: workers that agree stay as they are. (MATCHA's own weights may be negative.)"""
        return all(abs(math.fsum(weight for _, weight in row) - 1) <= _TOLERANCE for row in set(self.rows))

    def is_column_stochastic(self) -> bool:
        """Every column sums to 1: the sum over all workers is preserved."""
        sums = [0.0] * self.size
        for row in self.rows:
            for j, weight in row:
                sums[j] += weight
        return all(abs(total - 1) <= _TOLERANCE for total in sums)

    def is_doubly_stochastic(self) -> bool:
        """Both: the mean is preserved, and mixing stops when all agree."""
        return self.is_row_stochastic() and self.is_column_stochastic()

    def spectral_gap(self) -> float:
        """1 − the second largest |eigenvalue|: 1 is the exact mean at once, 0 never gets there."""
        w = self.matrix()
        if self.size == 1:
            return 1.0
        sizes = np.abs(np.linalg.eigvalsh(w) if np.array_equal(w, w.T) else np.linalg.eigvals(w))
        return 1.0 - float(np.sort(sizes)[-2])

    def __str__(self) -> str:
        if self.size > 16:
            degrees = [len(row) - 1 for row in self.rows]
            return f"{self.name}: {self.size} ranks, each mixing with {min(degrees)} to {max(degrees)} others"
        return "\n".join([f"{self.name}: {self.size} ranks", *map(_line, self.matrix())])

    def __reduce__(self) -> tuple[Any, ...]:
        return Mixing, (self.size, self.rows, self.name)  # the read-only views below cannot be pickled

    def __hash__(self) -> int:
        return hash((self.size, self.rows[0], self.rows[-1]))

    @cached_property
    def _maps(self) -> tuple[Mapping[int, float], ...]:
        shared = {id(row): MappingProxyType(dict(row)) for row in self.rows}
        return tuple(shared[id(row)] for row in self.rows)

    @cached_property
    def _senders(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(j for j, weight in row if j != i and weight) for i, row in enumerate(self.rows))

    @cached_property
    def _receivers(self) -> tuple[tuple[int, ...], ...]:
        columns: list[list[int]] = [[] for _ in range(self.size)]
        for rank, senders in enumerate(self._senders):
            for j in senders:
                columns[j].append(rank)
        return tuple(map(tuple, columns))

    @cached_property
    def _blocks(self) -> tuple[tuple[int, ...] | None, ...]:
        # Rows of a block are one shared object where we made them: look at each object once, not at each rank.
        distinct = {id(row): row for row in self.rows}
        even = {key: all(abs(weight * len(row) - 1) <= 1e-12 for _, weight in row) for key, row in distinct.items()}
        support = {key: tuple(j for j, _ in row) if even[key] else None for key, row in distinct.items()}
        takers = [0] * self.size
        for row in self.rows:
            for j, weight in row:
                takers[j] += weight != 0
        mine = [support[id(row)] for row in self.rows]
        found = {
            key: ranks if ranks and all(mine[j] == ranks and takers[j] == len(ranks) for j in ranks) else None
            for key, ranks in support.items()
        }
        return tuple(found[id(row)] for row in self.rows)


# ------------------------------------------------------------------------------------------------------- schedules


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
        return all(w.is_row_stochastic() for w in self._sample())

    def is_column_stochastic(self) -> bool:
        return all(w.is_column_stochastic() for w in self._sample())

    def is_doubly_stochastic(self) -> bool:
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
    members, size = _members(workers, size)
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
    members, size = _members(workers, size)
    p = len(members)
    hops = tuple(dict.fromkeys(h % p for h in _hops(p))) or (0,)
    return Schedule("one_peer_exponential", members, size, len(hops), partial(_one_peer, p, hops))


@_remembered
def groups(workers: Workers, group: int | None = None, *, size: int | None = None) -> Schedule:
    """Rotating groups of ``group`` workers (default about √P), each averaging within itself.

    Where P and the group S are powers of two this is WAGMA's butterfly: from any step on, all replicas are exactly at
    the global mean after ⌈log_S P⌉ steps. For every other number the sizes differ by at most one, none over S, and what
    one worker knows reaches all others about as fast: within ⌈log_S P⌉ + 1 steps (checked for every P up to 64).
    A group of 1 never mixes.
    """
    members, size = _members(workers, size)
    p = len(members)
    if group is None:
        group = 1 << ((p.bit_length()) // 2) if _is_power(p) else math.isqrt(p - 1) + 1
    fits = isinstance(group, int) and not isinstance(group, bool) and 1 <= group <= p
    _refuse_unless(fits, f"a group of {group!r} does not fit {p} workers; use a whole number from 1 to {p}")
    rounds = _butterfly(p, group) if _is_power(p) and _is_power(group) else _rotation(p, group)
    return Schedule(f"groups of {group}", members, size, len(rounds), partial(_blocks_of, p, rounds))


@_remembered
def pairs(workers: Workers, seed: int = 0, *, size: int | None = None) -> Schedule:
    """A random perfect matching a round, drawn from (seed, round); with an odd number, one worker keeps its own."""
    members, size = _members(workers, size)
    return Schedule("pairs", members, size, None, partial(_pairs, len(members), seed))


@_remembered
def graph(name_or_edges: str | Iterable[Edge], workers: Workers, *, size: int | None = None) -> Schedule:
    """The schedule of that name, or the fixed graph of these edges between ranks.

    Ranks of the edges that take no part have their neighbours linked in their stead: what was connected stays so.
    """
    if isinstance(name_or_edges, str):
        return _named(name_or_edges)(workers, size=size)
    members, size = _members(workers, size)
    place = {rank: k for k, rank in enumerate(members)}
    local = [(place[i], place[j]) for i, j in edges(name_or_edges, members, size=size)]
    return Schedule("edges", members, size, 1, partial(_same, Mixing.from_edges(len(members), local)))


def edges(name_or_edges: str | Iterable[Edge], workers: Workers, *, size: int | None = None) -> tuple[Edge, ...]:
    """The undirected edges (i, j), i < j, of a graph by name or by its edges; a graph in several pieces is refused."""
    members, size = _members(workers, size)
    if isinstance(name_or_edges, str):
        _named(name_or_edges)
        return tuple(sorted((members[i], members[j]) for i, j in _EDGES[name_or_edges](len(members))))
    links = {rank: set[int]() for rank in range(size)}
    for i, j in _clean(name_or_edges, size):
        links[i].add(j)
        links[j].add(i)
    for gone in set(range(size)) - set(members):
        near = sorted(links.pop(gone))
        for other in near:
            links[other].discard(gone)
        for i, j in pairwise(near):
            links[i].add(j)
            links[j].add(i)
    reached, frontier = {members[0]}, [members[0]]
    while frontier:
        fresh = links[frontier.pop()] - reached
        reached |= fresh
        frontier += fresh
    if cut := set(members) - reached:
        raise ValueError(
            f"ranks {members[0]} and {min(cut)} cannot reach each other; add an edge that joins their parts"
        )
    return tuple(sorted((i, j) for i in links for j in links[i] if i < j))


# ----------------------------------------------------------------------------------- how each schedule makes its W


def _same(mixing: Mixing, t: int) -> Mixing:
    return mixing


def _blocks_of(p: int, rounds: Sequence[Iterable[Iterable[int]]], t: int) -> Mixing:
    return Mixing.uniform_blocks(p, rounds[t])


def _one_peer(p: int, hops: Sequence[int], t: int) -> Mixing:
    return Mixing.from_rows(p, [{i: 0.5, (i - hops[t]) % p: 0.5} if hops[t] else {i: 1.0} for i in range(p)])


def _pairs(p: int, seed: int, t: int) -> Mixing:
    order, half = draw.permutation(p, seed, t), p // 2
    return Mixing.uniform_blocks(p, zip(order[:half], order[half : 2 * half], strict=True))


def _fixed(name: str, workers: Workers, size: int | None) -> Schedule:
    members, size = _members(workers, size)
    return Schedule(name, members, size, 1, partial(_same, Mixing.from_edges(len(members), _EDGES[name](len(members)))))


def _placed(local: Mixing, members: tuple[int, ...], size: int, name: str) -> Mixing:
    """The matrix among P workers, moved to the ranks they have; everybody else keeps what they have."""
    if members == tuple(range(size)):
        return Mixing(size, local.rows, name)
    rows: list[Row] = [((rank, 1.0),) for rank in range(size)]
    moved = {id(row): tuple((members[j], weight) for j, weight in row) for row in local.rows}
    for rank, row in zip(members, local.rows, strict=True):
        rows[rank] = moved[id(row)]
    return Mixing(size, tuple(rows), name)


def _butterfly(p: int, group: int) -> tuple[list[list[int]], ...]:
    n, m = p.bit_length() - 1, group.bit_length() - 1
    period = n // math.gcd(n, m) if n else 1
    rounds = []
    for t in range(period):
        mask = sum(1 << ((t * m + r) % n) for r in range(m))
        found: dict[int, list[int]] = {}
        for rank in range(p):
            found.setdefault(rank & ~mask, []).append(rank)
        rounds.append(list(found.values()))
    return tuple(rounds)


@lru_cache(maxsize=256)
def _rotation(p: int, group: int) -> tuple[list[list[int]], ...]:
    """Rounds of groups for any P and S, such that every window of about ⌈log_S P⌉ + 1 rounds reaches everybody.

    Lay the workers out in a row and let every n-th form a group (n groups). If what one worker knows is an interval of
    the row, it meets that many groups at once; lay the groups out one after another, and all they know is an interval
    again, S times as long. This is the butterfly without powers of two. It loses a little where the row ends and where
    the rounds begin anew, so candidates that differ in where the row begins are tried until one is seen to be in time.
    """
    if group == 2:
        return _rotating_pairs(p)
    n = -(-p // group)
    least = next(k for k in range(p) if group**k >= p) if group > 1 else 1
    for attempt in range(40):
        rounds = _shuffles(p, n, least, attempt)
        if group == 1 or _all_reached(rounds, p, least + 1):
            return rounds
    return _shuffles(p, n, least, 0)


def _rotating_pairs(p: int) -> tuple[list[list[int]], ...]:
    if p % 2:
        # i meets 2^t − i modulo P. After n rounds it has heard from i + c and from c' − i for 2^(n−1) consecutive c,
        # hence from all after ⌈log₂ P⌉ + 1: with an odd number nothing is faster. Doubling is one-to-one modulo an
        # odd P, so it does not matter at which step one begins.
        period = next(k for k in range(1, p + 1) if pow(2, k, p) == 1)
        turns = [pow(2, t, p) for t in range(period)]
        return tuple([sorted({i, (d - i) % p}) for i in range(p) if i <= (d - i) % p] for d in turns)
    # Knödel's graph: even rank 2j meets the odd one of place j + 2^t − 1.
    half, turns = p // 2, [(1 << t) - 1 for t in range((p - 1).bit_length())]
    return tuple([sorted((2 * j, 2 * ((j + d) % half) + 1)) for j in range(half)] for d in turns)


def _shuffles(p: int, n: int, period: int, attempt: int) -> tuple[list[list[int]], ...]:
    order, rounds = list(range(p)), []
    for t in range(period):
        ends = [sum(p // n + (k < p % n) for k in range(r)) for r in range(n + 1)]
        teams = [order[r::n] if t else order[ends[r] : ends[r + 1]] for r in range(n)]
        rounds.append([sorted(team) for team in teams])
        start = draw.below(p, p, n, period, attempt, t) if attempt else 0
        order = [rank for team in teams for rank in team]
        order = order[start:] + order[:start]
    return tuple(rounds)


def _all_reached(rounds: Sequence[Sequence[Sequence[int]]], p: int, steps: int) -> bool:
    """Whether everybody has heard from everybody after so many rounds, whichever comes first."""
    for begin in range(len(rounds)):
        known = [1 << rank for rank in range(p)]
        for step in range(steps):
            for team in rounds[(begin + step) % len(rounds)]:
                together = 0
                for rank in team:
                    together |= known[rank]
                for rank in team:
                    known[rank] = together
        if any(bits != (1 << p) - 1 for bits in known):
            return False
    return True


# ----------------------------------------------------------------------------------------------- graphs by name


def _hops(p: int) -> list[int]:
    return [sign << k for k in range((p - 1).bit_length()) for sign in (1, -1)]


def _circulant(p: int, hops: Iterable[int]) -> set[Edge]:
    return {(min(i, (i + h) % p), max(i, (i + h) % p)) for i in range(p) for h in hops if h % p}


def _lattice(p: int, wrap: bool) -> set[Edge]:
    rows = next(r for r in range(math.isqrt(p), 0, -1) if p % r == 0)
    cols = p // rows
    found = set()
    for i in range(p):
        r, c = divmod(i, cols)
        right, below = r * cols + (c + 1) % cols, (r + 1) % rows * cols + c
        found |= {(min(i, j), max(i, j)) for j in (right, below) if j > i or (wrap and j < i)}
    return found


_EDGES: Mapping[str, Callable[[int], set[Edge]]] = {
    "ring": lambda p: _circulant(p, (1,)),
    "complete": lambda p: {(i, j) for j in range(p) for i in range(j)},
    "everyone": lambda p: {(i, j) for j in range(p) for i in range(j)},
    "exponential": lambda p: _circulant(p, _hops(p)),
    "one_peer_exponential": lambda p: _circulant(p, _hops(p)),
    "grid": lambda p: _lattice(p, wrap=False),
    "torus": lambda p: _lattice(p, wrap=True),
    "hypercube": lambda p: {(i, i | 1 << k) for i in range(p) for k in range(p.bit_length()) if i < i | 1 << k < p},
}


def _named(name: str) -> Callable[..., Schedule]:
    known = (ring, complete, everyone, exponential, one_peer_exponential, grid, torus, hypercube)
    named = {factory.__name__: factory for factory in known}
    _refuse_unless(
        name in named, f"there is no graph named {name!r}; use one of {', '.join(named)}, or a list of edges"
    )
    return named[name]


# -------------------------------------------------------------------------------------------------- what we refuse


def _refuse_unless(fine: bool, sentence: str) -> None:
    if not fine:
        raise ValueError(sentence)


def _members(workers: Workers, size: int | None) -> tuple[tuple[int, ...], int]:
    if isinstance(workers, int):
        _refuse_unless(workers >= 1, f"{workers} workers cannot mix; use at least 1")
        members = tuple(range(workers))
    else:
        members = tuple(sorted(workers))
        _refuse_unless(bool(members), "an empty list of ranks cannot mix; name at least one rank")
        _refuse_unless(len(set(members)) == len(members), f"the ranks {list(workers)} repeat; name each once")
    total = members[-1] + 1 if size is None else size
    inside = members[0] >= 0 and members[-1] < total
    _refuse_unless(inside, f"the ranks {members[0]} … {members[-1]} do not fit a size of {total}; use 0 … {total - 1}")
    return members, total


def _clean(edges: Iterable[Edge], size: int) -> set[Edge]:
    found = set()
    for i, j in edges:
        _refuse_unless(
            i != j, f"the edge ({i}, {j}) joins a rank to itself; every rank keeps a share of its own anyway"
        )
        inside = min(i, j) >= 0 and max(i, j) < size
        _refuse_unless(inside, f"the edge ({i}, {j}) leaves the ranks 0 … {size - 1}; name ranks that exist")
        found.add((min(i, j), max(i, j)))
    return found


def _is_power(n: int) -> bool:
    return n & (n - 1) == 0


def _line(weights: NDArray[np.float64]) -> str:
    return " ".join(f"{weight:6.3f}" if weight else "     ·" for weight in weights)
