"""Claims about MATCHA's matchings, activation probabilities and mixing weights."""

import itertools
import random
from typing import Any

import numpy as np
import pytest

from offbeat import topology
from offbeat.topology import matchings

GRAPHS = ["ring", "complete", "exponential", "grid", "torus", "hypercube"]


def laplacian(edges: Any, size: int) -> Any:
    lap = np.zeros((size, size))
    for i, j in edges:
        lap[[i, j], [i, j]] += 1
        lap[[i, j], [j, i]] -= 1
    return lap


def second_eigenvalue(made: Any, probabilities: Any) -> float:
    mean = sum(p * laplacian(m, made.size) for p, m in zip(probabilities, made.matchings, strict=True))
    return np.linalg.eigvalsh(mean)[1]


def rho_at(made: Any, alpha: float) -> float:
    """‖E[WᵀW] − J‖ by summing over every combination of flags."""
    size, total = made.size, np.zeros((made.size, made.size))
    laps = [laplacian(m, size) for m in made.matchings]
    for flags in itertools.product([0, 1], repeat=len(laps)):
        chance = np.prod([p if on else 1 - p for p, on in zip(made.probabilities, flags, strict=True)])
        w = np.eye(size) - alpha * sum(on * lap for on, lap in zip(flags, laps, strict=True))
        total += chance * w.T @ w
    return np.linalg.eigvalsh(total - 1 / size)[-1]


def assert_is_a_decomposition(found: Any, edges: Any, size: int) -> None:
    assert sorted(edge for matching in found for edge in matching) == sorted(edges)
    for matching in found:
        ranks = [rank for edge in matching for rank in edge]
        assert len(set(ranks)) == len(ranks)
    degrees = [sum(rank in edge for edge in edges) for rank in range(size)]
    assert len(found) <= max(degrees) + 1


@pytest.mark.parametrize("name", GRAPHS)
def test_matchings_are_disjoint_cover_all_edges_and_are_few(name: str) -> None:
    for size in range(1, 34):
        edges = topology.edges(name, size)
        found = matchings.decompose(edges, size)
        assert_is_a_decomposition(found, edges, size)
        assert found == matchings.decompose(reversed(edges), size)


def test_random_graphs_are_cut_into_few_matchings_too() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        size = dice.randint(2, 20)
        edges = [edge for edge in itertools.combinations(range(size), 2) if dice.random() < 0.4]
        assert_is_a_decomposition(matchings.decompose(edges, size), edges, size)


def test_graphs_with_two_sides_need_no_more_matchings_than_their_largest_degree() -> None:
    for size in range(4, 34, 2):
        assert len(matchings.decompose(topology.edges("ring", size), size)) == 2
    assert len(matchings.decompose(topology.edges("hypercube", 16), 16)) == 4
    assert len(matchings.decompose(topology.edges("grid", 25), 25)) == 4


@pytest.mark.parametrize("name", ["ring", "exponential", "grid", "hypercube"])
def test_every_number_of_workers_has_a_plan_that_uses_its_budget_and_converges(name: str) -> None:
    for size in range(1, 34):
        made = matchings.plan(topology.edges(name, size), size, 0.4)
        assert all(0 <= p <= 1 for p in made.probabilities)
        spent, budget = sum(made.probabilities), 0.4 * len(made.matchings)
        assert budget - 2e-6 <= spent <= budget + 1e-9
        assert 0 <= made.rho < 1


@pytest.mark.parametrize("budget", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("edges", [[(0, 1), (0, 2), (0, 3), (3, 4)], [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (4, 5)]])
def test_no_other_probabilities_within_the_budget_connect_the_graph_better(edges: Any, budget: Any) -> None:
    size = 1 + max(map(max, edges))
    made = matchings.plan(edges, size, budget)
    ours, count = second_eigenvalue(made, made.probabilities), len(made.matchings)
    ticks = np.linspace(0, 1, 21)
    seen = 0.0
    for head in itertools.product(ticks, repeat=count - 1):
        if 0 <= (last := budget * count - sum(head)) <= 1:
            seen = max(seen, second_eigenvalue(made, [*head, last]))
    assert seen - 1e-5 <= ours <= seen + 0.05


@pytest.mark.parametrize("name", ["ring", "exponential", "grid"])
@pytest.mark.parametrize("budget", [0.25, 0.6, 1.0])
def test_alpha_makes_rho_smallest_and_rho_is_what_the_flags_give(name: str, budget: Any) -> None:
    made = matchings.plan(topology.edges(name, 7), 7, budget)
    assert rho_at(made, made.alpha) == pytest.approx(made.rho, abs=1e-9)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 1.5):
        assert rho_at(made, made.alpha * factor) >= made.rho - 1e-12


