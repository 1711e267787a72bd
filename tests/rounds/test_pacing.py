"""The controller of the averaging period, by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.rounds.pacing import Pace, adapted, sampled, sampling_steps

sizes = st.floats(0, 1e6)


def test_the_yardstick_is_the_mean_of_spread_over_learning_rate() -> None:
    pace = Pace(4)
    for S, lr in ((1.0, 0.5), (3.0, 0.5), (0.4, 0.1)):
        pace = sampled(pace, S, lr)
    assert pace.samples == 3
    assert math.isclose(pace.C2, (2 + 6 + 4) / 3)
    assert pace.p == 4


def test_a_measurement_at_learning_rate_zero_is_left_out() -> None:
    assert sampled(Pace(4, 2.0, 1), 5.0, 0.0) == Pace(4, 2.0, 1)


@pytest.mark.parametrize(
    ("S", "becomes"), [(0.69, 5), (0.71, 4), (1.0, 4), (1.29, 4), (1.31, 3), (0.0, 5), (math.nan, 4), (math.inf, 3)]
)
def test_the_period_grows_when_replicas_are_close_and_shrinks_when_they_are_far(S: float, becomes: Any) -> None:
    assert adapted(Pace(4, C2=10.0, samples=7), S, lr=0.1, low=0.7, high=1.3, cap=64).p == becomes


def test_the_target_falls_with_the_learning_rate() -> None:
    pace = Pace(4, C2=10.0, samples=1)
    assert adapted(pace, 0.05, lr=0.1, low=0.7, high=1.3, cap=64).p == 5
    assert adapted(pace, 0.05, lr=0.001, low=0.7, high=1.3, cap=64).p == 3


def test_the_period_stays_within_one_and_the_cap() -> None:
    assert adapted(Pace(1, 1.0, 1), 9.0, 1.0, 0.7, 1.3, 64).p == 1
    assert adapted(Pace(64, 1.0, 1), 0.0, 1.0, 0.7, 1.3, 64).p == 64


def test_the_period_stays_while_there_is_no_sample() -> None:
    assert adapted(Pace(4), 9.0, 1.0, 0.7, 1.3, 64) == Pace(4)


def test_one_worker_alone_measures_nothing_and_keeps_its_period() -> None:
    assert adapted(sampled(Pace(4), 0.0, 0.1), 0.0, 0.1, 0.7, 1.3, 64).p == 4


@given(sizes, sizes, sizes, st.integers(1, 64), st.integers(0, 5))
def test_the_period_moves_by_one_at_most(S: float, lr: float, C2: float, p: Any, samples: Any) -> None:
    made = adapted(Pace(p, C2, samples), S, lr, 0.7, 1.3, 64)
    assert abs(made.p - p) <= 1
    assert 1 <= made.p <= 64
    assert (made.C2, made.samples) == (C2, samples)


@given(sizes, sizes, sizes, st.integers(1, 64))
def test_thresholds_of_zero_and_infinity_freeze_the_period(S: float, lr: float, C2: float, p: Any) -> None:
    assert adapted(Pace(p, C2, 3), S, lr, 0.0, math.inf, 64).p == p


@pytest.mark.parametrize(
    ("sampling", "horizon", "steps"),
    [(0.25, 400, 100), (1.0, 400, 400), (50, 400, 50), (50, None, 50), (0.25, None, 100), (0, None, 0), (0, 400, 0)],
)
def test_sampling_is_a_share_of_the_run_or_a_number_of_steps(sampling: Any, horizon: int, steps: int) -> None:
    assert sampling_steps(sampling, 4, horizon) == steps
