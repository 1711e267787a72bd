"""Claims about the papers' experiments: what is declared fits together, what runs is judged as declared."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import math
import pickle
import shlex
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch

from offbeat.cli import main
from offbeat.delays import bind
from offbeat.experiments import (
    EXPERIMENTS,
    Bench,
    Case,
    Claim,
    Experiment,
    Figures,
    Found,
    datasets,
    judge,
    navigation,
    translation,
    vowels,
)
from offbeat.experiments.datasets import Dataset
from offbeat.experiments.experiment import ALL_IN_ONE
from offbeat.experiments.judging import MEASURES, SAID, to_same_loss
from offbeat.experiments.telling import SMALL
from offbeat.experiments.trying import TUNING_SEED, Trial, best, never_waiting, searched
from offbeat.experiments.workloads import hyperplane
from offbeat.strategies import METHODS, named

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
every = pytest.mark.parametrize("about", EXPERIMENTS.values(), ids=EXPERIMENTS.keys())


def run(line: str) -> int:
    return main(shlex.split(line))


# What is declared


@every
def test_every_method_of_an_experiment_exists_and_the_default_is_in_every_table(about: Experiment) -> None:
    assert all(named(words).name in METHODS for words in about.methods.values())
    assert about.methods[ALL_IN_ONE] == "self_clocked"
    assert any(claim.of == (ALL_IN_ONE,) for claim in about.claims)
    assert all(METHODS[paper].paper.arxiv for paper in about.papers)


@every
def test_every_claim_is_about_methods_and_cases_that_there_are(about: Experiment) -> None:
    for claim in about.claims:
        assert {*claim.of, *claim.over} <= set(about.methods)
        assert not {*claim.of} & {*claim.over}
        assert (claim.at_least is None) != (claim.at_most is None)
        assert [case for case in about.cases if case.learns == claim.learning and claim.among in case.name]


@every
@pytest.mark.parametrize("is_quick", [False, True])
def test_the_figures_seeds_are_not_those_of_the_search(about: Experiment, is_quick: bool) -> None:
    size = about.quick if is_quick else about.full
    assert size.seeds < TUNING_SEED
    assert size.workload is not None or not any(case.learns for case in about.cases)


@every
def test_who_is_made_late_is_called_injected(about: Experiment) -> None:
    for case in about.cases:
        is_late = case.delays is not None or (case.compute_s is not None and not case.uneven)
        assert bool(case.injected) == is_late
        assert ("injected: " in case.title) == bool(case.injected)
        assert case.uneven in case.title
        assert not case.by_content or case.uneven


@every
def test_the_small_version_needs_no_data_that_do_not_come_along(about: Experiment) -> None:
    assert about.quick.workload is None or about.quick.workload.data is None
    assert any(case.quick for case in about.cases)


# What runs


@every
def test_the_small_version_writes_its_table_and_all_that_stands_behind_it(
    about: Experiment, tmp_path: Path, capsys: Captured
) -> None:
    needs_packages_of(about)
    line = f"reproduce {about.name} --quick --out {tmp_path}/made --seeds 1 --length {LENGTHS.get(about.name, 8)}"
    assert run(line) == 0
    told = capsys.readouterr()
    table = (tmp_path / "made" / "table.md").read_text()
    assert told.out == table + "\n"
    assert SMALL in told.err
    assert SMALL in table
    assert about.claim in table
    assert about.here in table
    command = (tmp_path / "made" / "command.txt").read_text().strip()
    assert command == "offbeat " + shlex.join(shlex.split(line))
    assert f"`{command}`" in table
    results, curves = (json.loads((tmp_path / "made" / f"{name}.json").read_text()) for name in ("results", "curves"))
    cases = [case for case in about.cases if case.quick]
    assert [of["case"] for of in results["cases"]] == [case.name for case in cases]
    for case, of in zip(cases, results["cases"], strict=True):
        assert f"## {case.title}" in table
        assert [row["label"] for row in of["methods"]] == list(about.methods)
        for row in of["methods"]:
            assert f"| {row['label']} " in table
            assert (len(row["tried"]) >= 2) == case.learns
            check_figures(row, case, curves[case.name][row["label"]]["1"], about)
    check_claims(about, cases, results, table)
    learning = [case for case in cases if case.learns and about.quick.workload and about.quick.workload.has_losses]
    assert len(list((tmp_path / "made").glob("losses-*.html"))) == len(learning)


# Steps of each worker: few, but adaptive periods and delays of 12 steps want some.
LENGTHS = {"dasgd-overlap": 20, "wagma-rl": 4, "wagma-translation": 4, "eager-video": 4}


def needs_packages_of(about: Experiment) -> None:
    for package in about.quick.workload.packages if about.quick.workload is not None else ():
        pytest.importorskip(package)


def check_figures(row: dict[str, Any], case: Case, curve: list[list[float]], about: Experiment) -> None:
    (figures,) = row["figures"]
    assert figures["seed"] == 1
    assert figures["seconds"] > 0
    assert 0 <= figures["waiting"] < 1
    assert (figures["rate"] is not None) == case.learns
    if case.learns:
        losses = {rate: math.inf if loss is None else loss for rate, loss in row["tried"].items()}
        assert f"{figures['rate']:g}" == min(losses, key=lambda rate: losses[rate])
        times = [at_s for at_s, _ in curve]
        assert times == sorted(times)
        assert times[-1] == figures["seconds"]
        assert about.quick.workload is not None
        if about.quick.workload.reached:
            assert figures["score"] is not None
            assert -1 <= max(value for _, value in curve) <= 1
        else:
            assert curve[-1][1] == figures["training_loss"]


def check_claims(about: Experiment, cases: list[Case], results: dict[str, Any], table: str) -> None:
    """Every claim is in the table once for each case and method that it is about, and met where its figure says so."""
    wanted = [
        (case.name, method, claim)
        for claim in about.claims
        for case in cases
        if case.learns == claim.learning and claim.among in case.name
        for method in claim.of
    ]
    assert [(row["case"], row["method"]) for row in results["claims"]] == [(case, method) for case, method, _ in wanted]
    rows = table.split("## Claims")[1].strip().splitlines()[2:]
    for line, row, (_, _, claim) in zip(rows, results["claims"], wanted, strict=True):
        value = median(math.inf if x is None else x for x in row["values"])
        is_met = value >= claim.at_least if claim.at_least is not None else value <= (claim.at_most or 0.0)
        assert row["met"] == is_met
        assert ("| met" in line) == is_met
        assert ("| missed" in line) != is_met
        assert (row["missed_by"] == 0) == is_met


def test_a_run_is_the_same_whenever_it_is_made() -> None:
    about = EXPERIMENTS["eager-hyperplane"]
    size = replace(about.quick, steps=8)
    made = [Trial("eager", about.cases[1], size, 1, 0.1).run() for _ in range(2)]
    assert made[0] == made[1]


# Several runs at a time, and a run that was stopped


@dataclass(frozen=True)
class Sum:
    """A run that may be made once: it leaves a mark, and falls over one that is there."""

    number: int
    folder: Path

    @property
    def title(self) -> str:
        return f"run {self.number}"

    def run(self) -> Figures:
        (self.folder / f"ran-{self.number}").touch(exist_ok=False)
        return figures(seed=self.number, seconds=self.number / 3, reached=((0.1, 0.2), (0.3, 0.4)))


@pytest.mark.parametrize("jobs", [1, 2])
def test_outcomes_come_in_the_order_of_what_is_wanted_however_many_run_at_a_time(jobs: int, tmp_path: Path) -> None:
    heard: list[str] = []
    with Bench(jobs, told=heard.append) as bench:
        found = bench.run([Sum(number, tmp_path) for number in (3, 1, 2)])
    assert [run.seed for run in found] == [3, 1, 2]
    assert sorted(line.split(":")[0] for line in heard) == ["run 1", "run 2", "run 3"]


def test_a_run_that_was_stopped_is_gone_on_with_where_it_was(tmp_path: Path) -> None:
    kept = tmp_path / "made" / "outcomes.jsonl"
    with Bench(kept=kept, about="long") as bench:
        before = bench.run([Sum(1, tmp_path), Sum(2, tmp_path)])
    whole = kept.read_text()
    kept.write_text(whole[:-20])  # the second was being written
    (tmp_path / "ran-2").unlink()
    with Bench(kept=kept, about="long") as bench:
        after = bench.run([Sum(1, tmp_path), Sum(2, tmp_path), Sum(3, tmp_path)])
    assert after[:2] == before
    with Bench(kept=kept, about="long") as bench:
        assert bench.run([Sum(2, tmp_path), Sum(3, tmp_path)]) == after[1:]


def test_outcomes_of_another_size_are_not_taken_for_ones_of_this(tmp_path: Path) -> None:
    kept = tmp_path / "outcomes.jsonl"
    for about in ("long", "short"):
        with Bench(kept=kept, about=about) as bench:
            bench.run([Sum(1, tmp_path)])
        (tmp_path / "ran-1").unlink()


@every
def test_every_run_of_an_experiment_can_be_made_in_another_process(about: Experiment) -> None:
    for size in (about.quick, about.full):
        for case in about.cases:
            trial = Trial("allreduce", case, size, 1, 0.1, Path("data"), "synchronous")
            assert pickle.loads(pickle.dumps(trial)).title == trial.title


def test_a_command_that_is_gone_on_with_ends_as_one_that_was_never_stopped(tmp_path: Path, capsys: Captured) -> None:
    line = f"reproduce eager-hyperplane --quick --seeds 1 --length 8 --out {tmp_path}/made"
    assert run(line) == 0
    table, kept = ((tmp_path / "made" / name).read_text() for name in ("table.md", "outcomes.jsonl"))
    capsys.readouterr()
    (tmp_path / "made" / "results.json").unlink()
    (tmp_path / "made" / "outcomes.jsonl").write_text("".join(kept.splitlines(keepends=True)[:-2]))
    assert run(f"{line} --resume") == 0
    assert len([told for told in capsys.readouterr().err.splitlines() if ", seed " in told]) == 2
    again = (tmp_path / "made" / "table.md").read_text()
    assert again.split("## ")[1:] == table.split("## ")[1:]


# What was recorded


@pytest.mark.skipif(not (ROOT / "records").is_dir(), reason="a source distribution has no records")
def test_the_page_of_the_documentation_is_made_from_the_records() -> None:
    spec = importlib.util.spec_from_file_location("reproduced", ROOT / "tools" / "reproduced.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert text == made.page(text), "the records have changed; run: python tools/reproduced.py"


@pytest.mark.parametrize("file", sorted((ROOT / "records").glob("reproduce-*.json")), ids=lambda file: file.stem)
def test_a_record_is_of_a_full_run_of_an_experiment_that_there_is(file: Path) -> None:
    record = json.loads(file.read_text(encoding="utf-8"))
    about = EXPERIMENTS[record["experiment"]]
    assert file.stem == f"reproduce-{about.name}"
    assert not record["quick"]
    assert (record["claim"], record["here"]) == (about.claim, about.here)
    assert [case["case"] for case in record["cases"]] == [case.name for case in about.cases]
    for case, found in zip(about.cases, record["cases"], strict=True):
        assert {row["label"]: row["method"] for row in found["methods"]} == dict(about.methods)
        seeds = about.full.seeds if case.learns else about.full.timed_seeds
        assert all([f["seed"] for f in row["figures"]] == [*range(1, seeds + 1)] for row in found["methods"])
    assert f"`{record['command']}`" in file.with_suffix(".txt").read_text(encoding="utf-8")


# How it is judged


def figures(**changes: Any) -> Figures:
    return replace(Figures(1, 0.1, 10.0, 0.0, 100, 8, 1.0, 0.9, 1.0, ((5.0, 2.0), (10.0, 1.0))), **changes)


def verdict(claim: Claim, ours: list[Figures], theirs: list[Figures]) -> Any:
    case = Case("a case", 8, 0.1)
    (found,) = judge([claim], [case], {"a case": {"ours": Found(tuple(ours), {}), "theirs": Found(tuple(theirs), {})}})
    return found


def test_a_claim_is_judged_by_the_median_of_the_seeds_and_says_by_how_much_it_is_missed() -> None:
    claim = Claim("2", "speed-up", ("ours",), ("theirs",), at_least=1.5)
    theirs = [figures(seconds=12.0)] * 3
    fast = verdict(claim, [figures(seconds=s) for s in (6.0, 8.0, 12.0)], theirs)
    assert fast.values == (2.0, 1.5, 1.0)
    assert fast.met
    slow = verdict(claim, [figures(seconds=s) for s in (6.0, 10.0, 12.0)], theirs)
    assert not slow.met
    assert slow.missed_by == pytest.approx(0.3)


def test_a_loss_within_the_rivals_own_spread_is_no_worse() -> None:
    claim = Claim("equal", "loss", ("ours",), ("theirs",), at_most=1.0)
    theirs = [figures(loss=loss) for loss in (0.8, 1.0, 1.2)]
    assert verdict(claim, [figures(loss=1.2)] * 3, theirs).met
    assert not verdict(claim, [figures(loss=1.21)] * 3, theirs).met
    assert not verdict(claim, [figures(loss=None)] * 3, theirs).met


def test_accuracy_that_is_gained_is_none_that_is_lost() -> None:
    claim = Claim("none", "points lost", ("ours",), ("theirs",), at_most=0.5)
    assert verdict(claim, [figures(accuracy=0.95)], [figures(accuracy=0.9)]).figure == pytest.approx(-5)
    assert not verdict(claim, [figures(accuracy=0.89)], [figures(accuracy=0.9)]).met


def test_the_worst_of_several_rivals_counts() -> None:
    claim = Claim("–", "bytes", ("ours",), ("theirs", "others"), at_most=0.5)
    runs = {"ours": 100, "theirs": 400, "others": 125}
    found = {name: Found((figures(sent=sent),), {}) for name, sent in runs.items()}
    (seen,) = judge([claim], [Case("a case", 8, 0.1)], {"a case": found})
    assert seen.values == (0.8,)


def test_the_time_to_a_loss_is_to_the_lowest_that_both_come_to() -> None:
    quick = figures(curve=((1.0, 3.0), (2.0, 1.0), (3.0, 0.5)))
    slow = figures(curve=((2.0, 3.0), (6.0, 1.0)))
    assert to_same_loss(quick, slow) == 3.0
    assert to_same_loss(slow, quick) == pytest.approx(1 / 3)
    assert to_same_loss(figures(curve=((1.0, math.nan),)), slow) == 0.0


def test_the_time_to_the_best_score_is_told_against_the_rival_that_has_it() -> None:
    claim = Claim("–", "time to the best score", ("ours",), ("theirs", "others"), at_most=0.8)
    reached = {
        "ours": ((1.0, 0.5), (3.0, 0.9)),
        "theirs": ((2.0, 0.4), (4.0, 0.9)),
        "others": ((0.5, 0.5), (9.0, 0.4)),
    }
    found = {name: Found((figures(reached=of),), {}) for name, of in reached.items()}
    (seen,) = judge([claim], [Case("a case", 8, 0.1)], {"a case": found})
    assert seen.values == (0.75,)
    found["ours"] = Found((figures(reached=((1.0, 0.8),)),), {})
    assert not judge([claim], [Case("a case", 8, 0.1)], {"a case": found})[0].met


def test_every_measure_is_named_in_words() -> None:
    assert set(MEASURES) == set(SAID)


# How rates are found, and what waiting costs at most


def test_the_search_goes_on_where_the_best_rate_is_at_an_end() -> None:
    about = EXPERIMENTS["eager-hyperplane"]
    small = hyperplane(8, (0.001, 0.002))
    size = replace(about.quick, steps=8, workload=small)
    tried = searched(Trial("allreduce", about.cases[1], size, 0), Bench())
    assert list(tried) == [0.001, 0.002, 0.004, 0.008]
    assert best(tried) == 0.008


def test_who_never_waits_is_as_fast_as_the_mean_of_all_steps() -> None:
    about = EXPERIMENTS["eager-hyperplane"]
    trial = Trial("allreduce", about.cases[1], about.quick, 1)
    assert never_waiting(trial, 800) == pytest.approx(100 * (0.3 + 0.3 / 8), rel=0.02)


# Steps that are uneven by what is in them


def by_content() -> list[Trial]:
    found = []
    for about in EXPERIMENTS.values():
        found += [Trial("allreduce", case, about.quick, 1) for case in about.cases if case.by_content]
    return found


@pytest.mark.parametrize("trial", by_content(), ids=lambda trial: trial.case.name)
def test_steps_take_by_their_content_what_the_case_says_on_average(trial: Trial) -> None:
    seconds = bind(trial.compute_s, seed=1, workers=8, what="compute_s")
    taken = [seconds(step, rank) for step in range(100) for rank in range(8)]
    assert fmean(taken) == pytest.approx(trial.case.step_s, rel=0.1)
    assert max(taken) > 1.5 * min(taken)
    assert taken == [seconds(step, rank) for step in range(100) for rank in range(8)]


def test_a_turn_takes_what_was_measured_in_the_workers_world_and_only_its_first_step_is_one_of_playing() -> None:
    seconds = navigation.Turns().bound(1, 1024)
    for rank, world in enumerate(navigation.TIMED):
        rows = navigation.measured()[world]
        assert seconds(0, rank) in {play_s + learn_s for play_s, learn_s in rows}
        assert all(seconds(step, rank) == seconds(1, rank) for step in range(1, navigation.LEARNS))
        assert seconds(1, rank) in {learn_s for _, learn_s in rows}


# The workloads


@torch.no_grad()
def test_what_fills_up_a_verse_changes_nothing() -> None:
    task = translation.task(1, 4, None)
    english, spanish, target = task.take(0, 0)
    model = task.build(0).eval()
    more = [torch.nn.functional.pad(part, (0, 3)) for part in (english, spanish, target)]
    assert task.value(model, more).item() == pytest.approx(task.value(model, (english, spanish, target)).item())
    alone = translation.translations(model, english[:1])
    assert translation.translations(model, more[0])[0, : alone.shape[1]].tolist() == alone[0].tolist()


@torch.no_grad()
def test_what_fills_up_an_utterance_changes_nothing() -> None:
    task = vowels.task(1, 4, None)
    frames, counts = (part[:, -2:] for part in task.take(0, 0)[:2])  # of more, the beginning would be forgotten
    model = task.build(0).eval()
    more = torch.nn.functional.pad(frames, (0, 0, 3, 0)), torch.nn.functional.pad(counts, (3, 0))
    assert torch.allclose(model(*more), model(frames, counts), atol=1e-6)


def test_nothing_that_is_held_out_is_trained_on() -> None:
    of = translation.corpus(None)
    trained = {tuple(english.tolist()) for english, _ in of.train}
    assert len(of.train) + len(of.held_out) <= 915
    assert sum(tuple(english.tolist()) in trained for english, _ in of.held_out) <= 1  # a proverb that stands twice


def test_a_perfect_translation_has_the_highest_bleu() -> None:
    pytest.importorskip("sacrebleu")
    said = translation.corpus(None).said
    assert translation.bleu(said, said) == pytest.approx(100)
    assert translation.bleu(["y"] * len(said), said) < 1


def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setitem(sys.modules, "minigrid", None)
    for name in ("wagma-translation", "wagma-rl"):
        assert run(f"reproduce {name} --quick --out {tmp_path}/made") == 2
        assert "is not installed; pip install 'offbeat[experiments]'" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_worker_learns_from_one_turn_until_the_next() -> None:
    pytest.importorskip("minigrid")
    task = navigation.task(1, 2, None)
    agent = task.build(0)
    assert isinstance(agent, navigation.Agent)
    for step in range(navigation.LEARNS):
        task.value(agent, task.take(0, step)).backward()
        if step == 0:
            played = agent.played[0]
        assert agent.played[0] is played
    task.value(agent, task.take(0, navigation.LEARNS))
    assert agent.played[0] is not played


def test_a_worker_learns_from_a_turn_of_a_single_step() -> None:
    pytest.importorskip("minigrid")
    task = navigation.task(1, 1, None)
    agent = task.build(0)
    assert isinstance(agent, navigation.Agent)
    task.value(agent, task.take(0, 0))
    whole = agent.played[0]
    agent.played[0] = navigation.Rollout(*(getattr(whole, one.name)[:1] for one in fields(whole)))
    for step in range(1, navigation.LEARNS):
        assert task.value(agent, task.take(0, step)).isfinite()


# The list, and what is wrong


def test_the_list_says_what_each_experiment_claims_and_needs(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run("reproduce") == 0
    lines = capsys.readouterr().out.splitlines()
    for about in EXPERIMENTS.values():
        (line,) = [line for line in lines if line.startswith(f"{about.name} ")]
        assert about.claim in line
        assert line.rstrip().endswith(about.needs)


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(capsys: Captured) -> None:
    assert run("reproduce eager-hyperplan") == 2
    told = capsys.readouterr().err
    assert "no experiment is called 'eager-hyperplan'; did you mean 'eager-hyperplane'?" in told
    assert all(name in told for name in EXPERIMENTS)


@pytest.mark.parametrize(("option", "told"), [("--seeds 0", "--seeds 0 is too few"), ("--length 1", "use 4 or more")])
def test_a_run_of_nothing_is_refused(option: str, told: str, capsys: Captured, tmp_path: Path) -> None:
    assert run(f"reproduce eager-video --quick --out {tmp_path}/made {option}") == 2
    assert told in capsys.readouterr().err


def test_a_folder_that_holds_other_things_is_refused(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    assert run(f"reproduce eager-video --quick --out {tmp_path}") == 2
    assert "holds other things; name a new folder" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_data_that_are_missing_are_named_with_the_way_to_get_them(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = replace(datasets.FASHION, packaged=tmp_path / "absent")
    about = EXPERIMENTS["eager-images"]
    assert about.full.workload is not None
    full = replace(about.full, workload=replace(about.full.workload, data=absent))
    monkeypatch.setitem(EXPERIMENTS, about.name, replace(about, full=full))
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "named"))
    assert run(f"reproduce eager-images --out {tmp_path}/made") == 2
    told = capsys.readouterr().err
    assert f"Fashion-MNIST is in none of {tmp_path}/named, {tmp_path}/absent" in told
    assert "train-images-idx3-ubyte.gz is missing" in told
    assert "`apt-get install dataset-fashion-mnist` brings it, or name its folder: --data DIR" in told
    assert not (tmp_path / "made").exists()


def some_data(place: Path) -> Dataset:
    place.mkdir(exist_ok=True)
    (place / "letters.gz").write_bytes(gzip.compress(b"abc"))
    return Dataset("Letters", {"letters.gz": hashlib.sha256(b"abc").hexdigest()}, place, "get letters")


def test_data_are_looked_for_in_the_folder_that_is_named_before_the_packages(tmp_path: Path) -> None:
    data = some_data(tmp_path / "packaged")
    assert data.place(tmp_path / "mine") == tmp_path / "packaged"
    some_data(tmp_path / "mine")
    assert data.place(tmp_path / "mine") == tmp_path / "mine"
    assert data.place(None) == tmp_path / "packaged"
    assert data.read(tmp_path / "mine", "letters.gz") == b"abc"


@pytest.mark.parametrize(
    ("content", "told"),
    [(gzip.compress(b"abd", mtime=0), "is not that of Letters: its sha256 is"), (b"abc", "cannot be unpacked")],
    ids=["other data", "no archive"],
)
def test_data_that_are_not_the_right_ones_are_refused(content: bytes, told: str, tmp_path: Path) -> None:
    data = some_data(tmp_path)
    (tmp_path / "letters.gz").write_bytes(content)
    with pytest.raises(ValueError, match=told) as refused:
        data.read(tmp_path, "letters.gz")
    assert "bring it anew: `get letters`" in str(refused.value)
