"""The scripts of docs/recipes.md and of examples/ run under plain torchrun, with two processes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forge
from tests.support.forge import Job

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[3]


def scripts(page: str) -> dict[str, str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return dict(re.findall(r'^```python title="(\w+)\.py"\n(.*?)^```$', text, flags=re.MULTILINE | re.DOTALL))


RECIPES = scripts("recipes.md")


def run(script: Path, *arguments: str) -> str:
    """What it prints, as a job of two."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), *arguments],
        cwd=script.parent,
        env={**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_here(rank: int, script: str) -> str:
    """The same in a process that has imported torch before; what this rank prints."""
    os.chdir(Path(script).parent)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(script, run_name="__main__")
    return told.getvalue()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_with_two_processes(name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(RECIPES[name], encoding="utf-8")
    if name == "compiled":  # the compiler starts processes of its own, which a fork is not made for
        told = run(script)
    else:
        (outcomes,) = forge.run([Job(run_here, 2, (str(script),))])
        told = "".join(forge.values(outcomes))
    if name in ("slow_loader", "mixed_gpus"):
        assert "Rank 1 is chronically slow" in told
    if name == "uneven_lengths":
        assert re.findall(r"\[(\d+), (\d+)\]", told), "how many samples each has used"


def test_two_islands_learn_are_saved_and_go_on(tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(scripts("sharded.md")["sharded"], encoding="utf-8")
    (outcomes,) = forge.run([Job(run_here, 4, (str(script),))])
    told = forge.values(outcomes)
    assert [line.split(":")[0] for line in told] == [f"rank {r}, island {r // 2} of 2" for r in range(4)]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["island-0", "island-1"]


def test_the_page_has_the_recipes_that_are_meant() -> None:
    assert list(RECIPES) == ["from_ddp", "slow_loader", "mixed_gpus", "uneven_lengths", "compiled"]


def test_the_gpt_learns_beside_a_late_worker() -> None:
    told = run(ROOT / "examples" / "gpt.py", "--steps", "40")
    assert "Rank 1 is chronically slow" in told
    found = re.search(r"held-out loss (\d\.\d+)", told)
    assert found is not None
    assert float(found[1]) < 3.5  # 4.6 is what guessing costs


def test_the_image_model_reads_most_digits() -> None:
    found = re.search(r"accuracy (\d+\.\d)%", run(ROOT / "examples" / "image.py", "--steps", "60"))
    assert found is not None
    assert float(found[1]) > 75
