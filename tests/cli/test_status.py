"""``offbeat status`` as a command: what it shows, how its JSON is named, and how it says no."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import offbeat as ob
from offbeat.cli import main
from offbeat.cli import status as command
from offbeat.live.host import looking
from offbeat.live.host.looking import RunningJob
from offbeat.live.host.status import (
    ChannelStatus,
    MemoryStatus,
    OtherHost,
    WorkerStatus,
    doing,
    plain,
    rebuilt,
)

Captured = pytest.CaptureFixture[str]
PAGE = Path(__file__).parents[2] / "docs" / "status.md"
JOB = RunningJob(4242, b"\0nobody", "0" * 32, 1.0)

BUSY = WorkerStatus(0, 100, 1.0, "busy", "is busy", "train.py:3", 0.1, 12, 3.5, 12, 12, 0, (), (1,))
WAITS = WorkerStatus(
    1, 101, 1.0, "waits", "waits for round 12 of 'eager', since 3 s", "", 3.0, 12, None, 13, 12, 0, (0,)
)
CHANNEL = ChannelStatus("0/eager", "partial rounds", (0, 1), 12, 3.5, 7, 4, 1000, False)
OTHER = OtherHost("10.0.0.2:4000", False, "nothing for 4 s", 4.0, 10**6, 2 * 10**6, 1e5, None, (2, 3))
STATUS = ob.JobStatus(
    "0.1.0",
    "here",
    4242,
    "train.py",
    1.0,
    4,
    (BUSY, WAITS),
    (CHANNEL,),
    (OTHER,),
    MemoryStatus(8000, 1000, 0, 5000),
    1,
    2,
)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[RunningJob]:
    """Those of this user: one, which answers."""
    found = [JOB]
    monkeypatch.setattr(looking, "jobs", lambda: found)
    monkeypatch.setattr(RunningJob, "look", lambda self, whole=False: replace(STATUS, pid=self.pid))
    monkeypatch.setenv("COLUMNS", "120")
    return found


def test_without_a_job_it_says_where_to_look(jobs: list[RunningJob], capsys: Captured) -> None:
    jobs.clear()
    for words in ([], ["--json"], ["--stacks"]):
        assert main(["status", *words]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(
            "offbeat: no job of yours runs on this host; start one with torchrun, or look at the host"
        )


def test_it_is_shown_once_where_nobody_watches(jobs: list[RunningJob], capsys: Captured) -> None:
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("train.py on here: 2 of 4 workers, host process 4242\n")
    for words in (
        "waits for round 12 of 'eager', since 3 s",
        "Rank 1 waits for rank 0, which is busy.",
        "The host at 10.0.0.2:4000 does not answer: nothing for 4 s.",
        "4 of 7",
        "1 sum waits, 2 threads",
        "1 MB, 100 kB/s",
    ):
        assert words in shown


def test_a_terminal_and_a_file_are_shown_the_same(
    jobs: list[RunningJob], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["status"])
    assert capsys.readouterr().out == f"{STATUS}\n"
    monkeypatch.setattr(command, "Console", lambda: Console(force_terminal=True, width=160, color_system=None))
    main(["status", "--once"])
    assert capsys.readouterr().out.split() == str(STATUS).split()


def test_of_two_jobs_both_are_shown_and_one_can_be_chosen(jobs: list[RunningJob], capsys: Captured) -> None:
    jobs.append(replace(JOB, pid=4300))
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "1  train.py on here: 2 of 4 workers, host process 4242" in shown
    assert "2  train.py on here: 2 of 4 workers, host process 4300" in shown
    for words in ("2", "4300"):
        assert main(["status", "--job", words]) == 0
        assert "host process 4242" not in capsys.readouterr().out
    assert main(["status", "--job", "7"]) == 2
    err = capsys.readouterr().err
    assert "--job 7 is no job of yours on this host; yours: 1 (host process 4242), 2 (host process 4300)" in err


def test_the_json_has_the_names_that_the_page_says_and_no_others(jobs: list[RunningJob], capsys: Captured) -> None:
    assert main(["status", "--json"]) == 0
    (job,) = (document := json.loads(capsys.readouterr().out))["jobs"]
    rows = dict(re.findall(r"^\| (?:a )?`?(\w+)`? \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    said = {of: set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", text))) for of, text in rows.items() if of != "in"}
    assert set(document) == {"offbeat", "jobs"}
    assert set(job) == said["job"]
    for of in ("workers", "channels", "other_hosts"):
        assert set(job[of][0]) == said[of]
    assert set(job["memory"]) == said["memory"]
    assert job["channels"][0]["memory_bytes"] == 7000
    assert job["sent_bytes"] == 10**6


def test_a_job_that_does_not_answer_is_told_beside_the_others(
    jobs: list[RunningJob], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(self: RunningJob, whole: bool = False) -> ob.JobStatus:
        if self.pid == 4300:
            raise ob.OffbeatError("the host process 4300 is stopped")
        return STATUS

    monkeypatch.setattr(RunningJob, "look", look)
    jobs.append(replace(JOB, pid=4300))
    assert main(["status"]) == 0
    assert "2  the host process 4300 is stopped" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][1] == {
        "job": 2,
        "pid": 4300,
        "error": "the host process 4300 is stopped",
    }
    assert main(["status", "--job", "2"]) == 1


def test_a_rank_that_is_not_here_is_refused(jobs: list[RunningJob], capsys: Captured) -> None:
    assert main(["status", "--stack", "9"]) == 2
    assert "--stack 9 is no rank of this host; its ranks are 0, 1" in capsys.readouterr().err


def test_ctrl_c_leaves_the_screen_with_what_was_seen_last(
    jobs: list[RunningJob], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "Console", lambda: Console(force_terminal=True, width=120))
    monkeypatch.setattr("offbeat.cli.status.time.sleep", sleep)
    assert main(["status", "--every", "1s"]) == 0
    assert looks == [1.0] * 3
    assert "train.py on here" in capsys.readouterr().out.rpartition("Ctrl-C leaves")[2]


def test_a_screen_ends_with_its_job(jobs: list[RunningJob], capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Console", lambda: Console(force_terminal=True, width=120))
    monkeypatch.setattr("offbeat.cli.status.time.sleep", lambda seconds: jobs.clear())
    assert main(["status"]) == 0
    assert capsys.readouterr().out.endswith("the job has ended\n")


def test_to_look_more_often_than_there_is_news_is_refused(jobs: list[RunningJob], capsys: Captured) -> None:
    assert main(["status", "--every", "1ms"]) == 2
    assert "use 200ms or more" in capsys.readouterr().err


def test_a_status_arrives_as_it_was_sent_and_one_of_another_version_is_told() -> None:
    sent = json.loads(json.dumps(plain(STATUS)))
    assert rebuilt(ob.JobStatus, sent) == STATUS
    with pytest.raises(ValueError, match=r"the job runs Offbeat 9.0, and this is 0.1.0; look with the Offbeat that it"):
        rebuilt(ob.JobStatus, {**{k: v for k, v in sent.items() if k != "adders"}, "version": "9.0"})


@pytest.mark.parametrize(
    ("letter", "page", "state", "words"),
    [
        ("S", {}, "busy", "is busy"),
        ("S", {"since": 90.0, "last": "t.py:3"}, "busy", "is busy, since 10 s, after t.py:3"),
        ("D", {"since": 99.5}, "busy", "is busy, in a call of the kernel that nothing interrupts"),
        ("R", {"waits": [["a", "round 3", 96.8]]}, "waits", "waits for round 3, since 3.2 s"),
        ("S", {"inside": True, "at": "t.py:4"}, "elsewhere", "is in a collective of the script's own, at t.py:4"),
        ("T", {"waits": [["a", "round 3", 96.8]]}, "stopped", "is stopped (SIGSTOP)"),
        ("t", {}, "stopped", "is stopped (a debugger)"),
        ("Z", {}, "ended", "has ended"),
    ],
)
def test_what_a_worker_does_is_said_in_words(letter: str, page: dict[str, Any], state: str, words: str) -> None:
    heard_s = 0.0 if "since" in page else 99.9
    assert doing(letter, page, 100.0, heard_s)[:2] == (state, words)
