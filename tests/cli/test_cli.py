"""The command line: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.cli import main

Captured = pytest.CaptureFixture[str]


def run(line: str) -> int:
    return main(shlex.split(line))


def test_list_names_every_method_with_the_year_of_its_paper(capsys: Captured) -> None:
    assert run("list") == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1].strip()}
    for name, card in ob.STRATEGIES.items():
        assert rows[name].endswith(str(card.paper.year))


def test_list_writes_the_cards_with_their_settings(tmp_path: Path) -> None:
    assert run(f"list --json {tmp_path}/cards.json") == 0
    methods = {m["name"]: m for m in json.loads((tmp_path / "cards.json").read_text())["methods"]}
    assert list(methods) == list(ob.STRATEGIES)
    assert methods["local_sgd"]["settings"] == {"period": 8, "codec": None, "pace": None, "moments": None}
    assert methods["local_sgd"]["axes"]["when"] == "every H steps"


def test_list_of_a_name_shows_its_settings_and_its_laws(capsys: Captured) -> None:
    assert run("list dasgd") == 0
    shown = capsys.readouterr().out
    assert "period=4, delay=1, xi=0.25, merge=paper, codec=none" in shown
    assert "xi=1: independent runs" in shown


@pytest.mark.parametrize("name", ob.STRATEGIES)
def test_list_of_a_name_says_what_could_not_be_confirmed(name: str, capsys: Captured) -> None:
    assert run(f"list {name}") == 0
    shown = " ".join(capsys.readouterr().out.split())
    sure = ob.STRATEGIES[name].paper.confidence
    assert ("how sure" in shown) == bool(sure)
    assert sure in shown


def test_cite_prints_the_bibtex_and_nothing_else(capsys: Captured) -> None:
    assert run("cite dasgd") == 0
    assert capsys.readouterr() == (ob.STRATEGIES["dasgd"].paper.bibtex() + "\n", "")


def test_a_simulated_run_is_the_one_that_the_library_makes(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "run.json"
    line = f"simulate local_sgd --set period=4 --codec int8 --workers 3 --steps 8 --seed 7 --json {file}"
    options = '--task regression --delay "1 rank 30ms" --compute 20ms --bandwidth 1Gbps --latency 1ms'
    assert run(f"{line} {options} --algorithm halving_doubling") == 0
    twin = ob.simulate(
        ob.local_sgd(4, ob.codec.int8()),
        ob.tasks.regression(),
        workers=3,
        steps=8,
        seed=7,
        compute_s=0.02,
        delays=ob.delays.random(1, 0.03),
        network=ob.Network(1e-3, 1.25e8, "halving_doubling"),
    )
    (seen,) = json.loads(file.read_text())["runs"]
    assert seen == {
        "method": "local_sgd",
        "settings": {**ob.local_sgd().settings, "period": 4, "codec": "int8"},
        "mode": "simulated",
        "task": "regression",
        "workers": 3,
        "steps": 8,
        "seconds": twin.seconds,
        "wait_fraction": twin.wait_fraction,
        "wire_bytes": twin.wire_bytes,
        "loss": twin.metrics["loss"],
        "accuracy": None,
        "train_loss": twin.losses[-1].item(),
        "seed": 7,
        "delay": "1 random rank a step late by 30 ms",
        "diverged": False,
    }
    shown = capsys.readouterr()
    assert "local_sgd period=4 codec=int8" in " ".join(shown.out.split())
    assert "speed-up" not in shown.out
    name, *progress, wrote = shown.err.splitlines()
    assert (name, wrote) == ("local_sgd period=4 codec=int8", f"wrote {file}")
    assert all(said.startswith(f"{name}: ") for said in progress)  # where a run takes longer than a moment


@pytest.mark.parametrize(
    ("words", "ending"), [("", {"samples": 3 * 8}), ("--fixed-shares", {"steps": 8})], ids=["shared", "fixed"]
)
def test_steps_are_those_of_the_job_unless_shares_are_fixed(
    words: str, ending: dict[str, Any], tmp_path: Path, capsys: Captured
) -> None:
    file, late = tmp_path / "run.json", ob.delays.chronic(2, 0.3)
    for method in (ob.self_clocked(), ob.adaptive(sampling=0.5)):
        line = f"simulate {method.name} --set {'period=1' if method.name == 'self_clocked' else 'sampling=0.5'}"
        assert run(f"{line} --task regression --workers 3 --steps 8 --delay 'rank 2 300ms' --json {file} {words}") == 0
        (seen,) = json.loads(file.read_text())["runs"]
        twin = ob.simulate(method, ob.tasks.regression(), 3, delays=late, **ending)
        assert (seen["seconds"], seen["wire_bytes"], seen["loss"]) == (
            twin.seconds,
            twin.wire_bytes,
            twin.metrics["loss"],
        )
    assert ("8 steps each;" in capsys.readouterr().out) == bool(words)


@pytest.mark.parametrize("name", ["allreduce", "qsgd"])
def test_methods_in_step_run_the_same_with_shared_work_as_with_fixed_shares(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    line = f"simulate {name} --task regression --workers 3 --steps 40 --delay 'rank 2 300ms' --json {file}"
    runs = []
    for words in ("", "--fixed-shares"):
        assert run(f"{line} {words}") == 0
        runs += json.loads(file.read_text())["runs"]
    assert runs[0] == runs[1]


def test_compare_measures_the_first_method_against_the_others_under_the_same_delays(
    tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "runs.json"
    line = "compare allreduce local_sgd:period=2 local_sgd:period=4,codec=qsgd8"
    assert run(f'{line} --workers 4 --steps 16 --delay "1 rank 320ms" --json {file}') == 0
    first, *others = json.loads(file.read_text())["runs"]
    shown = capsys.readouterr().out
    assert first["seconds"] == pytest.approx(16 * 0.42, rel=0.01)  # someone is late in every step, and all wait
    assert first["accuracy"] > 0.3
    for other in others:
        assert other["delay"] == first["delay"]
        assert f"{first['seconds'] / other['seconds']:.2f}×" in shown
        assert other["seconds"] < first["seconds"]
    usual = dict(ob.local_sgd().settings)
    assert [other["settings"] for other in others] == [usual | {"period": 2}, usual | {"period": 4, "codec": "qsgd8"}]


def test_a_simulated_run_without_a_method_takes_the_one_that_attach_takes(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert run(f"simulate --set period=2 --codec bf16 --task none --workers 3 --steps 4 --json {file}") == 0
    (seen,) = json.loads(file.read_text())["runs"]
    assert (seen["method"], seen["settings"]["period"], seen["settings"]["codec"]) == ("self_clocked", 2, "bf16")
    model = torch.nn.Linear(1, 1)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
        assert optimizer.method.name == seen["method"]


@pytest.mark.parametrize("command", ["simulate", "train"])
def test_help_names_the_method_of_those_who_name_none(command: str, capsys: Captured) -> None:
    assert run(f"{command} --help") == 0
    assert "[default: self_clocked]" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_compare_without_names_begins_with_the_default_and_has_methods_that_avoid_waiting(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    assert run(f"compare --task none --parameters 25.6M --workers 4 --steps 8 --json {file}") == 0
    runs = json.loads(file.read_text())["runs"]
    assert [r["method"] for r in runs] == ["self_clocked", "allreduce", "local_sgd", "eager", "wagma", "ad_psgd"]
    assert all(r["loss"] is None and r["accuracy"] is None for r in runs)
    assert runs[1]["wire_bytes"] == 8 * 2 * 3 * 4 * 25_600_000  # a ring of 4 sends 2(P − 1)·n in all, each step


def test_a_setting_without_end_is_written_as_a_word(tmp_path: Path) -> None:
    file, line = tmp_path / "run.json", "simulate adaptive:low=0,high=inf --task none --workers 2 --steps 4"
    assert run(f"{line} --json {file} --report {tmp_path / 'report'}") == 0
    assert json.loads(file.read_text())["runs"][0]["settings"]["high"] == "inf"


def test_a_run_can_end_by_samples_or_by_virtual_time(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert run(f"simulate allreduce --task none --workers 2 --samples 10 --json {file}") == 0
    assert json.loads(file.read_text())["runs"][0]["steps"] == 5
    assert run(f"simulate allreduce --task none --workers 2 --seconds 1s --compute 50ms --json {file}") == 0
    assert json.loads(file.read_text())["runs"][0]["steps"] == pytest.approx(20, abs=1)


def test_computation_can_be_spread(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    line = "simulate allreduce --task none --workers 4 --steps 9 --compute 'lognormal 100ms 0.5'"
    assert run(f"{line} --json {file}") == 0
    assert json.loads(file.read_text())["runs"][0]["wait_fraction"] > 0.1


def test_computation_can_be_as_it_was_measured_elsewhere(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "run.json"
    line = f"simulate allreduce --task none --workers 4 --steps 9 --bandwidth 1000Gbps --latency 0s --json {file}"
    assert run(f"{line} --compute 'async-diloco 1.13s'") == 0
    assert json.loads(file.read_text())["runs"][0]["seconds"] == pytest.approx(9 * 3.33, rel=0.01)
    assert "computation: async-diloco with median 1.13 s" in capsys.readouterr().out
    (tmp_path / "mine.csv").write_text("step,rank,seconds\n0,0,0.25\n")
    assert run(f"{line} --compute {tmp_path}/mine.csv") == 0
    assert json.loads(file.read_text())["runs"][0]["seconds"] == pytest.approx(9 * 0.25, rel=0.01)


def test_computation_can_be_that_of_a_large_job_and_help_names_it(tmp_path: Path, capsys: Captured) -> None:
    file, spec = tmp_path / "run.json", ob.delays.profile("greyhound-large", 4320.0)
    line = f"simulate allreduce --task none --workers 2 --steps 40 --json {file}"
    assert run(f"{line} --compute 'greyhound-large 4320s'") == 0
    in_step_s = sum(max(spec.draw(0, step, rank, 2) for rank in range(2)) for step in range(40))
    assert in_step_s > 1.1 * 40 * 4320
    assert json.loads(file.read_text())["runs"][0]["seconds"] == pytest.approx(in_step_s, rel=1e-3)
    assert run(f"{line} --compute greyhound-large") == 0
    assert "computation: greyhound-large with median 1 s" in capsys.readouterr().out
    assert run("simulate --help") == 0
    assert "greyhound-large" in capsys.readouterr().out


def test_computation_can_be_that_of_a_run_that_was_kept(tmp_path: Path, capsys: Captured) -> None:
    file, kept = tmp_path / "run.json", tmp_path / "kept"
    line = f"simulate allreduce --task none --workers 3 --steps 6 --bandwidth 1000Gbps --latency 0s --json {file}"
    assert run(f"{line} --compute 'lognormal 100ms 0.5' --delay 'rank 1 50ms' --seed 3 --report {kept}") == 0
    first = json.loads(file.read_text())["runs"][0]
    assert run(f"{line} --compute {kept}") == 0
    again = json.loads(file.read_text())["runs"][0]
    assert again["seconds"] == pytest.approx(first["seconds"], rel=1e-4)
    assert again["wait_fraction"] == pytest.approx(first["wait_fraction"], rel=1e-3)
    assert run(f"compare allreduce local_sgd --task none --workers 2 --steps 3 --report {kept}") == 0
    capsys.readouterr()
    assert run(f"{line} --compute {kept}") == 2
    assert "holds 2 runs; name one of its files: 01-allreduce.jsonl, 02-local-sgd.jsonl" in capsys.readouterr().err
    assert run(f"{line} --compute {kept}/02-local-sgd.jsonl") == 0


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_a_period_can_be_speed_in_all_the_ways_to_give_it(name: str, tmp_path: Path, capsys: Captured) -> None:
    file, usual = tmp_path / "run.json", ob.strategy(name).settings["period"]
    how = f"--task none --workers 2 --samples {4 * 500} --compute async-diloco --json {file}"

    def ran(words: str) -> dict[str, Any]:
        assert run(f"simulate {words} {how}") == 0
        (seen,) = json.loads(file.read_text())["runs"]
        return dict(seen)

    short, more = ran(f"{name}:period=speed"), ran(f"{name} --set period=speed")
    assert f"{name} period=speed" in capsys.readouterr().out
    long = ran(f"{name}:period={usual},pace=speed")
    assert short["settings"]["period"] == more["settings"]["period"] == "speed"
    assert short["seconds"] == more["seconds"] == long["seconds"] < ran(name)["seconds"]


def test_a_diverged_run_is_null_in_json_and_says_so(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ob.tasks.TASKS, "wild", lambda: ob.tasks.regression(lr=1e200))
    file = tmp_path / "run.json"
    assert run(f"simulate allreduce --task wild --workers 2 --steps 9 --json {file}") == 0
    (seen,) = json.loads(file.read_text())["runs"]
    assert (seen["loss"], seen["diverged"]) == (None, True)
    assert "diverged" in capsys.readouterr().out


WRONG = {
    "simulate lokal_sgd": "no method is called 'lokal_sgd'; did you mean 'local_sgd'?",
    "compare allreduce nonsense": "no method is called 'nonsense'; there are self_clocked, allreduce, ",
    "cite nonsense": "no method is called 'nonsense'; there are self_clocked, allreduce, ",
    "list nonsense": "no method is called 'nonsense'; there are self_clocked, allreduce, ",
    "simulate local_sgd --set perod=8": "local_sgd has no setting 'perod'; did you mean 'period'?",
    "simulate allreduce --codec int8": "allreduce has no setting 'codec'; it has none",
    "simulate local_sgd --set period=0": "local_sgd: period is 0, but must be a whole number of at least 1",
    "simulate local_sgd:period=2.5": "local_sgd: period is '2.5', but must be speed or a whole number",
    "simulate local_sgd:period=equal": "but must be speed or a whole number; did you mean pace=equal?",
    "simulate local_sgd:period=speed,pace=equal": "is a period of 8 steps with pace='speed', but pace is 'equal'",
    "simulate local_sgd:period": "the setting 'period' is not understood; write it as name=value",
    "simulate local_sgd:period=2 --set period=3": "period is given twice, as '2' and '3'; leave one of them out",
    "simulate local_sgd --codec int9": "there is no codec 'int9'; use none, bf16",
    "simulate dasgd:merge=soup": "dasgd: merge is 'soup', but must be paper or correct",
    "simulate dasgd:xi=much": "dasgd: xi is 'much', but must be a number",
    "simulate allreduce --delay '2 ranks -5ms'": "the delay '2 ranks -5ms' cannot be used",
    "simulate allreduce --delay sometimes": "the delay 'sometimes' is not understood; use none, ",
    "simulate allreduce --workers 2 --delay '3 ranks 5ms'": "3 different ranks cannot be late among 2 workers",
    "simulate allreduce --workers 0": "--workers 0 cannot train; use 1 or more",
    "simulate allreduce --workers many": "--workers: 'many' is not a number such as",
    "simulate allreduce --steps 5 --seconds 2s": "a run has one end, but --steps 5 and --seconds 2s were given",
    "simulate allreduce --samples 9 --fixed-shares": "--fixed-shares is about --steps, and the run ends by --samples 9",
    "simulate --replay nowhere --fixed-shares": "--fixed-shares is for the record to say; with --replay, leave it out",
    "simulate allreduce --compute 5": "--compute: '5' has no unit; write 5ms or 5s",
    "simulate allreduce --compute bytedance": "--compute: the delay 'bytedance' is not understood; did you mean",
    "simulate allreduce --compute mine.csv": "--compute: the trace mine.csv cannot be read: No such file",
    "simulate allreduce --compute mine.jsonl": "--compute: there is no trace mine.jsonl; name a folder that --report",
    "simulate allreduce --bandwidth 0Gbps": "--bandwidth: a rate of '0Gbps' would never deliver anything",
    "simulate allreduce --latency -1ms": "--latency: '-1ms' is not a duration",
    "simulate allreduce --algorithm tree": "no all-reduce is called 'tree'; use 'ring' or 'halving_doubling'",
    "simulate allreduce --delay '1 rank 300'": "the delay '1 rank 300' cannot be used: '300' has no unit; write 300ms",
    "simulate allreduce --seconds 60": "--seconds: '60' has no unit; write 60ms or 60s",
    "simulate allreduce --latency 50": "--latency: '50' has no unit; write 50ms or 50s",
    "simulate allreduce --task digit": "no task is called 'digit'; did you mean 'digits'? use one of",
    "simulate allreduce --task mnist": "no task is called 'mnist'; use one of: digits, regression",
    "simulate allreduce --parameters 3M": "--parameters 3M does not go with --task digits",
    "train allreduce --task none": "--task none simulates time alone, and this run is live",
    "compare --live --bandwidth 1Gbps": "--bandwidth 1Gbps is for simulated runs, and this one is live; leave it out",
    "simulate allreduce --json nowhere/run.json": "--json nowhere/run.json lies in a folder that does not exist",
    "simulate allreduce --json .": "--json . is a folder; name a file in it",
    "simulate allreduce --trace nowhere/trace.json": "--trace nowhere/trace.json lies in a folder that does not exist",
    "demo --workers 1": "--workers 1 is too few; use 2 or more",
    "demo --steps none": "--steps: 'none' is not a number such as",
    "report nowhere": "there is no folder nowhere",
    "cite": "missing argument 'NAME'",
    "simulate --replay nowhere": "nowhere holds no order of a run",
    "simulate eager --replay nowhere": "METHOD eager is for the record to say; with --replay, leave it out",
    "simulate --replay nowhere --workers 3": "--workers 3 is for the record to say; with --replay, leave it out",
    "train eager --save .": "--save . holds other things; name a new folder",
    "simulate allreduce --speed 3": "no such option: --speed",
    "march": "no such command 'march'",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_gets_one_sentence_and_exit_code_2(line: str, capsys: Captured) -> None:
    assert run(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("offbeat: ")
    assert WRONG[line] in err


def test_under_torchrun_a_wrong_number_of_workers_is_refused(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run("train allreduce --workers 3") == 2
    assert "--workers 3 does not fit this job of 4 (WORLD_SIZE); leave it out" in capsys.readouterr().err


def test_runs_that_were_done_before_a_failure_are_kept(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runs.json"
    batches = iter(range(4))

    def running_dry(rank: int, step: int) -> object:
        if next(batches, None) is None:
            raise ob.OffbeatError("the well has run dry")
        return ob.tasks.regression().batch(rank, step)

    task = ob.Task(**{**vars(ob.tasks.regression()), "batch": running_dry})
    monkeypatch.setitem(ob.tasks.TASKS, "well", lambda: task)
    assert run(f"compare allreduce local_sgd --task well --workers 2 --steps 2 --json {file}") == 1
    assert [r["method"] for r in json.loads(file.read_text())["runs"]] == ["allreduce"]
    shown = capsys.readouterr()
    assert "allreduce" in shown.out
    assert shown.err.splitlines()[-1] == "offbeat: the well has run dry"


def test_ctrl_c_ends_with_130(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(rank: int, step: int) -> object:
        raise KeyboardInterrupt

    task = ob.Task(**{**vars(ob.tasks.regression()), "batch": interrupted})
    monkeypatch.setitem(ob.tasks.TASKS, "cut", lambda: task)
    assert run("simulate allreduce --task cut --workers 1 --steps 1") == 130
    assert capsys.readouterr().err.splitlines()[-1] == "offbeat: interrupted"


def test_the_module_is_the_command_and_nothing_said_means_help() -> None:
    said = [
        subprocess.run([sys.executable, "-m", "offbeat", *w], capture_output=True, text=True) for w in ((), ("-h",))
    ]
    assert [done.returncode for done in said] == [0, 0]
    assert said[0].stdout == said[1].stdout
    assert "compare" in said[0].stdout


def test_every_command_has_help_with_an_example(capsys: Captured) -> None:
    for command in ("demo", "list", "cite", "simulate", "train", "compare", "report"):
        assert run(f"{command} --help") == 0
        assert f"offbeat {command} " in capsys.readouterr().out.split("Usage:")[1].split("\n", 1)[1]


def test_version_is_that_of_the_package(capsys: Captured) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"offbeat {ob.__version__}\n"
