"""The scripts that docs/trainers.md shows run as they stand, with two processes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
from pathlib import Path

import pytest

from tests.support import forge
from tests.support.fitting import quiet
from tests.support.forge import Job

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r'^```python title="(\w+)_train\.py"\n(.*?)^```$', PAGE, flags=re.MULTILINE | re.DOTALL))


def test_every_trainer_has_a_script_on_the_page() -> None:
    assert sorted(SCRIPTS) == ["accelerate", "lightning", "ray", "transformers"]


def run_here(rank: int, folder: str) -> str:
    """As torchrun would start it, in a process that has imported torch before; what this rank prints."""
    os.chdir(folder)
    with quiet(), contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path("train.py", run_name="__main__")
    return told.getvalue()


@pytest.mark.parametrize("trainer", sorted(SCRIPTS.keys() - {"ray"}))  # Ray's: test_ray.py, where a cluster is
def test_the_script_of_a_trainer_runs(trainer: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"needs {trainer}: pip install 'offbeat[{trainer}]'")
    (tmp_path / "train.py").write_text(SCRIPTS[trainer], encoding="utf-8")
    (outcomes,) = forge.run([Job(run_here, 2, (str(tmp_path),))])
    assert all("Vectors went through shared memory." in told for told in forge.values(outcomes))
