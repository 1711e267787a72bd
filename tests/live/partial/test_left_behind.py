"""A job that is killed, and a worker that dies in the middle of a step: the others say who it was, nothing stays."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat as ob
from offbeat.live.worker import start
from tests.support import forge
from tests.support.forge import Job, Outcome, hear, said, say
from tests.support.leftovers import Held, held, left
from tests.support.moments import MOMENTS, at
from tests.support.scenarios import EVERY_CARRIER, over

pytestmark = pytest.mark.live

SIZE, NUMBERS, STEPS = 3, 100_000, 5
METHODS = {
    "eager": ob.eager(sync_every=None),
    "eager, late": ob.eager(sync_every=None, late=1),
    "wagma, correct": ob.wagma(group=SIZE, tau=None, merge="correct"),
    "self_clocked": ob.self_clocked(wait="first"),
    "ad_psgd": ob.ad_psgd(),
    "allreduce": ob.allreduce(),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMBERS, dtype=torch.float64))

    def forward(self) -> Tensor:
        return -self.w.sum()


def begun(name: str, folder: str) -> Any:
    """A step of a run that is under way; whatever it makes for a time is to lie in ``folder``."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    dist.init_process_group("gloo")
    model = Net()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, METHODS[name])

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        time.sleep(0.001)

    for _ in range(STEPS):
        step()
    dist.barrier()
    forge.note(held())
    dist.barrier()
    return step


def killed(rank: int, name: str, folder: str) -> None:
    """All of them, in the middle of the run."""
    begun(name, folder)
    os.kill(os.getpid(), signal.SIGKILL)


def dying(rank: int, name: str, who: int, where: str, folder: str) -> None:
    """One is killed at one of ``MOMENTS``, or while another has just been given a result."""
    step = begun(name, folder)
    reader = (who + 1) % SIZE
    if where == READ and rank == who:
        threading.Thread(target=die_when_read, daemon=True).start()

    def happens() -> None:
        if where != READ and rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        if where == READ and rank == reader and not said("reading"):
            say("reading")
            hear("dying")

    with at("reading" if where == READ else where, happens):
        while True:
            step()


def die_when_read() -> None:
    hear("reading")
    say("dying")
    os.kill(os.getpid(), signal.SIGKILL)


def by_itself(rank: int, way: str, function: Any, *args: Any) -> None:
    """The host process is no child of the forge, but started as it is under torchrun."""
    if way.endswith(SPAWNED):
        start.spawn = start.spawn_python
    over(rank, way.removesuffix(SPAWNED), function, *args)


READ, SPAWNED = "another reads", ", spawned"
HERE = ("shm", "long")
HOSTS = {"hosts": 2, "each": SIZE}  # else there is one
KILLED = [(name, HERE[m % len(HERE)]) for m, name in enumerate(METHODS)]
KILLED += [(name, EVERY_CARRIER[1 + m % 2]) for m, name in enumerate(METHODS)]
KILLED += [("eager", f"shm{SPAWNED}"), ("ad_psgd", f"long{SPAWNED}")]
DYING = [
    (name, (m + k) % SIZE, where, HERE[(m + k) % len(HERE)])
    for m, name in enumerate(METHODS)
    for k, where in enumerate((*MOMENTS, READ))
    if name != "allreduce"  # in step there are other moments
]
DYING += [("eager", 1, "writing", f"shm{SPAWNED}"), ("wagma, correct", 0, "reading", f"long{SPAWNED}")]
Ended = dict[Any, tuple[list[Outcome], Path]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    jobs, folders = [], []
    for case in (*KILLED, *DYING):
        folders.append(tmp_path_factory.mktemp("job"))
        what = killed if len(case) == 2 else dying
        jobs.append(Job(by_itself, SIZE, (case[-1], what, *case[:-1], str(folders[-1])), timeout_s=120))
    outcomes = forge.run(jobs, at_once=2)
    return dict(zip((*KILLED, *DYING), zip(outcomes, folders, strict=True), strict=True))


def nothing_is_left_of(outcomes: list[Outcome], folder: Path, way: str) -> None:
    everyones: list[Held] = [held for outcome in outcomes for held in outcome.noted]
    assert len(everyones) == SIZE
    assert [one.files for one in everyones] == [frozenset()] * SIZE, "in /dev/shm"
    assert everyones[0].memory
    assert left(everyones) == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("name", "way"), KILLED)
def test_a_killed_job_leaves_no_process_no_memory_no_socket_and_no_file_behind(
    ended: Ended, name: str, way: str
) -> None:
    outcomes, folder = ended[name, way]
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * SIZE, outcomes
    if name != "allreduce":
        assert any("offbeat" in name for outcome in outcomes for name in outcome.noted[0].sockets)
        assert len({host for outcome in outcomes for host in outcome.noted[0].hosts}) == HOSTS.get(way, 1)
        assert not [child for outcome in outcomes for child in outcome.noted[0].children], (
            "a worker has no child of ours"
        )
    nothing_is_left_of(outcomes, folder, way)


@pytest.mark.parametrize("case", DYING, ids=lambda case: " ".join(map(str, case)))
def test_of_one_that_dies_in_a_step_the_others_say_who_it_was_and_nothing_is_left(
    ended: Ended, case: tuple[str, int, str, str]
) -> None:
    (_, who, _, way), (outcomes, folder) = case, ended[case]
    for rank, outcome in enumerate(outcomes):
        assert (outcome.exit_code, outcome.hung) == (-signal.SIGKILL if rank == who else 1, False), outcome.stderr
        assert rank == who or f"rank {who} gives no sign of life: the process has ended" in outcome.error
    nothing_is_left_of(outcomes, folder, way)
