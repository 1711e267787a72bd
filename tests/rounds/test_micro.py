"""Where batches are cut and when a worker stops: pure functions of non-blocking SGD."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.rounds.micro import (
    MOST_PIECES,
    Leftover,
    Stop,
    Supply,
    adapted_micro,
    cuts,
    cuts_by_cost,
    learned_deadline_s,
)

# Where batches are cut.


@given(st.integers(1, 300), st.integers(1, 80))
def test_cuts_cover_all_rows_in_order_as_equally_as_possible(rows: int, micro: int) -> None:
    runs = cuts(rows, micro)
    assert [row for lo, hi in runs for row in range(lo, hi)] == list(range(rows))
    sizes = [hi - lo for lo, hi in runs]
    assert len(runs) == min(rows, micro)
    assert max(sizes) - min(sizes) <= 1


def test_nothing_is_cut_into_nothing() -> None:
    assert cuts(0, 8) == []
    assert cuts_by_cost([], 8) == []


COSTS = st.lists(st.floats(0, 1e6) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=80)


@given(COSTS, st.integers(1, 40))
def test_cuts_by_cost_cover_all_rows_in_order_and_none_is_empty(costs: list[float], micro: int) -> None:
    runs = cuts_by_cost(costs, micro)
    assert [row for lo, hi in runs for row in range(lo, hi)] == list(range(len(costs)))
    assert len(runs) == min(len(costs), micro)
    assert all(lo < hi for lo, hi in runs)


@given(st.lists(st.floats(1, 10), min_size=32, max_size=64), st.integers(1, 6))
def test_cuts_by_cost_cost_about_the_same(costs: list[float], micro: int) -> None:
    spent = [sum(costs[lo:hi]) for lo, hi in cuts_by_cost(costs, micro)]
    assert max(spent) - sum(costs) / micro <= 1.01 * max(costs)


def test_a_dear_sample_gets_a_micro_batch_of_its_own() -> None:
    assert cuts_by_cost([100.0, 1, 1, 1, 1], 2) == [(0, 1), (1, 5)]
    assert cuts_by_cost([1.0, 1, 1, 1, 100], 2) == [(0, 4), (4, 5)]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_cost_that_is_no_cost_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="a sample cannot cost"):
        cuts_by_cost([1.0, bad], 2)


@given(st.integers(1, 60), st.lists(st.integers(1, 20), min_size=1, max_size=60), st.booleans())
def test_however_the_number_of_pieces_changes_a_batch_is_handed_out_once_and_in_order(
    rows: int, micros: list[int], by_cost: bool
) -> None:
    rest = Leftover(rows, [float(k % 3 + 1) for k in range(rows)] if by_cost else None)
    seen: list[int] = []
    for micro in itertools.cycle(micros):
        left = rest.pieces(micro)
        lo, hi = rest.first(micro)
        seen += range(lo, hi)
        rest.lo = hi
        assert rest.pieces(micro) == left - 1
        if not rest.left:
            break
    assert seen == list(range(rows))


def supply(*rows: int) -> Supply:
    waiting = Supply()
    for count in rows:
        waiting.add(count)
    return waiting


def test_a_batch_of_few_samples_makes_a_round_by_itself() -> None:
    two, one, none = supply(3, 64), supply(64), supply()
    assert [s.quota(8) for s in (two, one, none)] == [3, 8, 0]
    assert two.pieces(8) == 11


# When to stop.


@given(st.integers(0, 10), st.integers(0, 10), st.booleans(), st.floats(0, 2), st.integers(0, 4))
def test_a_worker_goes_on_until_at_least_and_never_beyond_its_batch(
    done: int, whole: int, rung: bool, elapsed_s: float, at_least: int
) -> None:
    over = Stop(1, 1.0, at_least).is_over(done, whole, rung, elapsed_s)
    if done >= whole:
        assert over
    elif done < at_least:
        assert not over
    else:
        assert over == (rung or elapsed_s >= 1.0)


def test_a_deadline_is_learned_only_from_times() -> None:
    assert learned_deadline_s([]) is None


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=50))
def test_at_least_half_of_the_workers_keep_a_learned_deadline(times: list[float]) -> None:
    deadline = learned_deadline_s(times)
    assert deadline is not None
    assert 2 * sum(t <= deadline for t in times) >= len(times)


@given(st.lists(st.floats(0.9, 1.1), min_size=3, max_size=20), st.floats(2, 1000))
def test_a_minority_that_is_slow_does_not_move_a_learned_deadline_far(usual: list[float], slow: float) -> None:
    times = usual + [slow] * (len(usual) // 2 - (len(usual) % 2 == 0))
    deadline = learned_deadline_s(times)
    assert deadline is not None
    assert deadline < 2


@given(st.floats(1.2, 40), st.sampled_from([8, 16, 32, 64]))
def test_a_slow_worker_cuts_finer_until_it_does_16_pieces_in_a_round_and_rests_there(factor: float, start: Any) -> None:
    seen = [start]
    for _ in range(12):
        n = seen[-1]
        seen.append(adapted_micro(n, [(max(1, math.floor(n / factor)), n)] * 5))
    assert seen[-1] == seen[-2]
    if math.floor(seen[-1] / factor) <= 0.75 * seen[-1]:
        assert seen[-1] == MOST_PIECES or math.floor(seen[-1] / factor) >= 16


def test_a_worker_that_is_in_time_or_stalls_once_does_not_cut_finer() -> None:
    assert adapted_micro(8, [(8, 8)] * 5) == 8
    assert adapted_micro(8, [(7, 8)] * 5) == 8  # the bell rings in its last piece
    assert adapted_micro(8, [(8, 8), (8, 8), (1, 8), (8, 8), (8, 8)]) == 8
    assert adapted_micro(4, [(4, 4)] * 5) == 4
    assert adapted_micro(64, [(64, 64)] * 5) == 32
    assert adapted_micro(16, [(8, 8)] * 5) == 8  # a batch of 8 samples, all of them done
