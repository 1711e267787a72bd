"""How the host process ends, and how workers end beside it: nobody waits for what is gone, and nothing is left."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat as ob
from offbeat.live.worker import start
from tests.support import forge
from tests.support.forge import Job, Outcome, attempt, hear, say
from tests.support.leftovers import Held, held, host_pids, left, started
from tests.support.moments import at
from tests.support.nets import PATIENCE_S

pytestmark = pytest.mark.live

SIZE, STEPS, LONG_S = 3, 3, 600.0
GONE = "the host process has ended"
METHODS = {
    "eager": ob.eager("everyone", sync_every=None),
    "eager, late": ob.eager("everyone", sync_every=None, late=1),
    "wagma": ob.wagma(tau=None, wait="everyone"),
    "self_clocked": ob.self_clocked(wait="everyone", group=None, late=0),
    "ad_psgd": ob.ad_psgd(),
}


class Run:
    """Steps of a run that is under way."""

    def __init__(self, method: ob.Strategy) -> None:
        self.model = nn.Linear(4, 1, bias=False)
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = ob.attach(inner, self.model, method, patience_s=PATIENCE_S)
        for _ in range(STEPS):
            self.step()
        (self.host_pid,) = host_pids()

    def step(self) -> None:
        self.optimizer.zero_grad()
        (-self.model.weight.sum()).backward()
        self.optimizer.step()

    def steps_for_ever(self) -> None:
        while True:
            self.step()
            time.sleep(0.001)


def begun(method: ob.Strategy, spawned: bool = False) -> Run:
    if spawned:
        start.spawn = start.spawn_python  # as under torchrun, and not by the forge
    dist.init_process_group("gloo")
    run = Run(method)
    dist.barrier()
    return run


# The host process is killed.


def host_process_dies(rank: int, name: str, resting: bool) -> str:
    """Rank 0 computes, while the others wait for its part of a round, or for it to finish. What each of them hears."""
    run = begun(METHODS[name])
    if rank == 0:
        for other in range(1, SIZE):
            hear(f"{other} waits")
        os.kill(run.host_pid, signal.SIGKILL)
        for other in range(1, SIZE):  # although this one does not come
            hear(f"{other} has ended")
        return attempt(run.steps_for_ever)
    if resting:
        say(f"{rank} waits")
        words = attempt(run.optimizer.finish)
    else:
        with at("submitted", lambda: say(f"{rank} waits")):
            words = attempt(run.steps_for_ever)
    say(f"{rank} has ended")
    return words


DIES = [(name, False) for name in METHODS] + [("eager", True), ("ad_psgd", True)]


@pytest.fixture(scope="module")
def heard() -> dict[tuple[str, bool], list[Outcome]]:
    jobs = [Job(host_process_dies, SIZE, case, timeout_s=120) for case in DIES]
    return dict(zip(DIES, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize(("name", "resting"), DIES)
def test_when_the_host_process_is_killed_all_workers_end_with_a_sentence_that_says_so(
    heard: dict[tuple[str, bool], list[Outcome]], name: str, resting: bool
) -> None:
    for words in forge.values(heard[name, resting]):
        assert GONE in words


# Workers end.


def hold_everything() -> int:
    """A process that holds all that this one has open, as a data loader does that was forked by somebody's own code."""
    pid: int = ctypes.CDLL(None).fork()  # not Python's, which would close our connection in it
    if pid == 0:
        time.sleep(LONG_S)
        os._exit(0)
    return pid


def all_die(rank: int) -> None:
    """Each leaves a process behind that holds its connection to the host process open."""
    begun(METHODS["eager"], spawned=True)
    forge.note((held(), (pid := hold_everything(), started(pid))))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_host_process_ends_with_its_last_worker_also_while_data_loaders_hold_its_connections() -> None:
    (outcomes,) = forge.run([Job(all_die, SIZE, timeout_s=120)])
    everyones: list[Held] = [outcome.noted[0][0] for outcome in outcomes]
    loaders = [outcome.noted[0][1] for outcome in outcomes]
    try:
        assert len({host for one in everyones for host in one.hosts}) == 1
        hosts = [Held(frozenset(), frozenset(), frozenset(), frozenset(), one.hosts) for one in everyones]
        assert left(hosts) == []
        assert [started(pid) for pid, _ in loaders] == [since for _, since in loaders], "they are still there"
    finally:
        for pid, since in loaders:
            if started(pid) == since:
                os.kill(pid, signal.SIGKILL)
    assert left(everyones) == []


def one_leaves(rank: int, victim: int, how: str) -> str:
    """The victim ends without a word; a data loader of its own sleeps on."""
    run = begun(METHODS["eager"])
    if rank != victim:
        return attempt(run.steps_for_ever)
    loader = os.fork()
    if loader == 0:
        time.sleep(LONG_S)
        os._exit(0)
    forge.note((loader, started(loader)))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


