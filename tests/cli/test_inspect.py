"""``offbeat inspect``: which checkpoints there are, and whether each is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.live.host import checkpoint
from tests.support.saved import packed, tensors

Captured = pytest.CaptureFixture[str]


def save(folder: Path, step: int) -> Path:
    about = {"step": step, "method": "eager(wait='first')", "workers": 3, "parameters": 1234567}
    return checkpoint.write(folder, packed(tensors()), memoryview(b"state"), about)


def test_each_checkpoint_has_a_line_with_its_step_its_method_and_whether_it_is_whole(
    tmp_path: Path, capsys: Captured
) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    assert main(["inspect", str(tmp_path)]) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["checkpoint", "step", "saved", "method", "workers", "parameters", "size", "whole"]
    assert [(row[0], row[1], row[4:7], row[-1]) for row in rows] == [
        ("checkpoint-2", "20", ["eager", "3", "1,234,567"], "yes"),
        ("checkpoint-1", "10", ["eager", "3", "1,234,567"], "yes"),
    ]


@pytest.mark.parametrize("file", [checkpoint.MODEL, checkpoint.MANIFEST])
def test_what_is_damaged_is_named_and_the_exit_code_says_so(file: str, tmp_path: Path, capsys: Captured) -> None:
    path = save(tmp_path, 10) / file
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["inspect", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert str(path) in out
    assert out.splitlines()[1].split()[-1] == "no"


def test_as_json_it_is_the_manifests(tmp_path: Path, capsys: Captured) -> None:
    place = save(tmp_path, 10)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["place"], found["damage"], found["step"], found["workers"]) == (str(place), "", 10, 3)
    assert found["files"][checkpoint.STATE]["bytes"] == 5


def test_a_folder_without_any_says_so(tmp_path: Path, capsys: Captured) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"there is no checkpoint in {tmp_path}\n"
