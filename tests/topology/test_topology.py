"""Claims about mixing matrices and schedules, for every number of workers from 1 to 33 and some beyond."""

import pickle
from typing import Any

import numpy as np
import pytest

from offbeat import topology
from offbeat.basics import draw
from offbeat.topology import Mixing

SIZES = range(1, 34)
FACTORIES = [
    topology.everyone,
    topology.complete,
    topology.ring,
    topology.grid,
    topology.torus,
    topology.hypercube,
    topology.exponential,
    topology.one_peer_exponential,
    topology.groups,
    topology.pairs,
]
every_factory = pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
NAMES = ["ring", "complete", "exponential", "grid", "torus", "hypercube", "one_peer_exponential", "everyone"]


def rounds_of(schedule: topology.Schedule) -> list[Mixing]:
    return [schedule(t) for t in range(schedule.period or 5)]


def block_of(mixing: Mixing, rank: int) -> tuple[int, ...]:
    """Where all mix in blocks."""
    block = mixing.block(rank)
    assert block is not None
    return block


def least_steps(workers: int, group: int) -> int:
    steps = 0
    while group**steps < workers:
        steps += 1
    return steps


def product_from(schedule: topology.Schedule, begin: int, steps: int) -> Any:
    product = np.eye(schedule.size)
    for t in range(begin, begin + steps):
        product = schedule(t).matrix() @ product
    return product


@every_factory
def test_every_schedule_is_doubly_stochastic_for_every_number_of_workers(factory: Any) -> None:
    for workers in SIZES:
        schedule = factory(workers)
        assert schedule.workers == schedule.size == workers
        assert schedule.is_doubly_stochastic()
        assert schedule.is_row_stochastic()
        assert schedule.is_column_stochastic()
        for mixing in rounds_of(schedule):
            w = mixing.matrix()
            np.testing.assert_allclose(w.sum(0), 1, atol=1e-12)
            np.testing.assert_allclose(w.sum(1), 1, atol=1e-12)
            assert (w >= 0).all()


@every_factory
def test_every_schedule_leads_to_the_mean_for_every_number_of_workers(factory: Any) -> None:
    for workers in SIZES:
        schedule = factory(workers)
        assert 0 < schedule.spectral_gap() <= 1 + 1e-9
        spread = np.abs(product_from(schedule, 3, 4000 if workers > 1 else 1) - 1 / workers).max() if workers < 8 else 0
        assert spread < 1e-6


@every_factory
def test_senders_receivers_and_blocks_agree_with_the_matrix(factory: Any) -> None:
    for workers in SIZES:
        for mixing in rounds_of(factory(workers)):
            w = mixing.matrix()
            for i in range(workers):
                others = [j for j in range(workers) if j != i]
                assert mixing.row(i) == {j: w[i, j] for j in range(workers) if w[i, j]}
                assert list(mixing.row(i)) == sorted(mixing.row(i))
                assert mixing.senders(i) == tuple(j for j in others if w[i, j])
                assert mixing.receivers(i) == tuple(j for j in others if w[j, i])
                mine = tuple(np.flatnonzero(w[i]))
                even = all(np.allclose(w[j], np.isin(range(workers), mine) / len(mine), atol=1e-12) for j in mine)
                outside = [j for j in range(workers) if j not in mine]
                assert mixing.block(i) == (mine if even and not w[outside][:, mine].any() else None)


@every_factory
def test_a_schedule_among_some_ranks_leaves_the_others_alone(factory: Any) -> None:
    alive, size = [0, 2, 5, 6, 9], 11
    part, whole = factory(alive, size=size), factory(len(alive))
    assert (part.workers, part.size, part.period) == (5, 11, whole.period)
    assert part.spectral_gap() == pytest.approx(whole.spectral_gap())
    for t in range(6):
        np.testing.assert_array_equal(part(t).matrix()[np.ix_(alive, alive)], whole(t).matrix())
        for rank in set(range(size)) - set(alive):
            assert part(t).row(rank) == {rank: 1.0}
            assert part(t).block(rank) == (rank,)
            assert part(t).receivers(rank) == ()


