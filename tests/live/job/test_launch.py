"""Local processes under torchrun's machinery: they train, agree with the simulator, and fail in a sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import offbeat as ob
from offbeat.cli import main
from offbeat.live.job.launch import launch
from offbeat.report.folder import recorded
from tests.support.launching import quick_launches

pytestmark = pytest.mark.live

HANGS_S = 300.0  # after so long a process is taken to hang


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """What is launched from this process; what is interrupted is launched from another one, and starts as for users."""
    with quick_launches():
        yield


def failing_batch(rank: int, step: int) -> tuple[Tensor, ...]:
    if rank == 1 and step == 2:
        raise ArithmeticError("the well has run dry")
    return torch.ones(2, 3), torch.ones(2, 1)


def killed_batch(rank: int, step: int) -> tuple[Tensor, ...]:
    if rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.ones(2, 3), torch.ones(2, 1)


def linear() -> nn.Module:
    return nn.Linear(3, 1)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_processes_end_with_the_weights_and_bytes_of_the_simulator_and_report_their_steps() -> None:
    heard: list[int] = []
    method, late = ob.local_sgd(period=3), ob.delays.chronic(1, 0.4)
    task = ob.Task(**{**vars(ob.tasks.regression()), "scheduler": halving})
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    environment = dict(os.environ)

    run = launch(method, task, workers=3, steps=8, seed=5, delays=late, progress=heard.append)
    assert run.foreign == (), "the meetings of the job itself are ours"

    assert {s: signal.getsignal(s) for s in handlers} == handlers
    assert dict(os.environ) == environment
    twin = ob.simulate(method, task, workers=3, steps=8, seed=5)
    torch.testing.assert_close(run.final, twin.final)
    torch.testing.assert_close(run.losses, twin.losses)
    assert run.metrics == pytest.approx(dict(twin.metrics))
    assert (run.strategy, run.workers, run.seed, run.steps) == (twin.strategy, 3, 5, 8)
    assert run.gradients == (8, 8, 8)
    assert run.wire_bytes == pytest.approx(twin.wire_bytes, rel=0.01)  # the shares of a ring are rounded
    assert heard == sorted(set(heard))
    assert heard[-1] == 8
    # Rank 1 sleeps 8 × 400 ms; rank 0 waits for it at steps 3 and 6, and is then two steps ahead.
    assert 3.2 <= run.seconds == max(run.finished_s)
    assert run.wait_s[0] > run.wait_s[1]
    assert 0 < run.wait_fraction < 1


def test_a_worker_that_raises_ends_the_run_with_its_rank_and_its_error() -> None:
    task = ob.Task(linear, mse_loss, failing_batch, partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(ob.OffbeatError) as caught:
        launch(ob.allreduce(), task, workers=2, steps=5)
    assert str(caught.value) == "rank 1 failed: ArithmeticError: the well has run dry"


def test_a_worker_that_is_killed_ends_the_run_with_a_sentence() -> None:
    task = ob.Task(linear, mse_loss, killed_batch, partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(ob.OffbeatError) as caught:
        launch(ob.allreduce(), task, workers=2, steps=5)
    assert "\n" not in str(caught.value)
    assert "rank 1 failed: it was ended by SIGKILL" in str(caught.value) or "lost a peer" in str(caught.value)


def test_elastic_is_told_how_long_a_worker_may_take_to_end_before_it_reads_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else Ctrl-C while workers import torch, deaf to it, would take elastic's half minute."""
    said: list[str | None] = []

    def config(**how: object) -> None:
        said.append(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"))
        raise NotImplementedError

    monkeypatch.setattr("offbeat.live.job.launch.LaunchConfig", config)
    with pytest.raises(NotImplementedError):
        launch(ob.allreduce(), ob.tasks.regression(), workers=1, steps=1)
    assert said == ["5"]


def test_what_cannot_be_sent_to_another_process_is_refused_before_any_is_started() -> None:
    task = ob.Task(lambda: nn.Linear(3, 1), mse_loss, failing_batch, partial(torch.optim.SGD, lr=0.1), name="mine")
    with pytest.raises(ValueError, match=r"the task 'mine' cannot be sent to other processes .* not lambdas"):
        launch(ob.allreduce(), task, workers=2, steps=1)
    with pytest.raises(ValueError, match="the function given as delays cannot be sent"):
        launch(ob.allreduce(), ob.tasks.regression(), workers=2, steps=1, delays=lambda step, rank: 0.0)
    with pytest.raises(ValueError, match="0 workers cannot train; use 1 or more"):
        launch(ob.allreduce(), ob.tasks.regression(), workers=0, steps=1)
    with pytest.raises(ValueError, match="steps=-1 cannot end a run"):
        launch(ob.allreduce(), ob.tasks.regression(), workers=1, steps=-1)
    with pytest.raises(ValueError, match="3 different ranks cannot be late among 2 workers"):
        launch(ob.allreduce(), ob.tasks.regression(), workers=2, steps=1, delays=ob.delays.random(3, 0.1))


def offbeat(*words: str) -> list[str]:
    return [sys.executable, "-m", "offbeat", *words]


def test_compare_live_writes_one_run_for_each_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.json"
    common = ["--task", "regression", "--workers", "2", "--steps", "4", "--delay", "1 rank 20ms", "--json", str(file)]
    assert main(["compare", "--live", "allreduce", "qsgd:bits=4", *common]) == 0
    runs = json.loads(file.read_text())["runs"]
    assert [(run["method"], run["mode"], run["workers"], run["steps"]) for run in runs] == [
        ("allreduce", "live", 2, 4),
        ("qsgd", "live", 2, 4),
    ]
    assert all(run["seconds"] >= 0.08 and 0 < run["wait_fraction"] < 1 and run["wire_bytes"] > 0 for run in runs)
    shown = capsys.readouterr().out
    assert "qsgd bits=4" in shown
    assert "speed-up" in shown


def test_train_without_a_strategy_takes_the_default_names_its_carrier_and_its_folder_can_be_simulated_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, file = str(tmp_path / "kept"), tmp_path / "run.json"
    words = ["--task", "regression", "--workers", "2", "--steps", "5", "--compute", "20ms", "--delay", "rank 1 100ms"]
    assert main(["train", *words, "--fixed-shares", "--report", kept, "--json", str(file)]) == 0
    (live,) = json.loads(file.read_text())["runs"]
    assert (live["method"], live["mode"], live["workers"]) == ("self_clocked", "live", 2)
    assert live["carriers"] == ["shm"]
    assert "vectors went through shm" in Path(kept, "report.html").read_text()
    capsys.readouterr()
    words = ["--task", "none", "--workers", "2", "--steps", "5", "--bandwidth", "1000Gbps", "--latency", "0s"]
    assert main(["simulate", "allreduce", *words, "--compute", kept, "--json", str(file)]) == 0
    assert "computation: a trace of 5 steps of 2 ranks" in " ".join(capsys.readouterr().out.split())
    (again,) = json.loads(file.read_text())["runs"]
    assert again["seconds"] >= 5 * 0.12  # all wait for rank 1, whose own time holds its computation and its delay
    own = recorded(Path(kept)).trace.busy_s(2)
    assert again["seconds"] == pytest.approx(sum(map(max, zip(*own, strict=True))), rel=0.01)


def test_under_torchrun_train_is_a_member_and_only_rank_0_speaks(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "offbeat", "train", "allreduce", "--task", "regression", "--steps", "4", "--json", str(file)]
    done = subprocess.run(torchrun + words, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(file.read_text())["runs"]
    assert (run["workers"], run["steps"], run["mode"]) == (2, 4, "live")
    assert done.stdout.count("bytes sent") == 1


SWALLOWS = """
import sys, time
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as Agent
plain, swallowed = Agent._monitor_workers, []
def monitor(self, *args):
    while not swallowed:
        try:
            time.sleep(0.05)
        except Exception as error:
            swallowed.append(error)
    return plain(self, *args)
Agent._monitor_workers = monitor
from offbeat.cli import run
run()
"""


def test_ctrl_c_that_a_library_swallows_ends_a_live_run_all_the_same() -> None:
    words = [sys.executable, "-c", SWALLOWS, "train", "allreduce", "--task", "regression", "--workers", "2"]
    with subprocess.Popen(
        [*words, "--compute", "50ms", "--steps", "100000"], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        try:
            while "of 100000" not in process.stderr.readline():
                pass
            os.kill(process.pid, signal.SIGINT)  # the launcher alone: its workers know of nothing
            process.communicate(timeout=HANGS_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.0, 3.0])
def test_ctrl_c_ends_a_live_run_with_130_and_without_a_traceback(after_s: float) -> None:
    words = offbeat("train", "allreduce", "--task", "regression", "--workers", "2", "--compute", "50ms")
    with subprocess.Popen(
        [*words, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()  # what is about to run: said when all options have been read
        time.sleep(after_s)  # any moment will do: as workers are started, among their imports, or as they train
        os.killpg(process.pid, signal.SIGINT)
        try:
            _, rest = process.communicate(timeout=HANGS_S)
        finally:
            with suppress(ProcessLookupError):  # all have ended, as they should
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, first + rest
    assert "Traceback" not in rest, rest
