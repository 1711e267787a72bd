"""Delays: who is late, by how much, and that nobody's asking changes it."""

from __future__ import annotations

import math
import pickle
from itertools import pairwise
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from offbeat import delays

EVERY = [
    delays.random(ranks=2, seconds=0.32),
    delays.constant(0.2),
    delays.constant(0.2, ranks=[3, 1]),
    delays.chronic(rank=2, seconds=0.3),
    delays.rotating(low=0.05, high=0.4),
    delays.stalls(probability=0.3, seconds=0.1),
    delays.exponential(0.1),
    delays.lognormal(0.1, 0.5),
    delays.pareto(0.1, 1.8, cap=20),
    delays.bimodal(0.1, 0.4, 0.2),
    delays.uniform(0.1, 0.2),
    delays.trace([[0.1, 0.2], [0.3, 0.4], [0.0, 0.0]]),
    delays.total(delays.random(ranks=1, seconds=1), 0.5, delays.exponential(0.1)),
]
RANDOM = [EVERY[i] for i in (0, 5, 6, 7, 8, 9, 10, 12)]


def table(spec: delays.Seconds | None, steps: int, workers: int, seed: int = 0) -> list[list[float]]:
    f = delays.bind(spec, seed=seed, workers=workers, what="delays")
    return [[f(step, rank) for rank in range(workers)] for step in range(steps)]


def flat(spec: delays.Seconds) -> list[float]:
    return [seconds for row in table(spec, 500, 20) for seconds in row]


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_a_delay_depends_on_seed_step_and_rank_alone(spec: delays.Distribution) -> None:
    first = table(spec, 30, 8)
    f = delays.bind(spec, seed=0, workers=8, what="delays")
    backwards = [[f(step, rank) for rank in reversed(range(8))][::-1] for step in reversed(range(30))][::-1]
    assert backwards == first
    assert [[spec.draw(0, step, rank, 8) for rank in range(8)] for step in range(30)] == first
    assert table(pickle.loads(pickle.dumps(spec)), 30, 8) == first


@pytest.mark.parametrize("spec", RANDOM, ids=str)
def test_another_seed_draws_otherwise(spec: delays.Distribution) -> None:
    assert table(spec, 30, 8, seed=1) != table(spec, 30, 8, seed=2)


@given(workers=st.integers(1, 40), seed=st.integers(0, 2**40), data=st.data())
def test_as_many_different_ranks_as_asked_are_late_each_step(workers: int, seed: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(0, workers))
    for row in table(delays.random(ranks=ranks, seconds=0.5), 5, workers, seed):
        assert sorted(row) == [0.0] * (workers - ranks) + [0.5] * ranks


def test_random_lateness_strikes_everybody_alike() -> None:
    share = [fmean(column) for column in zip(*table(delays.random(ranks=2, seconds=1), 2000, 8), strict=True)]
    assert all(0.2 < s < 0.3 for s in share)


@pytest.mark.parametrize("workers", [1, 2, 8, 13])
def test_a_rotating_skew_moves_on_by_one_rank_each_step(workers: int) -> None:
    rows = table(delays.rotating(low=0.05, high=0.4), 2 * workers, workers)
    for before, after in pairwise(rows):
        assert before[1:] + before[:1] == after
    even = [0.05 + 0.35 * i / max(workers - 1, 1) for i in range(workers)]
    assert sorted(rows[0]) == pytest.approx(even)


def test_a_chronic_straggler_is_always_late_and_nobody_else_ever() -> None:
    assert table(delays.chronic(rank=2, seconds=0.3), 50, 4) == [[0.0, 0.0, 0.3, 0.0]] * 50
    assert table(delays.constant(0.2, ranks=[1, 3]), 50, 4) == [[0.0, 0.2, 0.0, 0.2]] * 50
    assert table(delays.constant(0.2), 50, 4) == [[0.2] * 4] * 50


def test_distributions_have_the_middle_and_the_spread_they_promise() -> None:
    assert fmean(flat(delays.exponential(0.1))) == pytest.approx(0.1, rel=0.05)
    assert median(flat(delays.exponential(0.1))) == pytest.approx(0.1 * math.log(2), rel=0.05)
    logs = [math.log(x) for x in flat(delays.lognormal(0.1, 0.5))]
    assert median(logs) == pytest.approx(math.log(0.1), abs=0.03)
    assert math.sqrt(fmean((x - fmean(logs)) ** 2 for x in logs[:2000])) == pytest.approx(0.5, rel=0.05)
    assert fmean(flat(delays.uniform(0.1, 0.3))) == pytest.approx(0.2, rel=0.02)
    assert 0.1 <= min(flat(delays.uniform(0.1, 0.3))) <= max(flat(delays.uniform(0.1, 0.3))) < 0.3
    assert fmean(flat(delays.stalls(0.1, 1.0))) == pytest.approx(0.1, abs=0.015)
    assert set(flat(delays.stalls(0.1, 1.0))) == {0.0, 1.0}
    assert fmean(flat(delays.bimodal(1.0, 3.0, 0.25))) == pytest.approx(1.5, rel=0.03)