@every_factory
def test_schedules_repeat_after_their_period_and_survive_pickling(factory: Any) -> None:
    schedule = factory(12)
    copy = pickle.loads(pickle.dumps(schedule))
    for t in range(40):
        assert schedule(t) == copy(t) == factory(12)(t)
        assert hash(schedule(t)) == hash(copy(t))
        assert schedule.period is None or schedule(t) is schedule(t + schedule.period)
    assert schedule.period is None or len({schedule(t) for t in range(40)}) == schedule.period


@every_factory
def test_everything_prints_itself_by_name(factory: Any) -> None:
    for workers in (1, 5, 40):
        schedule = factory(workers)
        assert schedule.name in str(schedule)
        assert str(workers) in str(schedule)
        assert schedule.name in str(schedule(0))
    assert "0.333" in str(topology.ring(4)(0))
    assert "\n" not in str(topology.ring(40)(0))


@every_factory
def test_no_workers_repeated_ranks_and_ranks_that_do_not_fit_are_refused(factory: Any) -> None:
    with pytest.raises(ValueError, match="0 workers cannot mix; use at least 1"):
        factory(0)
    with pytest.raises(ValueError, match="empty"):
        factory([])
    with pytest.raises(ValueError, match="repeat"):
        factory([1, 1, 2])
    with pytest.raises(ValueError, match="do not fit a size of 4"):
        factory([1, 7], size=4)


def test_everyone_averages_all_at_once() -> None:
    for workers in SIZES:
        for factory in (topology.everyone, topology.complete):
            np.testing.assert_array_equal(factory(workers)(7).matrix(), np.full((workers, workers), 1 / workers))
            assert factory(workers)(7).block(0) == tuple(range(workers))


def test_a_ring_takes_a_third_each_and_a_ring_of_two_a_half() -> None:
    assert topology.ring(1)(0).row(0) == {0: 1.0}
    assert topology.ring(2)(0).row(1) == {0: 0.5, 1: 0.5}
    for workers in range(3, 34):
        assert topology.ring(workers)(0).row(0) == pytest.approx({0: 1 / 3, 1: 1 / 3, workers - 1: 1 / 3})
    assert topology.ring(3)(0).block(1) == (0, 1, 2)
    assert topology.ring(4)(0).block(1) is None


def test_the_gap_of_a_ring_is_the_textbook_one() -> None:
    for workers in range(4, 34):
        # The circulant's eigenvalues are (1 + 2 cos(2πk/P)) / 3; for P ≥ 4 the largest below 1 has k = 1.
        expected = 1 - (1 + 2 * np.cos(2 * np.pi / workers)) / 3
        assert topology.ring(workers).spectral_gap() == pytest.approx(expected)
        assert topology.ring(workers)(0).spectral_gap() == pytest.approx(expected)


def test_grid_and_torus_are_as_square_as_the_number_allows() -> None:
    assert topology.grid(12)(0).senders(0) == (1, 4)
    assert topology.grid(12)(0).senders(5) == (1, 4, 6, 9)
    assert topology.torus(12)(0).senders(0) == (1, 3, 4, 8)
    assert topology.grid(7)(0).senders(0) == (1,)
    assert topology.torus(7)(0) == topology.ring(7)(0)


def test_hypercube_neighbours_differ_in_one_bit() -> None:
    for workers in SIZES:
        for i in range(workers):
            expected = sorted(i ^ 1 << k for k in range(6) if i ^ 1 << k < workers)
            assert topology.hypercube(workers)(0).senders(i) == tuple(expected)


def test_the_exponential_graph_joins_ranks_a_power_of_two_apart() -> None:
    assert topology.exponential(16)(0).senders(0) == (1, 2, 4, 8, 12, 14, 15)
    assert topology.exponential(6)(0).senders(0) == (1, 2, 4, 5)


@pytest.mark.parametrize(
    ("workers", "hops"),
    [(1, [0]), (2, [1]), (3, [1, -1]), (5, [1, -1, 2, -2]), (8, [1, -1, 2, -2, 4]), (16, [1, -1, 2, -2, 4, -4, 8])],
)
def test_sgp_sends_a_half_to_its_peers_in_turn(workers: int, hops: list[int]) -> None:
    schedule = topology.one_peer_exponential(workers)
    assert schedule.period == len(hops)
    for t in range(2 * len(hops)):
        for i in range(workers):
            peer = (i + hops[t % len(hops)]) % workers
            assert schedule(t).receivers(i) == ((peer,) if peer != i else ())
            assert schedule(t).row(peer) == ({i: 0.5, peer: 0.5} if peer != i else {i: 1.0})


