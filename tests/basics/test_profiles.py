"""Profiles of measured stragglers say what the measurements say; so do files and runs of one's own."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, pstdev, quantiles

import pytest

import offbeat as ob
from offbeat import delays

Rows = list[list[float]]


def drawn(name: str, steps: int, workers: int, seconds: float | None = None, seed: int = 0) -> Rows:
    f = delays.bind(delays.profile(name, seconds), seed=seed, workers=workers, what="compute_s")
    return [[f(step, rank) for rank in range(workers)] for step in range(steps)]


def all_of(rows: Rows) -> list[float]:
    return [seconds for row in rows for seconds in row]


def cov(values: Sequence[float]) -> float:
    return pstdev(values) / fmean(values)


def between(rows: Rows) -> float:
    """Which share of the variance is between ranks."""
    return float(pstdev([fmean(column) for column in zip(*rows, strict=True)]) ** 2 / pstdev(all_of(rows)) ** 2)


@pytest.mark.parametrize("name", delays.PROFILES)
def test_a_profile_is_a_pure_function_of_seed_step_and_rank_that_travels(name: str) -> None:
    spec, rows = delays.profile(name, 0.3), drawn(name, 20, 8, 0.3)
    assert [[spec.draw(0, step, rank, 8) for rank in reversed(range(8))][::-1] for step in range(20)] == rows
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)).draw(0, 7, 3, 8) == rows[7][3]


@pytest.mark.parametrize("name", delays.PROFILES)
def test_the_median_step_of_a_profile_is_the_one_asked_for(name: str) -> None:
    assert median(all_of(drawn(name, 500, 16, 0.3))) == pytest.approx(0.3, rel=0.02)
    assert median(all_of(drawn(name, 500, 16))) == pytest.approx(delays.PROFILES[name].median_s, rel=0.02)


@pytest.mark.parametrize("name", delays.PROFILES)
@pytest.mark.parametrize("workers", [1, 2, 3, 17])
def test_a_profile_serves_any_number_of_workers(name: str, workers: int) -> None:
    assert all(0 < seconds < math.inf for seconds in all_of(drawn(name, 5, workers)))


@pytest.mark.parametrize("name", delays.PROFILES)
def test_a_profile_names_its_source_and_what_was_assumed(name: str) -> None:
    about = delays.profile(name).about
    assert about.who
    assert about.source
    assert about.assumed


SE = {1: 0.85, 5: 0.87, 10: 0.88, 20: 0.91, 30: 0.93, 40: 0.96, 50: 1, 60: 1.03, 70: 1.05, 80: 1.10, 90: 1.17, 95: 1.23}
MICRO = {5: 0.92, 10: 0.93, 20: 0.94, 30: 0.95, 40: 0.97, 50: 1, 60: 1.04, 70: 1.08, 80: 1.16, 90: 1.62, 95: 2.18}


@pytest.mark.parametrize(
    ("name", "table", "spread"), [("bytedance-se", SE, 0.116), ("bytedance-se-micro", MICRO, 0.31)]
)
def test_uneven_sequences_have_the_quantiles_of_the_trace(name: str, table: dict[int, float], spread: float) -> None:
    values = all_of(drawn(name, 1000, 64))
    cuts = quantiles(values, n=100)
    assert {p: cuts[p - 1] for p in table} == pytest.approx(table, abs=0.03)
    assert cov(values) == pytest.approx(spread, abs=0.01)


def test_of_32_replicas_with_uneven_sequences_the_slowest_takes_a_third_longer() -> None:
    slowest = [max(row) / median(row) for row in drawn("bytedance-se", 1000, 32)]
    assert fmean(slowest) == pytest.approx(1.33, abs=0.02)
    assert quantiles(slowest, n=100)[94] == pytest.approx(1.51, abs=0.04)
    rows = drawn("bytedance-se", 400, 32)
    assert between(rows) < 0.012, "no rank is slow for good"
    first, second = all_of(rows[:-1]), all_of(rows[1:])
    assert (
        abs(fmean(a * b for a, b in zip(first, second, strict=True)) - fmean(first) * fmean(second)) < 0.02 * 0.116**2
    )


def test_of_the_micro_batches_some_take_twice_as_long() -> None:
    values = all_of(drawn("bytedance-se-micro", 1000, 64))
    assert fmean(v > 1.5 for v in values) == pytest.approx(0.11, abs=0.005)
    assert fmean(v > 2.0 for v in values) == pytest.approx(0.08, abs=0.005)


def test_a_bad_worker_of_16_is_two_and_a_half_times_slower_for_good() -> None:
    for seed in range(5):
        rows = drawn("bytedance-ar", 200, 16, seed=seed)
        means = sorted(fmean(column) for column in zip(*rows, strict=True))
        assert means[-1] / median(means) == pytest.approx(2.5, rel=0.03)
        slow = max(range(16), key=lambda rank: rows[0][rank])
        others = [row[rank] for row in rows for rank in range(16) if rank != slow]
        assert cov(others) == pytest.approx(0.02, abs=0.006)
        assert between(rows) == pytest.approx(0.999, abs=0.001)
    assert sum(seconds > 2 for seconds in drawn("bytedance-ar", 1, 64)[0]) == 4, "one in 16"


def test_where_the_pipeline_is_uneven_the_replicas_are_not() -> None:
    assert cov(all_of(drawn("bytedance-st", 200, 32))) == pytest.approx(0.003, rel=0.05)


@pytest.mark.parametrize(
    ("name", "factors", "job", "minutes"),
    [("greyhound-compute", (0.79,), 1.118, 10), ("greyhound-network", (0.41 / 0.57, 0.31 / 0.57), 1.155, 24)],
)
def test_one_rank_is_slow_for_minutes_and_a_job_in_step_takes_as_much_longer_as_was_measured(
    name: str, factors: tuple[float, ...], job: float, minutes: float
) -> None:
    step_s = 20.0  # so that many stretches fit
    rows = drawn(name, 20_000, 2, step_s, seed=3)
    assert fmean(max(row) for row in rows) / step_s == pytest.approx(job, rel=0.02)
    slow = {rank for row in rows for rank, seconds in enumerate(row) if seconds > step_s}
    assert len(slow) == 1
    (rank,) = slow
    own = [row[rank] for row in rows]
    assert {round(seconds / step_s, 6) for seconds in own if seconds > step_s} == {round(1 / f, 6) for f in factors}
    stretches = [s for before, s in zip([step_s, *own], own, strict=False) if before == step_s and s > step_s]
    lasts_s = sum(seconds for seconds in own if seconds > step_s) / len(stretches)
    assert lasts_s == pytest.approx(60 * minutes, rel=0.1)


def test_large_jobs_in_step_take_a_third_longer_on_average_and_a_fifth_of_them_half_as_long_again() -> None:
    """Each seed is a job, long enough for hundreds of stretches: of steps as long as a stretch, each is on its own."""
    step_s = 72 * 60.0
    jobs = [fmean(max(row) for row in drawn("greyhound-large", 500, 2, step_s, seed)) / step_s for seed in range(300)]
    assert fmean(jobs) == pytest.approx(1.346, rel=0.02)
    assert fmean(job > 1.5 for job in jobs) == pytest.approx(0.2, abs=0.04)


LARGE_STEP_S, LARGE_SEEDS = 60.0, range(3, 6)


@pytest.mark.parametrize("seed", LARGE_SEEDS)
def test_in_a_large_job_one_rank_is_slow_by_one_factor_for_72_minutes_at_a_time(seed: int) -> None:
    rows = drawn("greyhound-large", 30_000, 2, LARGE_STEP_S, seed)
    slow = {(rank, seconds) for row in rows for rank, seconds in enumerate(row) if seconds != LARGE_STEP_S}
    assert len(slow) == 1, "one rank, and one factor"
    ((rank, slow_s),) = slow
    assert 1 < slow_s / LARGE_STEP_S <= 5, "80% less speed is the worst"
    own = [row[rank] for row in rows]
    stretches = sum(s > before for before, s in zip([LARGE_STEP_S, *own], own, strict=False))
    assert slow_s * own.count(slow_s) / stretches == pytest.approx(60 * 72, rel=0.1)


def test_large_jobs_differ_in_how_slow_their_slow_rank_is() -> None:
    worst = {max(all_of(drawn("greyhound-large", 100, 2, 4320.0, seed))) / 4320 for seed in LARGE_SEEDS}
    assert len(worst) == len(LARGE_SEEDS)


def test_half_of_a_mixed_fleet_is_18_percent_slower() -> None:
    columns = list(zip(*drawn("tpu-mix", 2000, 8), strict=True))
    fast, slow = [fmean(c) for c in columns[:4]], [fmean(c) for c in columns[4:]]
    assert fmean(slow) / fmean(fast) == pytest.approx(1.18, rel=0.01)
    assert [cov(column) for column in columns] == pytest.approx([0.1] * 8, rel=0.1)


def test_four_speeds_come_in_their_own_seconds_and_repeat() -> None:
    assert drawn("async-diloco", 2, 6)[1] == pytest.approx([0.58, 0.75, 1.51, 3.33, 0.58, 0.75])
    assert drawn("async-diloco", 2, 4, 1.0)[1] == pytest.approx([s / 1.13 for s in (0.58, 0.75, 1.51, 3.33)])


def test_the_simulator_finds_what_is_to_be_won() -> None:
    """Synchronous efficiency of the four speeds: the mean pace over that of the slowest."""
    spec = delays.profile("async-diloco")
    run = ob.simulate(ob.allreduce(), None, workers=4, steps=20, compute_s=spec, network=ob.Network(0.0, 1e15))
    alone = sum(run.seconds / s for s in (0.58, 0.75, 1.51, 3.33))
    assert sum(run.gradients) / alone == pytest.approx(0.30, abs=0.01)


def test_phrases_mean_profiles() -> None:
    assert delays.parse("bytedance-se") == delays.profile("bytedance-se")
    assert delays.parse("bytedance-se 300ms") == delays.profile("bytedance-se", seconds=0.3)
    assert delays.parse("greyhound-large 2s") == delays.profile("greyhound-large", seconds=2.0)
    assert delays.parse("tpu-mix 1s + 10% 2s") == delays.total(delays.profile("tpu-mix", 1.0), delays.stalls(0.1, 2))
    assert str(delays.parse("bytedance-se 300ms")) == "bytedance-se with median 300 ms"


def test_a_wrong_name_is_answered_with_those_there_are() -> None:
    names = ", ".join(delays.PROFILES)
    with pytest.raises(ValueError, match=f"no profile is called 'bytedance'; did you mean .*there are {names}"):
        delays.profile("bytedance")
    for number_or_list in (3, [3]):
        with pytest.raises(
            ValueError, match=rf"no profile is called {re.escape(str(number_or_list))}; there are {names}"
        ):
            delays.profile(number_or_list)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"'tpu-mixt 1s' is not understood; did you mean 'tpu-mix'\?.*{names}"):
        delays.parse("tpu-mixt 1s")
    with pytest.raises(ValueError, match=r"-1 s is not a time"):
        delays.profile("tpu-mix", -1)
    with pytest.raises(ValueError, match=r"'1s' is no number of seconds; .* such as 0\.32, or delays\.parse"):
        delays.profile("tpu-mix", "1s")  # type: ignore[arg-type]


def test_a_run_of_ones_own_is_repeated_as_it_was() -> None:
    late = delays.total(delays.chronic(1, 0.2), delays.lognormal(0.1, 0.3))
    run = ob.simulate(ob.allreduce(), None, workers=3, steps=10, compute_s=late, spans=True)
    again = delays.trace(run)
    f = delays.bind(late, seed=0, workers=3, what="compute_s")
    seen = [[again.draw(9, step, rank, 3) for rank in range(3)] for step in range(10)]
    assert all_of(seen) == pytest.approx([f(step, rank) for step in range(10) for rank in range(3)])
    assert str(again) == "a trace of 10 steps of 3 ranks"


def test_a_run_that_kept_no_timeline_has_no_times() -> None:
    with pytest.raises(ValueError, match="no times of rank 0; use one that kept its timeline"):
        delays.trace(ob.simulate(ob.allreduce(), None, workers=2, steps=2))


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.csv"
    file.write_text(text)
    return file


def test_a_file_of_times_is_read_in_any_order_and_wraps_round(tmp_path: Path) -> None:
    file = written(tmp_path, "rank,host,step,seconds\n1,b,0,0.2\n0,a,0,0.1\n\n0,a,1,0.3\n1,b,1,0.4\n")
    spec = delays.trace(str(file))
    assert spec == delays.trace([[0.1, 0.2], [0.3, 0.4]]) == delays.parse(f" {file} ")
    assert [spec.draw(0, 2, rank, 3) for rank in range(3)] == [0.1, 0.2, 0.1]


def test_what_was_not_measured_repeats_the_same_rank_and_is_counted(tmp_path: Path) -> None:
    file = written(tmp_path, "step,rank,seconds\n5,0,0.1\n6,0,0.2\n7,0,0.3\n6,1,0.7\n7,1,0.9\n")
    spec = delays.trace(file)
    assert spec.table == ((0.1, 0.7), (0.2, 0.7), (0.3, 0.9))
    assert str(spec) == "a trace of 3 steps of 2 ranks, of which 1 repeat others of their rank"


BAD = {
    "": "line 1: there is no column 'step'; begin the file with a line step,rank,seconds",
    "step,rank\n": "line 1: there is no column 'seconds'",
    "step,rank,seconds\n": "has no rows",
    "step,rank,seconds\n0,0,0.1\n1,0\n": "line 3: '1,0' has 2 of 3 columns",
    "step,rank,seconds\n0,0,0.1\n-1,0,0.1\n": "line 3: the step is '-1'; use a whole number from 0",
    "step,rank,seconds\n0,x,0.1\n": "line 2: the rank is 'x'",
    "step,rank,seconds\n0,0,soon\n": "line 2: 'soon' is no number of seconds",
    "step,rank,seconds\n0,0,-2\n": "line 2: '-2' is no number of seconds",
    "step,rank,seconds\n0,0,nan\n": "line 2: 'nan' is no number of seconds",
    "step,rank,seconds\n0,0,1\n0,0,2\n": "line 3: step 0 of rank 0 is there a second time",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_row_is_refused_with_file_line_and_value(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.csv") as error:
        delays.trace(written(tmp_path, text))
    assert BAD[text] in str(error.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"the trace nowhere.csv cannot be read: No such file"):
        delays.parse("nowhere.csv")


def test_the_documentation_has_every_profile_in_its_table() -> None:
    page = Path(ob.__file__).parents[2] / "docs" / "simulator.md"
    rows = [line.split("|")[1].strip() for line in page.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    assert [row.strip("`") for row in rows if row.strip("`") in delays.PROFILES] == list(delays.PROFILES)