def test_a_pareto_tail_is_heavy_and_cut_at_the_cap() -> None:
    middle = 0.1 * 2 ** (1 / 1.8)
    drawn = flat(delays.pareto(0.1, 1.8, cap=20))
    assert min(drawn) >= 0.1
    assert median(drawn) == pytest.approx(middle, rel=0.03)
    assert fmean(x > 4 * middle for x in drawn) == pytest.approx(0.5 * 4**-1.8, rel=0.2)
    assert max(drawn) == pytest.approx(20 * middle)
    assert max(flat(delays.pareto(0.1, 0.1, cap=1e9))) < math.inf


def test_a_trace_wraps_round_in_steps_and_ranks() -> None:
    rows = table(delays.trace([[0.1, 0.2], [0.3, 0.4]]), 3, 3)
    assert rows == [[0.1, 0.2, 0.1], [0.3, 0.4, 0.3], [0.1, 0.2, 0.1]]


def test_a_total_adds_numbers_distributions_and_functions() -> None:
    spec = delays.total(0.5, delays.chronic(rank=1, seconds=0.25), lambda step, rank: step)
    assert table(spec, 2, 2) == [[0.5, 0.75], [1.5, 1.75]]
    assert table(delays.total(), 1, 2) == [[0.0, 0.0]]
    assert table(delays.total(EVERY[0]), 5, 8) == table(EVERY[0], 5, 8)


def test_two_parts_of_a_kind_do_not_strike_together() -> None:
    one = delays.stalls(0.5, 1.0)
    assert set(flat(delays.total(one, one))) == {0.0, 1.0, 2.0}


def test_different_kinds_do_not_share_their_draws() -> None:
    pairs = zip(flat(delays.uniform(0, 1)), flat(delays.exponential(1)), strict=True)
    late = [big > math.log(2) for small, big in pairs if small > 0.5]
    assert 0.45 < fmean(late) < 0.55


def test_nothing_numbers_and_functions_bind_too() -> None:
    assert table(None, 2, 2) == [[0.0, 0.0]] * 2
    assert table(3, 1, 2) == [[3.0, 3.0]]
    assert table(lambda step, rank: 10 * step + rank, 2, 2) == [[0, 1], [10, 11]]


@pytest.mark.parametrize("number", [-0.1, math.nan, math.inf, -1])
def test_a_number_that_is_no_time_is_refused_at_once(number: float) -> None:
    with pytest.raises(ValueError, match=r"compute_s is (-0.1|nan|inf|-1); use a finite"):
        delays.bind(number, seed=0, workers=2, what="compute_s")


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, None, "soon"])
def test_a_function_that_returns_no_time_is_named_with_step_and_rank(value: object) -> None:
    f = delays.bind(lambda step, rank: value, seed=0, workers=9, what="delays")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"delays gave {value!r} for step 7, rank 3; use"):
        f(7, 3)


def test_a_distribution_that_returns_no_time_is_named_with_step_and_rank() -> None:
    class Backwards(delays.Distribution):
        def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
            return -1.0

        def __str__(self) -> str:
            return "backwards"

    with pytest.raises(ValueError, match=r"delays gave -1.0 for step 7, rank 3"):
        delays.bind(Backwards(), seed=0, workers=9, what="delays")(7, 3)


