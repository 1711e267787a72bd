"""Graphs between ranks: their edges, by name or as they are listed, among all workers or those that are left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

Edge = tuple[int, int]
Workers = int | Sequence[int]


def edges(name_or_edges: str | Iterable[Edge], workers: Workers, *, size: int | None = None) -> tuple[Edge, ...]:
    """The undirected edges (i, j), i < j, of a graph by name or by its edges; a graph in several pieces is refused."""
    members, size = members_of(workers, size)
    if isinstance(name_or_edges, str):
        local = by_name(name_or_edges)(len(members))
        return tuple(sorted((members[i], members[j]) for i, j in local))
    links = {rank: set[int]() for rank in range(size)}
    for i, j in clean(name_or_edges, size):
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


def by_name(name: str) -> Callable[[int], set[Edge]]:
    """The rule that makes the edges among P workers; a name that is not known is refused."""
    refuse_unless(
        name in _EDGES, f"there is no graph named {name!r}; use one of {', '.join(_EDGES)}, or a list of edges"
    )
    return _EDGES[name]


def hops(p: int) -> list[int]:
    """+1, −1, +2, −2, +4, … up to all 2^k < P."""
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
    "exponential": lambda p: _circulant(p, hops(p)),
    "one_peer_exponential": lambda p: _circulant(p, hops(p)),
    "grid": lambda p: _lattice(p, wrap=False),
    "torus": lambda p: _lattice(p, wrap=True),
    "hypercube": lambda p: {(i, i | 1 << k) for i in range(p) for k in range(p.bit_length()) if i < i | 1 << k < p},
}


def refuse_unless(fine: bool, sentence: str) -> None:
    """Input that is not ``fine`` is answered with ``sentence``."""
    if not fine:
        raise ValueError(sentence)


def members_of(workers: Workers, size: int | None) -> tuple[tuple[int, ...], int]:
    """The ranks that take part, ascending, and the number of all ranks."""
    if isinstance(workers, int):
        refuse_unless(workers >= 1, f"{workers} workers cannot mix; use at least 1")
        members = tuple(range(workers))
    else:
        members = tuple(sorted(workers))
        refuse_unless(bool(members), "an empty list of ranks cannot mix; name at least one rank")
        refuse_unless(len(set(members)) == len(members), f"the ranks {list(workers)} repeat; name each once")
    total = members[-1] + 1 if size is None else size
    inside = members[0] >= 0 and members[-1] < total
    refuse_unless(inside, f"the ranks {members[0]} … {members[-1]} do not fit a size of {total}; use 0 … {total - 1}")
    return members, total


def clean(edges: Iterable[Edge], size: int) -> set[Edge]:
    """Each edge once, as (i, j) with i < j."""
    found = set()
    for i, j in edges:
        refuse_unless(i != j, f"the edge ({i}, {j}) joins a rank to itself; every rank keeps a share of its own anyway")
        inside = min(i, j) >= 0 and max(i, j) < size
        refuse_unless(inside, f"the edge ({i}, {j}) leaves the ranks 0 … {size - 1}; name ranks that exist")
        found.add((min(i, j), max(i, j)))
    return found
