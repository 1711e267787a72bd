"""The main job, small: real processes run DDP and the methods of five papers one after the other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import offbeat as ob
from offbeat.cli.demo import judged
from offbeat.live.job.launch import launch_all
from offbeat.live.job.worker import Job
from offbeat.report import folder
from offbeat.report.table import Record
from offbeat.runs.result import LiveRun
from tests.support.launching import quick_launches

live = pytest.mark.live

PAPERS = ("adaptive", "dasgd", "eager", "wagma", "nonblocking")
HANGS_S = 600.0  # after so long a process is taken to hang


@live
def test_the_demo_of_a_death_shows_that_ddp_ends_and_that_the_others_go_on_with_every_sample(tmp_path: Path) -> None:
    words = ["demo", "--kill", "--workers", "3", "--steps", "10"]
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", *words], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 2 was killed by SIGKILL") == 2
    assert done.stderr.count("the others go on, and it is started again in 200 ms") == 1
    assert re.search(r"DDP ends after 1[56] of 60 steps", done.stdout)
    out = " ".join(done.stdout.split())
    assert "rank 2 is killed ended by the death" in out
    assert out.count("5,760 of 5,760 samples were used once.") == 2
    assert out.count("Rank 2 died") == 1


@live
def test_the_demo_compares_ddp_with_the_five_papers_and_leaves_a_report(tmp_path: Path) -> None:
    words = ["demo", "--workers", "2", "--steps", "12", "--json", "runs.json", "--trace", "trace.json"]
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", *words], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [run["method"] for run in runs] == [
        "ddp",
        *PAPERS,
        "self_clocked",
        "ddp",
        "allreduce",
        *["self_clocked"] * 2,
    ]
    assert all(run["workers"] == 2 and run["mode"] == "live" and run["wire_bytes"] > 0 for run in runs)
    settings = "momentum 0.8; eager wait=0.5 grace=0.0, wagma merge=correct, nonblocking scale_lr=True."
    assert settings in " ".join(done.stdout.split())
    assert "Injected: one worker, another one each step, is slow, by 100 ms" in " ".join(done.stdout.split())
    assert "wrote runs/demo/report.html" in done.stderr
    assert "rank 1 is slow in every step, by 100 ms" in " ".join(done.stdout.split())
    assert "wrote runs/demo/chronic/report.html" in done.stderr
    story, chronic = (folder.read(tmp_path / "runs" / name) for name in ("demo", "demo/chronic"))
    assert [one.record.label for one in chronic.recordings] == [
        "DDP (torch)",
        "allreduce, shared",
        "self_clocked, fixed",
        "self_clocked, shared",
    ]
    steps = [
        Counter(rank for rank, _ in {(span.rank, span.step) for span in one.trace.spans}) for one in chronic.recordings
    ]
    assert steps[:3] == [{0: 12, 1: 12}] * 3
    assert steps[3].total() == 24
    for recording in [*story.recordings, *chronic.recordings]:
        assert recording.trace.series["loss"][-1].samples == 2 * 12 * 32  # all learn from the same number of samples
        assert {span.rank for span in recording.trace.spans} == {0, 1}
        assert sum(recording.trace.wait_s(2)) == pytest.approx(sum(recording.wait_s), rel=0.02, abs=0.005)
        last_s = max(span.end_s for span in recording.trace.spans)
        # Both begin at the common start. After its last step a worker asks once more for work: a moment, as a rule.
        assert 0.2 * recording.record.seconds < last_s <= recording.record.seconds
    assert sum(one.exchanges for one in story.recordings[-1].record.talking) > 0
    assert [p.value for p in story.recordings[1].trace.series["period"]][:2] == [4, 4]
    assert len(story.recordings[0].trace.rounds) == 12
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def of_20_steps(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule that raises an error when it is stepped more often."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)


@pytest.fixture(scope="module")
def launched() -> tuple[list[LiveRun], list[int]]:
    """Three jobs of one launch, and the numbers of those that were told of; processes take long to start."""
    heard: list[int] = []
    late, task = ob.delays.chronic(1, 0.5), replace(ob.tasks.regression(), scheduler=of_20_steps)
    shared = Job(ob.eager(), task, 20, delays=late, compute_s=0.1, shared=True)
    jobs = [*(Job(name, ob.tasks.regression(), 6, seed=3) for name in ("ddp", ob.allreduce())), shared]
    with quick_launches():
        return launch_all(jobs, 2, done=lambda number, run: heard.append(number)), heard


@live
def test_ddp_and_allreduce_end_with_the_same_weights(launched: tuple[list[LiveRun], list[int]]) -> None:
    (ddp, ours, _), heard = launched
    torch.testing.assert_close(ddp.final, ours.final)
    torch.testing.assert_close(ddp.losses, ours.losses)
    assert ddp.wire_bytes == 6 * 2 * 16 * 8  # steps × a ring of 2 × weights × float64
    assert heard == [0, 1, 2]


@live
def test_of_a_shared_supply_a_fast_worker_takes_more_and_the_schedule_is_the_jobs(
    launched: tuple[list[LiveRun], list[int]],
) -> None:
    (_, _, run), _ = launched
    assert sum(run.gradients) == 40
    assert run.gradients[0] > 20 > run.gradients[1] > 0
    times_s = [point.time_s for point in run.trace.series["loss"]]
    assert times_s == sorted(times_s)


@live
def test_ctrl_c_ends_the_demo_and_shows_what_was_done(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "offbeat", "demo", "--workers", "2", "--steps", "25"]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        heard = [process.stderr.readline() for _ in range(2)]  # the first method, and what it took
        time.sleep(0.3)  # any moment will do until the last method is through, and that takes ten seconds
        os.killpg(process.pid, signal.SIGINT)
        try:
            out, rest = process.communicate(timeout=HANGS_S)
        finally:
            with suppress(ProcessLookupError):  # all have ended, as they should
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, "".join(heard) + rest
    assert "Traceback" not in rest
    assert "DDP (torch)" in out
    assert (tmp_path / "runs" / "demo" / "report.html").exists()


def test_a_shared_job_with_a_schedule_cannot_be_recorded() -> None:
    task = replace(ob.tasks.regression(), scheduler=of_20_steps)
    with pytest.raises(ValueError, match="a replay does not know when each heard of them; leave out shared, or record"):
        Job(ob.eager(), task, 20, shared=True, record=True)


def record(name: str, seconds: float, wait_fraction: float, accuracy: float) -> Record:
    return Record(name, name, "live", "digits", 4, 9, seconds, wait_fraction, 1, 0.1, accuracy, 0.1, 0, "none")


def test_a_method_that_ends_lower_or_waits_long_is_named() -> None:
    base = record("ddp", 10.0, 0.6, 0.95)
    assert judged([base, record("eager", 5.0, 0.1, 0.94)]) == []
    assert judged([base, record("eager", 5.0, 0.1, 0.92)]) == ["eager ends 3.0 points of accuracy below ddp."]
    (said,) = judged([base, record("dasgd", 5.0, 0.5, 0.95)])
    assert said.startswith("dasgd still waits 42% of what ddp waits: it hides")
