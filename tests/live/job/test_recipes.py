"""The scripts of the how-to pages and of examples/ run with two processes: one under plain torchrun, the others as
torchrun would start them, in processes that are forked."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from tests.support import fitting, forge
from tests.support.forge import Job
from tests.support.long import long
from tests.support.ports import hold_port

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[3]


def scripts(page: str) -> dict[str, str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return dict(re.findall(r'^```python title="(\w+)\.py"\n(.*?)^```$', text, flags=re.MULTILINE | re.DOTALL))


# Each page answers one question, with scripts that run as they stand.
PAGES = {
    "from-ddp.md": ["from_ddp"],
    "launch.md": ["where"],
    "keep-going.md": ["keeps_going"],
    "checkpoint.md": ["saves", "resume"],
    "evaluate.md": ["evaluate"],
    "share.md": ["share_work"],
    "slow-loaders.md": ["slow_loader"],
    "mixed-gpus.md": ["mixed_gpus"],
    "uneven-sequences.md": ["uneven_lengths"],
    "spot.md": ["spot"],
    "thin-networks.md": ["thin"],
    "learning-rate.md": ["rates"],
    "compile.md": ["compiled"],
    "profile.md": ["why"],
}
RECIPES = {name: text for page in PAGES for name, text in scripts(page).items()}


def started(script: Path, *arguments: str) -> subprocess.Popen[str]:
    """A job of two under torchrun."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [sys.executable, *torchrun, str(script), *arguments],
        cwd=script.parent,
        env={**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it has printed, on stdout and stderr."""
    try:
        return process.communicate(timeout=300)
    finally:
        process.kill()


def run(script: Path, *arguments: str) -> str:
    """What it prints."""
    process = started(script, *arguments)
    out, err = ended(process)
    assert process.returncode == 0, err[-4000:]
    return out


def quick(script: Path, *arguments: str, size: int = 2) -> str:
    """What it prints, in processes that have imported torch before."""
    (outcomes,) = forge.run([Job(run_here, size, (str(script), *arguments))])
    return "".join(forge.values(outcomes))


def run_here(rank: int, script: str, *arguments: str) -> str:
    """The same in a process that has imported torch before; what this rank prints.

    What is compiled is traced and run without C++: a C++ compiler would take most of the time of all recipes.
    """
    os.chdir(Path(script).parent)
    sys.argv = [script, *arguments]
    traced = mock.patch("torch.compile", functools.partial(torch.compile, backend="aot_eager"))
    with traced, contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(script, run_name="__main__")
    return told.getvalue()


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("spot", "resume", "saves")])
def test_a_recipe_runs_with_two_processes(name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(RECIPES[name], encoding="utf-8")
    told = quick(script, size=1 if name == "rates" else 2)  # rates are searched in the simulator
    if name == "from_ddp":
        assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == {"weight", "bias"}
        assert told.count("rank  steps  own time") == 2
    if name in ("slow_loader", "mixed_gpus"):
        assert "Rank 1 is chronically slow" in told
    if name == "uneven_lengths":
        used = re.findall(r"\[(\d+), (\d+)\]", told)  # how many samples each has used, as each knows
        assert len(used) == 2
        assert all(int(number) > 0 for pair in used for number in pair)
    if name == "compiled":
        has_learned(told)
    if name == "where":
        assert sorted(re.findall(r"rank \d of 2 on cpu, vectors through shm", told)) == [
            f"rank {rank} of 2 on cpu, vectors through shm" for rank in range(2)
        ]
    if name == "saves":
        assert sorted(re.findall(r"rank \d began with step \d+", told)) == [
            f"rank {rank} began with step 0" for rank in range(2)
        ]
    if name in ("share_work", "keeps_going"):
        assert "512 of 512 samples were used once, in each of 2 epochs." in told
    if name == "evaluate":
        losses = [float(loss) for loss in re.findall(r"epoch \d: held-out loss (\d+\.\d+)", told)]
        assert len(losses) == 3
        assert losses[-1] < losses[0]
    if name == "thin":
        sent = [float(megabytes) for megabytes in re.findall(r": (\d+\.\d+) MB", told)]
        assert len(sent) == 4
        assert sent == sorted(sent, reverse=True)
        assert sent[0] > 6 * sent[1] > 12 * sent[2]
    if name == "why":
        assert "Rank 1 is chronically slow" in told
        assert "and the others waited" in told
    if name == "rates":
        found = re.findall(r"(\w+): (\S+) of the rate of all-reduce", told)
        assert {method for method, _ in found} == {"local_sgd", "self_clocked"}
        assert all(0.5 <= float(ratio) <= 2 for _, ratio in found), told  # the rule of the page, on this small task


def test_the_loop_beside_the_trainers_scripts_runs_with_two_processes() -> None:
    assert all("rank  steps  own time" in told for told in fitting.told_by_script("torchrun"))


def has_learned(told: str) -> None:
    ends = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", told)]
    assert len(ends) == 2
    assert max(ends) < 4  # 8 is what knowing nothing costs


@long
def test_what_is_compiled_by_a_compiler_runs_with_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "compiled.py"
    script.write_text(RECIPES["compiled"], encoding="utf-8")
    has_learned(run(script))  # the compiler starts processes of its own, which a fork is not made for


def test_a_job_that_is_told_to_leave_ends_after_its_step_and_goes_on_from_there(tmp_path: Path) -> None:
    script = tmp_path / "spot.py"
    script.write_text(RECIPES["spot"], encoding="utf-8")
    job = started(script)
    assert job.stdout is not None
    begun = ""
    while len(re.findall("begins with", begun)) < 2 and (line := job.stdout.readline()):
        begun += line  # two processes write here, at times into one line
    job.send_signal(signal.SIGTERM)  # to torchrun, as a scheduler does
    left, err = ended(job)
    assert sorted(re.findall(r"rank (\d) begins with step 0", begun)) == ["0", "1"], err[-4000:]
    ends = {int(rank): int(step) for rank, step in re.findall(r"rank (\d) ends with step (\d+)", left)}
    assert ends.keys() == {0, 1}, err[-4000:]
    assert max(ends.values()) < 300
    kept = torch.load(tmp_path / "spot.pt", weights_only=True)
    assert kept["step"] == ends[0]

    (outcomes,) = forge.run([Job(run_here, 2, (str(script),))])
    for rank, told in enumerate(forge.values(outcomes)):
        assert told.splitlines() == [f"rank {rank} begins with step {ends[0]}", f"rank {rank} ends with step 300"]
    learned = torch.load(tmp_path / "spot.pt", weights_only=True)
    assert learned["step"] == 300
    far = (learned["model"]["weight"] - 1).abs().mean()  # the sum of its inputs is what is to be learned
    assert far < (kept["model"]["weight"] - 1).abs().mean()


def test_two_islands_learn_are_saved_and_go_on(tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(scripts("sharded.md")["sharded"], encoding="utf-8")
    (outcomes,) = forge.run([Job(run_here, 4, (str(script),))])
    told = forge.values(outcomes)
    assert [line.split(":")[0] for line in told] == [f"rank {r}, island {r // 2} of 2" for r in range(4)]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["island-0", "island-1"]


def test_the_pages_have_the_scripts_that_are_meant() -> None:
    assert {page: list(scripts(page)) for page in PAGES} == PAGES


def test_a_job_goes_on_from_its_checkpoint_with_more_workers(tmp_path: Path) -> None:
    script = tmp_path / "resume.py"
    script.write_text(RECIPES["resume"], encoding="utf-8")
    for size, begins in ((2, 0), (3, 2)):
        (outcomes,) = forge.run([Job(run_here, size, (str(script),))])
        told = "".join(forge.values(outcomes))
        assert sorted(told.splitlines()) == [f"rank {r} of {size} begins with epoch {begins}" for r in range(size)]
    saved = torch.load(tmp_path / "job.pt", weights_only=True)
    assert saved["share"]["epoch"] == 4
    assert (saved["model"]["weight"] - 1).abs().mean() < 0.9  # the sum of its inputs is what is to be learned


def test_a_job_writes_its_checkpoints_and_goes_on_from_the_last_with_fewer_workers(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(RECIPES["saves"], encoding="utf-8")
    begun = []
    for size in (3, 2):
        (outcomes,) = forge.run([Job(taken_up, size, (str(script),))])
        told = "".join(forge.values(outcomes))
        found = re.findall(r"rank (\d) began with step (\d+)", told)
        assert sorted(int(rank) for rank, _ in found) == list(range(size))
        begun.append({int(step) for _, step in found})
    assert begun[0] == {0}
    assert len(begun[1]) == 1
    assert 0 < min(begun[1]) <= 1000


def taken_up(rank: int, script: str) -> str:
    os.environ["OFFBEAT_RESUME"] = str(Path(script).parent / "checkpoints")
    return run_here(rank, script)


def test_the_gpt_learns_beside_a_late_worker() -> None:
    told = quick(ROOT / "examples" / "gpt.py", "--steps", "40")
    assert "Rank 1 is chronically slow" in told
    found = re.search(r"held-out loss (\d\.\d+)", told)
    assert found is not None
    assert float(found[1]) < 4.0  # 4.6 is what guessing costs; 3.0 to 3.2 on a quiet machine


def test_the_image_model_reads_most_digits() -> None:
    found = re.search(r"accuracy (\d+\.\d)%", quick(ROOT / "examples" / "image.py", "--steps", "60"))
    assert found is not None
    assert float(found[1]) > 75


@pytest.mark.skipif(find_spec("minigrid") is None, reason="needs MiniGrid: pip install 'offbeat[examples]'")
def test_ppo_learns_to_find_the_goal_though_episodes_end_when_they_end() -> None:
    told = quick(ROOT / "examples" / "ppo.py", "--world", "MiniGrid-Empty-5x5-v0")
    assert "on new episodes, 2 workers" in told
    # 0.2 is what walking about finds, 0.8 to 0.95 what is learned in 40 turns; it may be lost again in the last ones.
    assert max(map(float, re.findall(r"mean return (\d\.\d+)", told))) > 0.5


# SLURM and Kubernetes: what the page shows starts one job, on stand-ins for two nodes.

NODES = {
    "scontrol": "echo 127.0.0.1",
    "getent": "true",
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run --local-addr 127.0.0.1 "$@"',
    "offbeat": f'exec "{sys.executable}" -m offbeat "$@"',
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        for node in 0 1; do OFFBEAT_HOST=$node SLURM_NODEID=$node JOB_COMPLETION_INDEX=$node "$@" & done
        wait -n && wait -n || { kill $(jobs -p); exit 1; }
        """,
}


