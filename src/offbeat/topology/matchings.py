"""MATCHA's pieces: a graph cut into matchings, each switched on at random, the vital ones more often.

In a matching everybody talks to at most one other, so its exchange takes one message time whatever the graph. MATCHA
switches matching j on with probability p_j, independently at every step, and mixes by W = I − α Σ_j B_j L_j. A budget
of 0.5 halves the communication; p is chosen so that the graph stays as well connected on average as that allows, and
α so that the replicas draw together as fast as they can: ρ = ‖E[WᵀW] − J‖ is smallest.

    >>> made = plan(topology.edges("ring", 8), 8, budget=0.5)
    >>> mixing(made, active(made, seed=0, step=3))

Reference: Wang, Sahu, Yang, Joshi, Kar, "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from offbeat.basics import draw
from offbeat.topology.graphs import Edge
from offbeat.topology.matrix import Mixing

Matching = tuple[Edge, ...]


@dataclass(frozen=True)
class Plan:
    """Which matchings there are, how often each is on, and how strongly neighbours pull (``alpha``).

    ``rho`` is ‖E[WᵀW] − J‖: each step shrinks the expected squared spread of the replicas at least by it.
    """

    matchings: tuple[Matching, ...]
    probabilities: tuple[float, ...]
    alpha: float
    rho: float
    budget: float
    size: int


def plan(edges: Iterable[Edge], size: int, budget: float = 0.5) -> Plan:
    """MATCHA's plan for a connected graph on ranks 0 … size − 1.

    ``budget`` is the expected share of the matchings that are on, in (0, 1]; 1 switches all of them on at every step,
    which is D-PSGD on the whole graph with weights α. Probabilities are rounded to millionths and α to 1e-9, so that
    workers that solve for themselves get the same numbers.
    """
    if not 0 < budget <= 1:
        raise ValueError(f"a budget of {budget!r} is not a share of the matchings; use a number over 0 and up to 1")
    return _plan(tuple(sorted({(min(e), max(e)) for e in edges})), size, float(budget))


@lru_cache(maxsize=32)
def _plan(edges: tuple[Edge, ...], size: int, budget: float) -> Plan:
    matchings = decompose(edges, size)
    if size == 1:
        return Plan((), (), 0.0, 0.0, budget, 1)
    from offbeat.topology.activation import chosen  # a solver and half of scipy, for one method of many

    probabilities, alpha, rho = chosen(matchings, size, budget)
    return Plan(matchings, probabilities, alpha, rho, budget, size)


def active(plan: Plan, seed: int, step: int) -> tuple[bool, ...]:
    """Which matchings are on at this step: the same answer on every rank, without talking."""
    return tuple(draw.uniform(seed, step, j) < p for j, p in enumerate(plan.probabilities))


@lru_cache(maxsize=256)
def mixing(plan: Plan, flags: tuple[bool, ...]) -> Mixing:
    """W = I − α Σ_j B_j L_j, for the matchings that are on. Symmetric; rows and columns sum to 1."""
    if len(flags) != len(plan.matchings):
        raise ValueError(f"{len(flags)} flags were given for {len(plan.matchings)} matchings; give one for each")
    rows: list[dict[int, float]] = [{rank: 1.0} for rank in range(plan.size)]
    for matching, on in zip(plan.matchings, flags, strict=True):
        for i, j in matching if on else ():
            rows[i][j] = rows[j][i] = plan.alpha
            rows[i][i] -= plan.alpha
            rows[j][j] -= plan.alpha
    return Mixing.from_rows(plan.size, rows, "matcha")


# ------------------------------------------------------------------------------------------------------ the matchings


def decompose(edges: Iterable[Edge], size: int) -> tuple[Matching, ...]:
    """Cut a graph into matchings: every edge in exactly one, no rank twice in any.

    At most Δ + 1 of them for a graph of largest degree Δ (Misra and Gries), and exactly Δ where the graph has two sides
    (rings of even length, grids, hypercubes), which no decomposition can beat.
    """
    colouring = _Colouring(sorted({(min(e), max(e)) for e in edges}), size)
    found: dict[int, list[Edge]] = {}
    for edge, colour in sorted(colouring.colours().items()):
        found.setdefault(colour, []).append(edge)
    return tuple(tuple(found[colour]) for colour in sorted(found))


class _Colouring:
    """A proper edge colouring: ``at[i][c]`` is the rank that i meets in colour c."""

    def __init__(self, edges: Sequence[Edge], size: int) -> None:
        self.at: list[dict[int, int]] = [{} for _ in range(size)]
        self.links: list[list[int]] = [[] for _ in range(size)]
        for i, j in edges:
            self.links[i].append(j)
            self.links[j].append(i)
        self.colour_of: dict[Edge, int] = {}
        two_sided = self._two_sided()
        for i, j in edges:
            if two_sided:
                # The path of colours c, d, c, … from j comes to i's side by colour c, which i lacks: it never meets i.
                # So flipping it frees c at j and leaves it free at i.
                c, d = self._free(i), self._free(j)
                self._flip(j, c, d)
                self._paint(i, j, c)
            else:
                self._fan(i, j)

    def colours(self) -> dict[Edge, int]:
        return self.colour_of

    def _fan(self, u: int, v: int) -> None:
        fan = [v]
        while True:  # the longest fan: each edge's colour is free at the rank before it
            following = (
                w
                for w in self.links[u]
                if w not in fan and (k := self._colour(u, w)) is not None and k not in self.at[fan[-1]]
            )
            if (w := next(following, None)) is None:
                break
            fan.append(w)
        c, d = self._free(u), self._free(fan[-1])
        self._flip(u, d, c)
        # The flip may have broken the fan: keep the longest beginning that still is one and ends where d is free.
        end = 0
        for k, w in enumerate(fan):
            if k and ((colour := self._colour(u, w)) is None or colour in self.at[fan[k - 1]]):
                break
            if d not in self.at[w]:
                end = k
                break
        shifted = [self._colour(u, w) for w in fan[1 : end + 1]]
        for w in fan[1 : end + 1]:
            self._clear(u, w)
        for w, colour in zip(fan[:end], shifted, strict=True):
            assert colour is not None
            self._paint(u, w, colour)
        self._paint(u, fan[end], d)

    def _flip(self, begin: int, c: int, d: int) -> None:
        """Swap the colours c and d along the path that leaves ``begin`` by colour c."""
        path, rank, colour = [], begin, c
        while (following := self.at[rank].get(colour)) is not None:
            path.append((rank, following, colour))
            rank, colour = following, c + d - colour
        for i, j, _ in path:
            self._clear(i, j)
        for i, j, old in path:
            self._paint(i, j, c + d - old)

    def _free(self, rank: int) -> int:
        return next(c for c in range(len(self.at[rank]) + 1) if c not in self.at[rank])

    def _colour(self, i: int, j: int) -> int | None:
        return self.colour_of.get((min(i, j), max(i, j)))

    def _paint(self, i: int, j: int, colour: int) -> None:
        self.colour_of[min(i, j), max(i, j)] = colour
        self.at[i][colour], self.at[j][colour] = j, i

    def _clear(self, i: int, j: int) -> None:
        colour = self.colour_of.pop((min(i, j), max(i, j)))
        del self.at[i][colour], self.at[j][colour]

    def _two_sided(self) -> bool:
        side: dict[int, int] = {}
        for start in range(len(self.links)):
            frontier = [start] if side.setdefault(start, 0) == 0 else []
            while frontier:
                rank = frontier.pop()
                for other in self.links[rank]:
                    if other not in side:
                        side[other] = 1 - side[rank]
                        frontier.append(other)
                    elif side[other] == side[rank]:
                        return False
        return True