LEAVES = [(0, "killed"), (1, "killed"), (2, "exits")]
LeftAlone = dict[tuple[int, str], list[Outcome]]


@pytest.fixture(scope="module")
def left_alone() -> Iterator[LeftAlone]:
    jobs = [Job(one_leaves, SIZE, case, timeout_s=120) for case in LEAVES]
    outcomes = dict(zip(LEAVES, forge.run(jobs, at_once=2), strict=True))
    yield outcomes
    for (victim, _), outcome in outcomes.items():
        pid, since = outcome[victim].noted[0]
        if started(pid) == since:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("victim", "how"), LEAVES)
def test_of_a_worker_that_ends_without_a_word_the_others_hear_while_its_data_loader_sleeps(
    left_alone: LeftAlone, victim: int, how: str
) -> None:
    outcomes = left_alone[victim, how]
    pid, since = outcomes[victim].noted[0]
    assert started(pid) == since, "it is still there"
    for rank in {0, 1, 2} - {victim}:
        assert f"rank {victim} gives no sign of life: the process has ended" in outcomes[rank].value


# Signals, starts, ends.


def interrupted(rank: int, number: int) -> int:
    """The workers, and what they have started, are sent a signal that each of them survives; the steps after that."""
    times = 0

    def count(*_: object) -> None:
        nonlocal times
        times += 1

    signal.signal(number, count)
    dist.init_process_group("gloo")
    everyones = pids()
    for member in range(SIZE):  # the first makes the group that the others come to
        if rank == member:
            os.setpgid(0, everyones[0])
        dist.barrier()
    start.spawn = start.spawn_python
    run, steps = Run(METHODS["eager"]), 0
    dist.barrier()
    if rank == 1:
        os.killpg(0, number)
    while not times:
        time.sleep(0.001)
    for _ in range(STEPS):
        run.step()
        steps += 1
    run.optimizer.finish()
    return steps


def pids() -> list[int]:
    found: list[int] = [0] * SIZE
    dist.all_gather_object(found, os.getpid())
    return found


def started_again(rank: int) -> tuple[int, int]:
    """A run of the job's first start is under way when the second start begins: the host processes of the two."""
    first = begun(METHODS["eager"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    model = nn.Linear(4, 1)
    again = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, METHODS["eager"], patience_s=PATIENCE_S)
    model(torch.ones(4)).sum().backward()
    again.step()
    (other,) = host_pids() - {first.host_pid}
    again.finish()
    first.step()  # the first start's is there all the time
    first.optimizer.finish()
    return first.host_pid, other


def lives_on(rank: int) -> tuple[Held, Held, list[int]]:
    """What this process has in the middle of a run; what it has when the host process has ended, and its children then,
    those included that nobody has asked for how they ended."""
    run = begun(METHODS["eager"], spawned=True)
    during = held()
    run.optimizer.finish()
    dist.barrier()
    assert left([during]) == []
    return (
        during,
        held(),
        [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()],
    )


ENDS: dict[str, Job] = {
    "SIGINT": Job(interrupted, SIZE, (signal.SIGINT,), timeout_s=120),
    "SIGTERM": Job(interrupted, SIZE, (signal.SIGTERM,), timeout_s=120),
    "started again": Job(started_again, SIZE, timeout_s=120),
    "lives on": Job(lives_on, SIZE, timeout_s=120),
}


@pytest.fixture(scope="module")
def ends() -> dict[str, list[Outcome]]:
    return dict(zip(ENDS, forge.run(list(ENDS.values()), at_once=2), strict=True))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_the_workers_process_group_does_not_end_the_host_process(
    ends: dict[str, list[Outcome]], name: str
) -> None:
    assert forge.values(ends[name]) == [STEPS] * SIZE


def test_a_second_start_of_the_job_does_not_meet_the_host_process_of_the_first(ends: dict[str, list[Outcome]]) -> None:
    (first, second), *others = forge.values(ends["started again"])
    assert first != second
    assert others == [(first, second)] * (SIZE - 1)


def test_workers_that_live_on_after_a_run_keep_nothing_of_it(ends: dict[str, list[Outcome]]) -> None:
    for during, after, children in forge.values(ends["lives on"]):
        assert during.hosts
        assert during.memory
        assert (after.hosts, after.memory, after.files) == (frozenset(), frozenset(), frozenset())
        assert not [name for name in after.sockets if "offbeat" in name]
        assert children == []


def test_a_host_process_that_cannot_start_is_not_started_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = []
    monkeypatch.setattr(start, "spawn", lambda listener, token: tokens.append(token))  # it ends at once
    with pytest.raises(ob.OffbeatError, match="has ended 3 times before it answered; its errors are on stderr"):
        start.connect("0" * 32, 0, LONG_S)
    assert tokens == ["0" * 32] * start.TRIES