def shown(language: str) -> list[str]:
    """The blocks of a language on the page about launching, which stand in tabs."""
    text = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    found = re.findall(rf"^    ```{language}\n(.*?)^    ```$", text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def pods() -> tuple[dict[str, Any], dict[str, Any]]:
    """The Service and the Job of the manifest."""
    service, job = yaml.safe_load_all(shown("yaml")[0])
    return service, job


def kubernetes() -> str:
    """What each pod of the manifest runs."""
    (container,) = pods()[1]["spec"]["template"]["spec"]["containers"]
    return "srun " + shlex.join(container["command"])


def slurm(block: int) -> str:
    """The lines of the batch script, with the last command as it is there or as the second block has it."""
    script, other = shown("bash")
    return script if block == 0 else script.partition("srun")[0] + other


@pytest.mark.parametrize(
    "script",
    [pytest.param(slurm(0), marks=long), slurm(1), kubernetes()],
    ids=["SLURM", "SLURM and offbeat launch", "Kubernetes"],
)
def test_the_scripts_for_clusters_start_one_job_on_two_nodes(script: str, tmp_path: Path) -> None:
    with hold_port() as held:
        port = str(held.getsockname()[1])
    for here, there in (("train-0.train", "127.0.0.1"), ("29400", port), ("-n 4", "-n 1"), ("node 4", "node 1")):
        script = script.replace(here, there)
    for name, text in NODES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(RECIPES["where"], encoding="utf-8")
    slurms = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    env = {**os.environ, **path, **slurms, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = sorted(re.findall(r"rank \d of \d on cpu, vectors through shm and tcp", done.stdout))
    assert ranks == [f"rank {rank} of 2 on cpu, vectors through shm and tcp" for rank in range(2)]


def test_the_manifest_for_kubernetes_names_its_pods_as_its_command_does() -> None:
    service, job = pods()
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"][-1]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--job {name}-0.{pod['subdomain']}:" in command
    assert spec["completionMode"] == "Indexed"
    assert f"--hosts {spec['completions']} " in command
    assert spec["completions"] == spec["parallelism"]
    assert f"-n {container['resources']['limits']['nvidia.com/gpu']} " in command