def test_groups_follow_the_butterfly_of_the_paper() -> None:
    schedule = topology.groups(8, 4)
    assert [{schedule(t).block(p) for p in range(8)} for t in range(3)] == [
        {(0, 1, 2, 3), (4, 5, 6, 7)},
        {(0, 1, 4, 5), (2, 3, 6, 7)},
        {(0, 2, 4, 6), (1, 3, 5, 7)},
    ]
    assert schedule.period == 3


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16, 32, 64])
def test_the_butterfly_is_at_the_exact_mean_after_log_steps_from_any_step(workers: int) -> None:
    for group in (2**m for m in range(1, workers.bit_length()) if 2**m <= workers):
        schedule, steps = topology.groups(workers, group), least_steps(workers, group)
        assert schedule.period is not None
        for begin in range(schedule.period + 1):
            np.testing.assert_allclose(product_from(schedule, begin, steps), 1 / workers, atol=1e-15)
        assert steps == 1 or np.abs(product_from(schedule, 0, steps - 1) - 1 / workers).max() > 1e-3


def test_the_default_group_is_about_the_square_root() -> None:
    sizes = {1: 1, 2: 2, 3: 2, 4: 2, 5: 3, 8: 4, 12: 4, 16: 4, 33: 6, 64: 8, 100: 10, 128: 16, 1024: 32}
    for workers, group in sizes.items():
        mixing = topology.groups(workers)(0)
        assert max(len(block_of(mixing, rank)) for rank in range(workers)) == group


