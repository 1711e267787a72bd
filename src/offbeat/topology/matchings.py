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

import clarabel
import numpy as np
from numpy.typing import NDArray
from scipy import linalg, sparse

from offbeat.basics import draw
from offbeat.topology.graphs import Edge
from offbeat.topology.matrix import Mixing

Matching = tuple[Edge, ...]
Array = NDArray[np.float64]

_UNITS = 1_000_000  # probabilities are whole millionths
_DENSE = 48  # up to here the whole eigenspace goes to the solver at once
_BATCH = 6  # eigenvectors added in a round beyond that
_CLOSE = 1e-3  # how near to the best λ₂ is near enough beyond that
_WIDEST = 42  # directions that the solver handles within seconds
_ROUNDS = 60  # parabolas for α; a handful is usual


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
    laplacians = [_laplacian(matching, size) for matching in matchings]
    if (connected := _smallest(_weighted(laplacians, np.ones(len(matchings))), 1)[0][0]) < 1e-9:
        raise ValueError(
            f"the graph of {len(edges)} edges on {size} ranks is in several pieces "
            f"(its second eigenvalue is {connected:.1e}); add edges that join them"
        )
    probabilities = _rounded(_probabilities(laplacians, size, budget), budget)
    mean = _weighted(laplacians, probabilities)
    # L_j² = 2 L_j for a matching, hence E[(ΣB_jL_j)²] = L̄² + 2 Σ p_j (1 − p_j) L_j.
    second = mean @ mean + 2 * _weighted(laplacians, probabilities * (1 - probabilities))
    alpha = round(_alpha(mean, second), 9)
    return Plan(matchings, tuple(map(float, probabilities)), alpha, _rho(mean, second, alpha)[0], budget, size)


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


# -------------------------------------------------------------------------------------------------- probabilities and α


def _probabilities(laplacians: Sequence[sparse.csr_array], size: int, budget: float) -> Array:
    """max λ₂(Σ p_j L_j) over 0 ≤ p ≤ 1, Σ p = budget · M.

    λ₂ ≥ s means VᵀL(p)V ⪰ s·I for an orthonormal V that spans what is orthogonal to 1. For a big graph V holds only the
    directions in which some p so far was weak: an optimistic problem, which ends when the optimist is nearly right.
    """
    if budget == 1 or len(laplacians) == 1:
        return np.full(len(laplacians), budget)
    p = np.full(len(laplacians), budget)
    if size <= _DENSE:
        return _solve(laplacians, linalg.null_space(np.ones((1, size))), budget)[0]
    values, v = _smallest(_weighted(laplacians, p), 2 * _BATCH)
    best = values[0], p
    while v.shape[1] <= _WIDEST:
        p, bound = _solve(laplacians, v, budget)
        values, vectors = _smallest(_weighted(laplacians, p), _BATCH)
        if values[0] > best[0]:
            best = values[0], p
        if bound - best[0] <= _CLOSE * bound:
            break
        fresh = vectors - v @ (v.T @ vectors)
        basis, weights, _ = linalg.svd(fresh, full_matrices=False)
        v = linalg.qr(np.hstack([v, basis[:, weights > 1e-7]]), mode="economic")[0]
    return best[1]


def _solve(laplacians: Sequence[sparse.csr_array], v: Array, budget: float) -> tuple[Array, float]:
    m, r = len(laplacians), v.shape[1]
    upper = [(i, j) for j in range(r) for i in range(j + 1)]  # the solver's order: the upper triangle by columns
    rows, cols = np.array(upper).T
    scale = np.where(rows == cols, 1.0, np.sqrt(2.0))
    pressed = np.stack([(v.T @ (lap @ v))[rows, cols] * scale for lap in laplacians], axis=1)
    identity = (rows == cols).astype(float)[:, None]
    ones, eye = np.ones((1, m)), np.eye(m)
    # Unknowns (p, s), minimise −s; A x + slack = b with the slack in: {0}, p ≥ 0, 1 − p ≥ 0, VᵀLV − sI ⪰ 0.
    a = np.block(
        [[ones, np.zeros((1, 1))], [-eye, np.zeros((m, 1))], [eye, np.zeros((m, 1))], [-pressed, identity]],
    )
    b = np.concatenate([[budget * m], np.zeros(m), np.ones(m), np.zeros(len(upper))])
    cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(2 * m), clarabel.PSDTriangleConeT(r)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_threads = 1
    aim = np.zeros(m + 1)
    aim[-1] = -1
    nothing = sparse.csc_matrix((m + 1, m + 1))
    found = clarabel.DefaultSolver(nothing, aim, sparse.csc_matrix(a), b, cones, settings).solve()
    x = np.asarray(found.x)
    if not np.all(np.isfinite(x)):
        raise RuntimeError(f"the solver gave up on the activation probabilities ({found.status}); try another budget")
    return np.clip(x[:m], 0, 1), float(x[-1])


