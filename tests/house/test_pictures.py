"""Pictures that are made from runs are what the runs give now; a screenshot is not older than its page."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import offbeat as ob

ROOT = Path(__file__).parents[2]


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures, screenshots = _tool("pictures"), _tool("screenshots")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_its_run_gives(name: str) -> None:
    there = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
    assert there == pictures.PICTURES[name](), "run: make readme"


def test_every_picture_is_made_by_a_command() -> None:
    made = {*pictures.PICTURES, screenshots.PICTURE.name, "study.svg"}
    assert {path.name for path in (ROOT / "docs" / "images").iterdir()} == made


def test_the_answers_of_the_tree_are_methods() -> None:
    answers = [answer for _, answer, _ in pictures.LADDER if answer.startswith('"')]
    assert [ob.named(answer.strip('"')).name for answer in answers] == [
        "allreduce",
        "local_sgd",
        "nonblocking",
        "eager",
    ]


@pytest.mark.skipif(not (ROOT / "records").exists(), reason="a source distribution has no records")
def test_the_picture_of_the_study_is_what_its_records_give(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    command = re.search(r"`python (benchmarks/plot.py .*? )docs/images/study.svg`", page)
    assert command is not None, "the page names the command"
    subprocess.run([sys.executable, *command[1].split(), str(tmp_path / "study.svg")], cwd=ROOT, check=True)
    assert (tmp_path / "study.svg").read_bytes() == (ROOT / "docs" / "images" / "study.svg").read_bytes()


def test_the_screenshot_is_of_the_page_as_it_is_now(tmp_path: Path) -> None:
    assert screenshots.digest_in(screenshots.PICTURE) == screenshots.digest(screenshots.report(tmp_path)), (
        "the page of a report has changed; run, with Chromium: python tools/screenshots.py"
    )


def test_a_page_with_other_words_is_another_page_and_one_with_other_numbers_is_not(tmp_path: Path) -> None:
    pages = [tmp_path / f"{n}.html" for n in range(3)]
    for page, text in zip(pages, ("<h2>Loss</h2>1.25", "<h2>Loss</h2>-1e-3", "<h2>Waiting</h2>1.25"), strict=True):
        page.write_text(text, encoding="utf-8")
    first, numbers, words = map(screenshots.digest, pages)
    assert first == numbers != words
