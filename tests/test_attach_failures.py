"""When a rank fails, the others end within seconds and say why; no process hangs, not even in its last breath."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import forge
import pytest
import torch
from attach_jobs import loss, net, sgd
from forge import Job

import offbeat as ob

pytestmark = pytest.mark.live

SIZE = 4
FAILS_AT = 5
STRATEGIES = {
    "allreduce": ob.allreduce(),
    "qsgd": ob.qsgd(),
    "local_sgd": ob.local_sgd(period=3),
    "dasgd": ob.dasgd(period=4, delay=3),  # at step 5 an average is under way
    "dpsgd": ob.dpsgd(),
    "noloco": ob.noloco(period=2),
}


def _fail(rank: int, t: int, how: str, who: int) -> None:
    if rank == who and t == FAILS_AT:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the disk is full")


def failing(rank: int, name: str, how: str, who: int = 1) -> None:
    """A plain loop; with ``how`` "with" in a with-block."""
    model = net()
    optimizer = ob.attach(sgd(model), model, STRATEGIES[name])

    def train() -> None:
        for t in range(1000):
            _fail(rank, t, how, who)
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
        optimizer.finish()

    if how == "with":
        with optimizer:
            train()
    else:
        train()


def failing_at_the_end(rank: int) -> None:
    """Three ranks are in finish() when the fourth fails."""
    model = net()
    with ob.attach(sgd(model), model, ob.local_sgd(period=100)) as optimizer:
        for t in range(FAILS_AT + 1 if rank == 1 else 2):
            _fail(rank, t, "with", 1)
            loss(model, rank, t).backward()
            optimizer.step()


def patient(rank: int) -> None:
    """Rank 1 does not come; the others have little patience."""
    model = net()
    with ob.attach(sgd(model), model, ob.allreduce(), patience_s=1.0) as optimizer:
        for t in range(3):
            if rank == 1 and t == 2:
                time.sleep(3.0)
            loss(model, rank, t).backward()
            optimizer.step()


def interrupted(rank: int, name: str) -> float | None:
    """Rank 0 waits for rank 1, which never comes; a signal to rank 0 must end the wait."""
    model = net()
    optimizer = ob.attach(sgd(model), model, STRATEGIES[name])
    for t in range(20):
        if rank == 1 and t == 4:
            _send_interrupt()
        try:
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            if rank == 0 and t == 4:
                _say_pid()
            optimizer.step()
            if rank == 0 and t == 3:
                _say_pid()
        except KeyboardInterrupt:
            return time.time() - float(Path(_folder(), "sent").read_text())
    return None


def _folder() -> str:
    return os.environ["JOB_FOLDER"]


def _say_pid() -> None:
    Path(_folder(), "pid.new").write_text(str(os.getpid()))
    Path(_folder(), "pid.new").rename(Path(_folder(), "pid"))


def _send_interrupt() -> None:
    while not Path(_folder(), "pid").exists():
        time.sleep(0.01)
    time.sleep(0.5)  # it is waiting by now; if it were not, it would be interrupted all the same
    Path(_folder(), "sent").write_text(str(time.time()))
    os.kill(int(Path(_folder(), "pid").read_text()), signal.SIGINT)
    time.sleep(5.0)
    os._exit(0)


def fine(rank: int) -> None:
    """A run that ends well, for the exit code and the time of it."""
    model = net()
    with ob.attach(sgd(model), model, ob.dpsgd()) as optimizer:
        for t in range(5):
            loss(model, rank, t).backward()
            optimizer.step()
    assert not torch.distributed.is_initialized()


RAISED = [("allreduce", "with"), ("dasgd", "with"), ("dpsgd", "with"), ("noloco", "with")]
RAISED += [("allreduce", "plain"), ("local_sgd", "plain"), ("dasgd", "plain"), ("qsgd", "plain")]
KILLED = [("allreduce", 1), ("local_sgd", 1), ("dasgd", 1), ("dpsgd", 1), ("allreduce", 0)]
PLAN: dict[Any, Job] = {
    **{key: Job(__name__, "failing", SIZE, key, timeout_s=20, whole_end=True) for key in RAISED},
    **{key: Job(__name__, "failing", SIZE, (key[0], "killed", key[1]), timeout_s=20, whole_end=True) for key in KILLED},
    "hosting": Job(
        __name__, "failing", SIZE, ("local_sgd", "killed", 0), timeout_s=20, whole_end=True, rank_0_hosts=True
    ),
    "end": Job(__name__, "failing_at_the_end", SIZE, timeout_s=20, whole_end=True),
    "patient": Job(__name__, "patient", 3, timeout_s=20, whole_end=True),
    "interrupted allreduce": Job(__name__, "interrupted", 2, ("allreduce",), timeout_s=20, whole_end=True),
    "interrupted local_sgd": Job(__name__, "interrupted", 2, ("local_sgd",), timeout_s=20, whole_end=True),
    **{f"fine {k}": Job(__name__, "fine", 3, timeout_s=20, whole_end=True, rank_0_hosts=k % 2 == 0) for k in range(4)},
}


@pytest.fixture(scope="module")
def told() -> dict[Any, list[forge.Outcome]]:
    return dict(zip(PLAN, forge.run(list(PLAN.values())), strict=True))


def seconds_after(outcomes: list[forge.Outcome], who: int) -> float:
    """How long after the rank that failed the last one ended, interpreter and all."""
    return max(outcome.ended_s for outcome in outcomes) - outcomes[who].ended_s


@pytest.mark.parametrize(("name", "how"), RAISED)
def test_the_others_end_with_the_rank_and_the_words_of_the_one_that_raised(told: Any, name: str, how: str) -> None:
    outcomes = told[name, how]
    assert "ValueError: the disk is full" in outcomes[1].error
    assert [outcome.exit_code for outcome in outcomes] == [1] * SIZE
    for outcome in outcomes[:1] + outcomes[2:]:
        assert "PeerFailed: rank 1 failed: ValueError: the disk is full" in outcome.error
    assert seconds_after(outcomes, 1) < 10


@pytest.mark.parametrize(("name", "who"), KILLED)
def test_the_others_end_and_name_the_rank_that_was_killed(told: Any, name: str, who: int) -> None:
    outcomes = told[name, who]
    assert outcomes[who].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert outcome.exit_code == 1, outcome.stderr
            assert f"rank {who} gives no sign of life" in outcome.error
    assert seconds_after(outcomes, who) < 10


def test_the_others_end_when_the_rank_that_hosts_the_store_is_killed(told: Any) -> None:
    outcomes = told["hosting"]
    for outcome in outcomes[1:]:
        assert outcome.exit_code == 1, outcome.stderr
        assert "PeerFailed: the job's store is gone" in outcome.stderr
    assert seconds_after(outcomes, 0) < 10


def test_a_rank_that_waits_in_finish_hears_of_a_failure(told: Any) -> None:
    for outcome in told["end"][:1] + told["end"][2:]:
        assert outcome.exit_code == 1
        assert "PeerFailed: rank 1 failed: ValueError: the disk is full" in outcome.error
    assert seconds_after(told["end"], 1) < 10


def test_patience_ends_a_wait_for_a_rank_that_does_not_come(told: Any) -> None:
    said = [outcome.error for outcome in told["patient"]]
    assert any("waited 1 s for the gradients of step 2" in text for text in (said[0], said[2]))
    assert all(outcome.exit_code == 1 and not outcome.hung for outcome in told["patient"])


@pytest.mark.parametrize("name", ["allreduce", "local_sgd"])
def test_an_interrupt_ends_a_wait_at_once(told: Any, name: str) -> None:
    waiting = told[f"interrupted {name}"][0]
    assert waiting.returned, waiting.stderr
    assert waiting.value < 0.5


@pytest.mark.parametrize("k", range(4))
def test_a_run_that_ends_well_ends_all_processes(told: Any, k: int) -> None:
    outcomes = told[f"fine {k}"]
    assert [(o.exit_code, o.hung, o.stderr) for o in outcomes] == [(0, False, "")] * 3
