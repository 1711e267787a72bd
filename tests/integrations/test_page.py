"""The scripts that docs/trainers.md shows run as they stand, with two processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r'^```python title="(\w+)_train\.py"\n(.*?)^```$', PAGE, flags=re.MULTILINE | re.DOTALL))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_every_trainer_has_a_script_on_the_page() -> None:
    assert sorted(SCRIPTS) == ["accelerate", "lightning", "ray", "transformers"]


@pytest.mark.parametrize("trainer", sorted(SCRIPTS))
def test_the_script_of_a_trainer_runs(trainer: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"needs {trainer}: pip install 'offbeat[{trainer}]'")
    (tmp_path / "train.py").write_text(SCRIPTS[trainer], encoding="utf-8")
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *(() if trainer == "ray" else TORCHRUN), "train.py"],
        cwd=tmp_path,
        env={**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Vectors went through shared memory." in done.stdout + done.stderr
