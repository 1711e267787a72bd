"""When a rank fails, the others end within seconds and say why; no process hangs, not even in its last breath."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, hear, say
from tests.support.long import every_or_in_turns, unless_long
from tests.support.nets import loss, net, sgd
from tests.support.scenarios import over

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
    """Rank 1 does not come before the others have given up; they have little patience."""
    model = net()
    with ob.attach(sgd(model), model, ob.allreduce(), patience_s=5.0) as optimizer:
        for t in range(3):
            if rank == 1 and t == 2:
                hear("given up")
            try:
                loss(model, rank, t).backward()
            except ob.PeerFailed:
                say("given up")
                raise
            optimizer.step()


def killed_beside_a_busy_one(rank: int) -> None:
    """Rank 1 is killed; rank 2 computes until rank 0 has said who it was."""
    model = net()
    with ob.attach(sgd(model), model, ob.allreduce()) as optimizer:
        for t in range(3):
            if rank == 1 and t == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 2 and t == 2:
                hear("named")
            try:
                loss(model, rank, t).backward()
            except ob.PeerFailed:
                say("named")
                raise
            optimizer.step()


def cut_off(rank: int) -> None:
    """Rank 1 loses all its connections, and goes on computing until rank 0 has given it up."""
    model = net()
    with ob.attach(sgd(model), model, ob.allreduce()) as optimizer:
        for t in range(3):
            if rank == 1 and t == 2:
                _cut_connections()
                hear("named")
                os._exit(0)
            try:
                loss(model, rank, t).backward()
            except ob.PeerFailed:
                say("named")
                raise
            optimizer.step()


def _cut_connections() -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # no connection: another kind of file, or a socket that listens, which Gloo expects to last
            continue


def interrupted(rank: int, name: str) -> float | None:
    """Rank 0 waits for rank 1, which never comes; a signal to rank 0 must end the wait."""
    model = net()
    optimizer = ob.attach(sgd(model), model, STRATEGIES[name])
    if rank == 0:
        _note("pid", os.getpid())
    try:
        for t in range(20):
            if rank == 1 and t == 4:
                hear("far enough")
                _send_interrupt()
            if rank == 0 and t == 4:
                say("far enough")
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
    except KeyboardInterrupt:
        took_s = time.time() - _noted("sent")
        say("interrupted")
        return took_s
    return None


def _note(name: str, number: float) -> None:
    Path(os.environ["JOB_FOLDER"], name).write_text(str(number))


def _noted(name: str) -> float:
    return float(Path(os.environ["JOB_FOLDER"], name).read_text())


def _send_interrupt() -> None:
    time.sleep(0.5)  # it is waiting by now; if it were not, it would be interrupted all the same
    _note("sent", time.time())
    os.kill(int(_noted("pid")), signal.SIGINT)
    hear("interrupted", 60)
    os._exit(0)


def fine(rank: int) -> None:
    """A run that ends well, for the exit code and the time of it."""
    model = net()
    with ob.attach(sgd(model), model, ob.dpsgd()) as optimizer:
        for t in range(5):
            loss(model, rank, t).backward()
            optimizer.step()
    assert not torch.distributed.is_initialized()


def _job(way: str, function: Callable[..., Any], size: int, *args: Any, hosts: bool = False, whole: bool = True) -> Job:
    """``whole``: the interpreters are taken down, too, which is most of the work; in tables every fourth row's are.
    ``hosts``: rank 0 has the store."""
    return Job(over, size, (way, function, *args), timeout_s=120, whole_end=whole, rank_0_hosts=hosts)


WAYS = ("shm", "each", "hosts")  # among methods in step nothing is pooled
RAISED = [
    ("allreduce", "with", "shm"),
    ("dasgd", "with", "each"),
    ("dpsgd", "with", "hosts"),
    ("noloco", "with", "shm"),
]
RAISED += [("allreduce", "plain", "each"), ("local_sgd", "plain", "hosts")]
RAISED += [("dasgd", "plain", "shm"), ("qsgd", "plain", "each")]
KILLED = [("allreduce", 1, "hosts"), ("local_sgd", 1, "shm"), ("dasgd", 1, "hosts"), ("dpsgd", 1, "each")]
KILLED += [("allreduce", 0, "each"), ("dpsgd", 0, "shm"), ("noloco", 0, "hosts")]
INTERRUPTED = [("allreduce", "shm"), ("local_sgd", "shm"), ("dasgd", "each")]
FINE = every_or_in_turns(WAYS, (False, True))  # whether rank 0 has the store
WHOLE = unless_long(4, 2)
PLAN: dict[Any, Job] = {
    **{key: _job(key[2], failing, SIZE, *key[:2], whole=k % WHOLE == 0) for k, key in enumerate(RAISED)},
    **{
        key: _job(key[2], failing, SIZE, key[0], "killed", key[1], whole=k % WHOLE == 1) for k, key in enumerate(KILLED)
    },
    "hosting": _job("shm", failing, SIZE, "local_sgd", "killed", 0, hosts=True),
    **{("end", way): _job(way, failing_at_the_end, SIZE, whole=way == "hosts") for way in WAYS},
    **{("patient", way): _job(way, patient, 3, whole=way == "each") for way in WAYS},
    **{("busy", way): _job(way, killed_beside_a_busy_one, 3, whole=way == "shm") for way in WAYS},
    **{("cut off", way): _job(way, cut_off, 2, whole=way == "each") for way in ("shm", "each")},
    **{("interrupted", *key): _job(key[1], interrupted, 2, key[0], whole=key[1] == "each") for key in INTERRUPTED},
    **{("fine", *key): _job(key[0], fine, 3, hosts=key[1]) for key in FINE},
}

Ended = dict[Any, list[forge.Outcome]]


@pytest.fixture(scope="module")
def ended() -> Ended:
    return dict(zip(PLAN, forge.run(list(PLAN.values()), at_once=2), strict=True))


def seconds_after(outcomes: list[forge.Outcome], who: int) -> float:
    """How long after the rank that failed the last one ended, interpreter and all."""
    return max(outcome.ended_s for outcome in outcomes) - outcomes[who].ended_s


@pytest.mark.parametrize("case", RAISED, ids="-".join)
def test_the_others_end_with_the_rank_and_the_words_of_the_one_that_raised(
    ended: Ended, case: tuple[str, str, str]
) -> None:
    outcomes = ended[case]
    assert "ValueError: the disk is full" in outcomes[1].error
    assert [outcome.exit_code for outcome in outcomes] == [1] * SIZE
    for outcome in outcomes[:1] + outcomes[2:]:
        assert "PeerFailed: rank 1 failed: ValueError: the disk is full" in outcome.error
    assert seconds_after(outcomes, 1) < 60


@pytest.mark.parametrize(("name", "who", "way"), KILLED)
def test_the_others_end_and_name_the_rank_that_was_killed(ended: Ended, name: str, who: int, way: str) -> None:
    outcomes = ended[name, who, way]
    assert outcomes[who].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert outcome.exit_code == 1, outcome.stderr
            assert f"rank {who} gives no sign of life" in outcome.error
    assert seconds_after(outcomes, who) < 60


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_only_busy_is_not_taken_for_the_one_that_was_killed(ended: Ended, way: str) -> None:
    first, _, busy = ended["busy", way]
    for outcome in (first, busy):
        assert outcome.exit_code == 1, outcome.stderr
        assert outcome.error.endswith("rank 1 gives no sign of life: the process has ended")


@pytest.mark.parametrize("way", ["shm", "each"])
def test_of_a_rank_that_is_cut_off_it_is_not_said_that_it_has_ended(ended: Ended, way: str) -> None:
    waiting, cut = ended["cut off", way]
    assert cut.exit_code == 0, cut.stderr
    assert waiting.error.endswith("rank 1 gives no sign of life: its connection has closed")


def test_the_others_end_when_the_rank_that_hosts_the_store_is_killed(ended: Ended) -> None:
    outcomes = ended["hosting"]
    for outcome in outcomes[1:]:
        assert outcome.exit_code == 1, outcome.stderr
        assert "rank 0 gives no sign of life: the process has ended" in outcome.error
    assert seconds_after(outcomes, 0) < 60


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_waits_in_finish_hears_of_a_failure(ended: Ended, way: str) -> None:
    outcomes = ended["end", way]
    for outcome in outcomes[:1] + outcomes[2:]:
        assert outcome.exit_code == 1
        assert "PeerFailed: rank 1 failed: ValueError: the disk is full" in outcome.error
    assert seconds_after(outcomes, 1) < 60


@pytest.mark.parametrize("way", WAYS)
def test_patience_ends_a_wait_for_a_rank_that_does_not_come(ended: Ended, way: str) -> None:
    outcomes = ended["patient", way]
    assert all("waited 5 s for the gradients of step 2" in outcomes[rank].error for rank in (0, 2))
    assert all(outcome.exit_code == 1 and not outcome.hung for outcome in outcomes)


@pytest.mark.parametrize(("name", "way"), INTERRUPTED)
def test_an_interrupt_ends_a_wait_at_once(ended: Ended, name: str, way: str) -> None:
    waiting = ended["interrupted", name, way][0]
    assert waiting.returned, waiting.stderr
    assert waiting.value < 10


@pytest.mark.parametrize(("way", "hosts"), FINE)
def test_a_run_that_ends_well_ends_all_processes(ended: Ended, hosts: bool, way: str) -> None:
    outcomes = ended["fine", way, hosts]
    assert [(o.exit_code, o.hung, o.stderr) for o in outcomes] == [(0, False, "")] * 3
