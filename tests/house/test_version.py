"""What is built carries every file of ours, and the version, which stands in one place."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import offbeat as ob

ROOT = Path(ob.__file__).parents[2]


def test_pyproject_takes_the_version_from_the_python_file() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in told["project"]
    assert told["project"]["dynamic"] == ["version"]
    assert f'__version__ = "{ob.__version__}"' in (ROOT / told["tool"]["hatch"]["version"]["path"]).read_text()


def test_the_changelog_begins_with_this_version() -> None:
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == ob.__version__


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_the_wheel_carries_the_version(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith(f"offbeat-{ob.__version__}-")
    with zipfile.ZipFile(wheel) as packed:
        assert _version(packed.read(f"offbeat-{ob.__version__}.dist-info/METADATA")) == ob.__version__


def test_the_wheel_carries_every_file_of_the_package(built: Path) -> None:
    files = {f.relative_to(ROOT / "src").as_posix() for f in (ROOT / "src").rglob("*") if f.is_file()}
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert {f for f in files if "__pycache__" not in f} - set(packed.namelist()) == set()


def test_every_folder_of_the_package_says_what_it_is() -> None:
    folders = {file.parent for file in (ROOT / "src" / "offbeat").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_source_archive_carries_the_version(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        info = packed.extractfile(f"offbeat-{ob.__version__}/PKG-INFO")
        assert info is not None
        assert _version(info.read()) == ob.__version__


def _version(metadata: bytes) -> str | None:
    return email.message_from_bytes(metadata)["Version"]
