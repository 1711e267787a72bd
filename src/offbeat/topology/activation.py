"""How often each matching is on, and how strongly neighbours pull: what MATCHA's plan is solved for.

Apart from :mod:`offbeat.topology.matchings`, which imports it when a plan is made: scipy and the solver take half a
second to import, in every process of a job.
"""

from __future__ import annotations

from collections.abc import Sequence

import clarabel
import numpy as np
from numpy.typing import NDArray
from scipy import linalg, sparse

from offbeat.topology.graphs import Edge

Array = NDArray[np.float64]

_UNITS = 1_000_000  # probabilities are whole millionths
_DENSE = 48  # up to here the whole eigenspace goes to the solver at once
_BATCH = 6  # eigenvectors added in a round beyond that
_CLOSE = 1e-3  # how near to the best λ₂ is near enough beyond that
_WIDEST = 42  # directions that the solver handles within seconds
_ROUNDS = 60  # parabolas for α; a handful is usual


def chosen(matchings: Sequence[Sequence[Edge]], size: int, budget: float) -> tuple[tuple[float, ...], float, float]:
    """The probability of each matching, α, and ρ; a graph in several pieces is refused."""
    laplacians = [_laplacian(matching, size) for matching in matchings]
    if (connected := _smallest(_weighted(laplacians, np.ones(len(matchings))), 1)[0][0]) < 1e-9:
        edges = sum(map(len, matchings))
        raise ValueError(
            f"the graph of {edges} edges on {size} ranks is in several pieces "
            f"(its second eigenvalue is {connected:.1e}); add edges that join them"
        )
    probabilities = _rounded(_probabilities(laplacians, size, budget), budget)
    mean = _weighted(laplacians, probabilities)
    # L_j² = 2 L_j for a matching, hence E[(ΣB_jL_j)²] = L̄² + 2 Σ p_j (1 − p_j) L_j.
    second = mean @ mean + 2 * _weighted(laplacians, probabilities * (1 - probabilities))
    alpha = round(_alpha(mean, second), 9)
    return tuple(map(float, probabilities)), alpha, _rho(mean, second, alpha)[0]


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


def _laplacian(matching: Sequence[Edge], size: int) -> sparse.csr_array:
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