def test_the_mixing_that_is_drawn_has_the_rho_that_was_planned() -> None:
    made = matchings.plan(topology.edges("exponential", 8), 8, 0.5)
    drawn = [matchings.mixing(made, matchings.active(made, 5, step)).matrix() for step in range(6000)]
    mean = np.mean([w.T @ w for w in drawn], axis=0)
    assert np.linalg.eigvalsh(mean - 1 / 8)[-1] == pytest.approx(made.rho, abs=0.02)


def test_flags_come_as_often_as_planned_and_are_alike_everywhere() -> None:
    made = matchings.plan(topology.edges("grid", 12), 12, 0.5)
    flags = [matchings.active(made, 9, step) for step in range(6000)]
    np.testing.assert_allclose(np.mean(flags, axis=0), made.probabilities, atol=0.025)
    assert np.sum(flags) / 6000 == pytest.approx(0.5 * len(made.matchings), rel=0.03)
    assert flags == [matchings.active(made, 9, step) for step in range(6000)]
    assert flags != [matchings.active(made, 10, step) for step in range(6000)]


def test_every_combination_of_flags_mixes_symmetrically_and_keeps_the_mean() -> None:
    made = matchings.plan(topology.edges("torus", 9), 9, 0.3)
    for flags in itertools.product([False, True], repeat=len(made.matchings)):
        mixing = matchings.mixing(made, flags)
        w = mixing.matrix()
        on = [edge for matching, flag in zip(made.matchings, flags, strict=True) if flag for edge in matching]
        np.testing.assert_allclose(w, np.eye(9) - made.alpha * laplacian(on, 9), atol=1e-12)
        np.testing.assert_array_equal(w, w.T)
        assert mixing.is_doubly_stochastic()
    silent = matchings.mixing(made, (False,) * len(made.matchings))
    assert all(silent.block(rank) == (rank,) for rank in range(9))


def test_a_full_budget_is_d_psgd_on_the_whole_graph() -> None:
    for name in GRAPHS:
        edges = topology.edges(name, 10)
        made = matchings.plan(edges, 10, 1)
        assert set(made.probabilities) == {1.0}
        values = np.linalg.eigvalsh(laplacian(edges, 10))
        assert made.alpha == pytest.approx(2 / (values[1] + values[-1]), abs=1e-8)
        assert made.rho == pytest.approx((1 - made.alpha * values[1]) ** 2, abs=1e-8)
        assert matchings.active(made, 0, 0) == (True,) * len(made.matchings)


def test_a_big_graph_is_planned_as_well_as_a_small_one() -> None:
    # Two rings of 30 joined by one edge: the joint is a matching of its own, and an even share is not the best.
    edges = [(k, (k + 1) % 30) for k in range(30)] + [(30 + k, 30 + (k + 1) % 30) for k in range(30)] + [(0, 30)]
    made = matchings.plan(edges, 60, 0.4)
    ours = second_eigenvalue(made, made.probabilities)
    ticks = np.linspace(0, 1, 26)
    seen = max(second_eigenvalue(made, [a, b, 1.2 - a - b]) for a in ticks for b in ticks if 0 <= 1.2 - a - b <= 1)
    assert ours >= 0.999 * seen
    assert ours > 1.05 * second_eigenvalue(made, [0.4] * 3)
    assert sum(made.probabilities) <= 1.2 + 1e-9


def test_one_worker_has_an_empty_plan_that_works() -> None:
    made = matchings.plan((), 1, 0.5)
    assert (made.matchings, made.probabilities, matchings.active(made, 0, 0)) == ((), (), ())
    assert matchings.mixing(made, ()).row(0) == {0: 1.0}


@pytest.mark.parametrize("budget", [0, -0.5, 1.01, float("nan")])
def test_a_budget_that_is_no_share_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match="is not a share of the matchings; use a number over 0 and up to 1"):
        matchings.plan([(0, 1)], 2, budget)


def test_a_graph_in_pieces_and_flags_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="several pieces"):
        matchings.plan([(0, 1), (2, 3)], 4, 0.5)
    with pytest.raises(ValueError, match="2 flags were given for 1 matchings"):
        matchings.mixing(matchings.plan([(0, 1)], 2, 0.5), (True, False))