WRONG = [
    (lambda: table(delays.random(ranks=5), 1, 4), "5 different ranks cannot be late among 4 workers; use 0 to 4"),
    (lambda: delays.random(ranks=5).draw(0, 0, 0, 4), "5 different ranks"),
    (lambda: delays.bind(delays.total(delays.random(ranks=5)), seed=0, workers=4, what="delays"), "5 different"),
    (lambda: table(delays.chronic(rank=4, seconds=1), 1, 4), "rank 4 cannot be late among 4 workers; use ranks 0 to 3"),
    (lambda: delays.chronic(rank=-1, seconds=1), "rank -1 does not exist"),
    (lambda: delays.random(ranks=-1), "-1 ranks"),
    (lambda: delays.random(ranks=1, seconds=-1), "-1 s is not a time to wait"),
    (lambda: delays.exponential(math.nan), "nan s is not"),
    (lambda: delays.rotating(low=0.4, high=0.1), "runs backwards"),
    (lambda: delays.uniform(0.4, 0.1), "runs backwards"),
    (lambda: delays.stalls(1.5), "1.5 is not a probability"),
    (lambda: delays.lognormal(0.1, -1), "sigma of -1"),
    (lambda: delays.pareto(0.1, 0), "alpha of 0"),
    (lambda: delays.pareto(0.1, 2, cap=0.5), "cap of 0.5"),
    (lambda: delays.trace([]), "a trace has no seconds"),
    (lambda: delays.trace([[0.1], []]), "a trace has no seconds"),
    (lambda: delays.trace([[0.1], [-2.0]]), "a trace gave -2.0 for step 1, rank 0"),
    (lambda: delays.trace([[0.1, None]]), "a trace gave None for step 0, rank 1; use a finite number"),  # type: ignore[list-item]
    (lambda: delays.trace([[0.1, "soon"]]), "a trace gave 'soon' for step 0, rank 1"),  # type: ignore[list-item]
    (lambda: delays.trace([1.0]), r"step 0 of a trace is 1.0; give a row with one number a rank: \[\[0.31, 0.29\]"),  # type: ignore[list-item]
    (lambda: delays.trace(None), "a NoneType is no measurement; give a table of seconds, .* CSV file"),  # type: ignore[arg-type]
    (
        lambda: delays.trace(SGD(nn.Linear(1, 1).parameters())),  # type: ignore[arg-type]
        "a SGD is no measurement; .* an attached optimiser after its finish",
    ),
    (lambda: delays.trace("."), "the trace . is a folder; name a CSV file, or let a command read it: --compute ."),
    (lambda: delays.constant("1s"), "'1s' is no number of seconds; use one, such as 0.32, or delays.parse"),  # type: ignore[arg-type]
    (lambda: delays.bind("320ms", seed=0, workers=2, what="delays"), "delays is '320ms'; .*delays.parse"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_mistakes_are_answered_with_a_sentence(wrong: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", None),
        ("2 ranks 320ms", delays.random(ranks=2, seconds=0.32)),
        ("1 rank 0.3 s", delays.random(ranks=1, seconds=0.3)),
        ("rank 3 30ms", delays.chronic(rank=3, seconds=0.03)),
        ("ranks 1,3 30ms", delays.constant(0.03, ranks=[1, 3])),
        ("ranks 3, 1 30ms", delays.constant(0.03, ranks=[1, 3])),
        ("10% 100ms", delays.stalls(0.1, 0.1)),
        ("50ms..400ms rotating", delays.rotating(low=0.05, high=0.4)),
        ("exponential 100ms", delays.exponential(0.1)),
        ("lognormal 100ms 0.5", delays.lognormal(0.1, 0.5)),
        ("pareto 100ms 1.8", delays.pareto(0.1, 1.8)),
        ("  2   Ranks 50µs + 10% 2min ", delays.total(delays.random(2, 50e-6), delays.stalls(0.1, 120))),
    ],
)
def test_phrases_mean_delays(text: str, spec: delays.Distribution | None) -> None:
    assert delays.parse(text) == spec


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("often", "the delay 'often' is not understood; use none, '2 ranks 320ms', 'rank 3 30ms'"),
        ("", "the delay '' is not understood"),
        ("2 ranks", "not understood"),
        ("2 ranks 320", "the delay '2 ranks 320' cannot be used: '320' has no unit; write 320ms or 320s"),
        ("rank 3 30", "'30' has no unit; write 30ms or 30s"),
        ("10% 1.5 + rank 3 30ms", "'1.5' has no unit; write 1.5ms or 1.5s"),
        ("50..400ms rotating", "'50' has no unit"),
        ("50ms .. 400 rotating", "'400' has no unit"),
        ("exponential 100", "'100' has no unit"),
        ("lognormal 100 0.5", "'100' has no unit"),
        ("pareto 100 1.8", "'100' has no unit"),
        ("bytedance-se 300", "'300' has no unit"),
        ("2 ranks 320ms +", "not understood"),
        ("none + 2 ranks 320ms", "not understood"),
        ("2 ranks -5ms", "the delay '2 ranks -5ms' cannot be used: -0.005 s is not a time to wait"),
        ("-2 ranks 5ms", "-2 ranks"),
        ("exponential -1s", "-1.0 s is not"),
        ("110% 5ms", "1.1 is not a probability"),
        ("400ms..50ms rotating", "runs backwards"),
    ],
)
def test_unclear_phrases_are_answered_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        delays.parse(text)


def test_delays_say_what_they_are_in_words() -> None:
    assert [str(spec) for spec in EVERY] == [
        "2 random ranks a step late by 320 ms",
        "every rank 200 ms",
        "ranks 1, 3 always late by 200 ms",
        "rank 2 always late by 300 ms",
        "50 ms to 400 ms, rotating over the ranks",
        "30% of steps late by 100 ms",
        "exponential with mean 100 ms",
        "log-normal with median 100 ms, sigma 0.5",
        "Pareto from 100 ms, alpha 1.8, cut at 20 medians",
        "100 ms, but 400 ms in 20% of steps",
        "uniform from 100 ms to 200 ms",
        "a trace of 3 steps of 2 ranks",
        "1 random rank a step late by 1 s + every rank 500 ms + exponential with mean 100 ms",
    ]