def test_groups_of_any_size_partition_all_workers_evenly() -> None:
    for workers in SIZES:
        for group in range(1, workers + 1):
            for mixing in rounds_of(topology.groups(workers, group)):
                blocks = {block_of(mixing, rank) for rank in range(workers)}
                assert sorted(rank for block in blocks for rank in block) == list(range(workers))
                sizes = [len(block) for block in blocks]
                assert max(sizes) - min(sizes) <= 1
                assert max(sizes) <= group
                assert len(blocks) == -(-workers // group) or (workers & workers - 1 == 0 and group & group - 1 == 0)


@pytest.mark.parametrize("workers", range(2, 65))
def test_what_one_worker_knows_reaches_all_in_about_log_steps_from_any_step(workers: int) -> None:
    for group in range(2, workers + 1):
        schedule = topology.groups(workers, group)
        assert schedule.period is not None
        blocks = [{block_of(schedule(t), rank) for rank in range(workers)} for t in range(schedule.period)]
        for begin in range(schedule.period):
            known = [1 << rank for rank in range(workers)]
            for t in range(begin, begin + least_steps(workers, group) + 1):
                for block in blocks[t % schedule.period]:
                    together = 0
                    for rank in block:
                        together |= known[rank]
                    for rank in block:
                        known[rank] = together
            assert set(known) == {(1 << workers) - 1}, f"group {group} from step {begin}"


@pytest.mark.parametrize("group", [0, -2, 13, 2.5, "4", True])
def test_a_group_that_does_not_fit_is_refused_with_the_way_out(group: int) -> None:
    with pytest.raises(ValueError, match=r"does not fit 12 workers; use a whole number from 1 to 12"):
        topology.groups(12, group)


def test_pairs_are_a_perfect_matching_that_depends_on_seed_and_round_alone() -> None:
    for workers in SIZES:
        one, other = topology.pairs(workers, seed=3), topology.pairs(workers, seed=3)
        for t in (0, 1, 17, 10**6):
            sizes = sorted(len(block) for block in {block_of(one(t), rank) for rank in range(workers)})
            assert sizes == [1] * (workers % 2) + [2] * (workers // 2)
            assert one(t) == other(t)
    assert len({topology.pairs(16, seed=s)(t) for s in range(5) for t in range(5)}) == 25


def test_the_first_half_of_the_drawn_order_meets_the_second() -> None:
    order = draw.permutation(9, 4, 7)
    mixing = topology.pairs(9, seed=4)(7)
    assert [mixing.senders(order[k]) for k in range(9)] == [*((order[(k + 4) % 8],) for k in range(8)), ()]


def test_the_gap_of_random_pairs_is_that_of_their_mean() -> None:
    for workers in (2, 5, 8):
        schedule = topology.pairs(workers, seed=1)
        mean = np.mean([schedule(t).matrix() for t in range(4000)], axis=0)  # pair averages are projections: WᵀW = W
        second = np.sort(np.linalg.eigvalsh((mean + mean.T) / 2))[-2]
        assert schedule.spectral_gap() == pytest.approx(1 - np.sqrt(max(second, 0)), abs=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_goes_by_its_name_and_its_edges_are_those_it_uses(name: str) -> None:
    for workers in SIZES:
        schedule = topology.graph(name, workers)
        assert schedule.name == name
        used = {(min(i, j), max(i, j)) for w in rounds_of(schedule) for i in range(workers) for j in w.senders(i)}
        assert topology.edges(name, workers) == tuple(sorted(used))


def test_a_graph_can_be_given_by_its_edges() -> None:
    star = topology.graph([(0, 1), (2, 0), (0, 3), (3, 0)], 4)
    assert star(0).row(0) == pytest.approx({0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25})
    assert star(0).row(3) == pytest.approx({0: 0.25, 3: 0.75})
    assert star.is_doubly_stochastic()
    assert star.spectral_gap() == pytest.approx(0.25)
    assert topology.graph([], 1)(0).row(0) == {0: 1.0}


def test_when_a_rank_of_the_edges_is_gone_its_neighbours_close_the_gap() -> None:
    line = [(0, 1), (1, 2), (2, 3)]
    assert topology.edges(line, [0, 2, 3], size=4) == ((0, 2), (2, 3))
    assert topology.graph(line, [0, 2, 3], size=4).spectral_gap() > 0


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("rign", "no graph named 'rign'; use one of ring, complete"),
        ([(0, 4)], r"edge \(0, 4\) leaves the ranks 0 … 3"),
        ([(-1, 2)], r"edge \(-1, 2\) leaves the ranks 0 … 3"),
        ([(2, 2)], r"edge \(2, 2\) joins a rank to itself"),
        ([(0, 1), (2, 3)], "ranks 0 and 2 cannot reach each other; add an edge"),
        ([], "ranks 0 and 1 cannot reach each other"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused_with_the_way_out(what: str, sentence: str) -> None:
    for ask in (topology.graph, topology.edges):
        with pytest.raises(ValueError, match=sentence):
            ask(what, 4)


def test_stochasticity_is_checked_and_not_assumed() -> None:
    push = Mixing.from_rows(2, [{0: 0.5}, {0: 0.5, 1: 1.0}])
    assert push.is_column_stochastic()
    assert not push.is_row_stochastic()
    assert not push.is_doubly_stochastic()
    pull = Mixing.from_rows(2, [{0: 0.5, 1: 0.5}, {1: 1.0}])
    assert pull.is_row_stochastic()
    assert not pull.is_column_stochastic()
    assert not pull.is_doubly_stochastic()


def test_an_even_row_is_no_block_while_somebody_outside_takes_from_it() -> None:
    w = Mixing.from_rows(3, [{0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}, {1: 0.5, 2: 0.5}])
    assert [w.block(rank) for rank in range(3)] == [None, None, None]
    assert w.receivers(1) == (0, 2)


def test_blocks_that_overlap_or_leave_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 is in a block twice"):
        Mixing.uniform_blocks(4, [(0, 1), (1, 2)])
    with pytest.raises(ValueError, match="rank 4 is not one of 0 … 3"):
        Mixing.uniform_blocks(4, [(0, 4)])
    with pytest.raises(ValueError, match="takes from rank 2"):
        Mixing.from_rows(2, [{0: 1.0}, {2: 1.0}])


def test_disconnected_blocks_have_no_gap() -> None:
    assert Mixing.uniform_blocks(4, [(0, 1), (2, 3)]).spectral_gap() == pytest.approx(0)
    assert Mixing.uniform_blocks(4, [range(4)]).spectral_gap() == pytest.approx(1)
    assert Mixing.uniform_blocks(1, []).spectral_gap() == 1.0