def _rounded(p: Array, budget: float) -> Array:
    """Whole millionths that use up the budget and never exceed it."""
    units = np.rint(p * _UNITS).astype(int)
    spare = int(np.floor(budget * len(p) * _UNITS + 1e-6)) - int(units.sum())
    step = 1 if spare > 0 else -1
    while spare:
        for j in range(len(p)):
            if spare and 0 <= units[j] + step <= _UNITS:
                units[j] += step
                spare -= step
    return np.asarray(units / _UNITS)


def _alpha(mean: Array, second: Array) -> float:
    """argmin over a of λ_max(I − 2aL̄ + a²(L̄² + 2L̃) − J).

    Every unit vector gives a parabola below that function: those of the leading eigenvectors seen so far pin it down.
    """
    a = 1.0 / float(np.max(np.diag(mean)) + 1e-300)
    slopes, bends = np.empty(0), np.empty(0)
    best = np.inf, a
    for _ in range(_ROUNDS):
        value, v = _rho(mean, second, a)
        best = min(best, (value, a))
        slopes = np.append(slopes, v @ mean @ v)
        bends = np.append(bends, v @ second @ v)
        a, bound = _lowest(slopes, bends)
        if best[0] - bound <= 1e-13:
            break
    return float(best[1])


def _lowest(slopes: Array, bends: Array) -> tuple[float, float]:
    """The lowest point of the upper envelope of the parabolas 1 − 2a·slope + a²·bend: a bottom, or a crossing."""
    crossings = 2 * (slopes[:, None] - slopes) / np.where(bends[:, None] == bends, np.inf, bends[:, None] - bends)
    candidates = np.concatenate([slopes / bends, crossings[crossings > 0]])
    heights = np.max(1 - 2 * candidates[:, None] * slopes + candidates[:, None] ** 2 * bends, axis=1)
    k = int(np.argmin(heights))
    return float(candidates[k]), float(heights[k])


def _rho(mean: Array, second: Array, a: float) -> tuple[float, Array]:
    n = len(mean)
    values, vectors = linalg.eigh(np.eye(n) - 2 * a * mean + a * a * second - 1.0 / n, subset_by_index=[n - 1, n - 1])
    return float(values[0]), np.asarray(vectors[:, 0])


def _smallest(laplacian: Array, count: int) -> tuple[Array, Array]:
    """The smallest eigenvalues on what is orthogonal to 1, with their vectors."""
    n = len(laplacian)
    lifted = laplacian + (2.0 * float(np.trace(laplacian)) + 1.0) / n  # 1 goes to the far end
    values, vectors = linalg.eigh(lifted, subset_by_index=[0, min(count, n - 1) - 1])
    return np.asarray(values), np.asarray(vectors)


def _laplacian(matching: Matching, size: int) -> sparse.csr_array:
    i, j = np.array(matching).T
    one = np.ones(len(matching))
    data = np.concatenate([one, one, -one, -one])
    where = np.concatenate([i, j, i, j]), np.concatenate([i, j, j, i])
    return sparse.csr_array((data, where), shape=(size, size))


def _weighted(laplacians: Sequence[sparse.csr_array], p: Array) -> Array:
    total = np.zeros(laplacians[0].shape)
    for weight, laplacian in zip(p, laplacians, strict=True):
        total += weight * laplacian.toarray()
    return total
