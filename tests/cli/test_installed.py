"""What a user has after `pip install offbeat`, and nothing else: built, installed and run where only its needs are.

Nothing is fetched: the needs are linked from this environment, as far as offbeat's own metadata name them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import offbeat as ob
from offbeat.cli import main

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
NO_FETCHING = ("--quiet", "--no-index", "--no-deps")


def output(*words: str | Path, cwd: Path = ROOT, code: int = 0) -> str:
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=300, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sdist")
    output(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", place)
    (made,) = place.iterdir()
    return made


def wheel_of(source: Path, place: Path) -> Path:
    output(*PIP, "wheel", *NO_FETCHING, "--no-build-isolation", "--wheel-dir", place, source)
    (made,) = place.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(sdist, tmp_path_factory.mktemp("wheel"))


def needs(wanted: list[str], extras: set[str]) -> dict[str, Distribution]:
    """The distributions that these requirements name, and those that they need in turn."""
    found: dict[str, Distribution] = {}
    left = [(Requirement(words), extras) for words in wanted]
    seen = set[tuple[str, frozenset[str]]]()
    while left:
        need, given = left.pop()
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in given | {""}):
            continue
        if (key := (need.name.lower(), frozenset(need.extras))) not in seen:
            seen.add(key)
            found[need.name] = one = distribution(need.name)
            left += [(Requirement(words), set(need.extras)) for words in one.requires or ()]
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs' folder of an environment with the wheel and its needs."""
    place = tmp_path_factory.mktemp("installed") / "env"
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    output(*PIP, "--python", python, "install", *NO_FETCHING, wheel)
    (packages,) = place.glob("lib/python*/site-packages")
    (metadata,) = packages.glob("offbeat-*.dist-info")
    for one in needs(Distribution.at(metadata).requires or [], set()).values():
        tops = {path.parts[0] for path in one.files or ()}
        for top in tops - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(one.locate_file(top))))
    return place / "bin"


def test_the_wheel_is_the_same_from_the_sources_and_from_the_sdist(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(wheel_of(ROOT, tmp_path)) as direct:
        assert {one.filename: one.CRC for one in ours.infolist()} == {
            one.filename: one.CRC for one in direct.infolist()
        }


def test_the_sdist_has_what_make_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert names >= {"Makefile", "constraints.txt", "pyproject.toml", "LICENSE", "NOTICE", "tests/conftest.py"}


def test_nothing_is_missing_and_nothing_of_the_extras_is_there(installed: Path) -> None:
    assert output(*PIP, "--python", installed / "python", "check").strip() == "No broken requirements found."
    look = "from importlib.util import find_spec as f; print([n for n in ('plotly', 'pytest', 'ray') if f(n)], end='');"
    found, _, where = output(installed / "python", "-c", look + "print(f('offbeat').origin)").partition("]")
    assert found == "["
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_the_command_says_its_version_and_its_methods(installed: Path) -> None:
    assert output(installed / "offbeat", "--version").strip() == f"offbeat {ob.__version__}"
    listed = output(installed / "offbeat", "list")
    assert all(name in listed for name in ob.STRATEGIES)


def test_the_digits_are_in_the_wheel_and_are_learned_from(installed: Path, tmp_path: Path) -> None:
    words = ("simulate", "eager", "--workers", "2", "--steps", "40", "--json", "run.json")
    output(installed / "offbeat", *words, cwd=tmp_path)
    (run,) = json.loads((tmp_path / "run.json").read_text())["runs"]
    assert run["task"] == "digits"
    assert run["accuracy"] > 0.5
    kept = installed.parent.glob("lib/python*/site-packages/offbeat/tasks/data/*")
    assert {file.name for file in kept} == {"digits.npz", "NOTICE.digits.txt"}


def test_the_demo_runs_without_plotly_and_says_how_to_get_the_page(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "runs" / "demo"
    kept.mkdir(parents=True)
    for old in ("run.json", "report.html"):
        (kept / old).write_text("of an earlier run")
    told = output(installed / "offbeat", "demo", "--workers", "2", "--steps", "3", cwd=tmp_path)
    assert "DDP (torch)" in told
    assert (
        "wrote runs/demo; its page needs Plotly, which is not installed: "
        "pip install 'offbeat[report]', then offbeat report runs/demo\n" in told
    )
    assert not (kept / "report.html").exists()
    again = output(installed / "offbeat", "report", "runs/demo", "--trace", "trace.json", cwd=tmp_path, code=2)
    assert "nonblocking" in again
    assert "the page needs Plotly, which is not installed; pip install 'offbeat[report]'" in again
    assert (tmp_path / "trace.json").exists()
    # With Plotly, what was kept becomes a page.
    monkeypatch.chdir(tmp_path)
    assert main(["report", "runs/demo"]) == 0
    assert (kept / "report.html").stat().st_size > 1e6
