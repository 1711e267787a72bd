"""A job that is killed, and a worker that dies in the middle of a sum: the others say who it was, and nothing stays."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat as ob
from offbeat.live.memory import adding
from offbeat.live.partial import summing
from tests.support import forge
from tests.support.forge import Job, Outcome, hear, said, say
from tests.support.leftovers import Held, held, left
from tests.support.scenarios import CARRIERS, over

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
    """One is killed while it adds up its part of a sum, or while another reads what it has laid down."""
    step = begun(name, folder)
    reader = (who + 1) % SIZE
    if where == "read" and rank == who:
        threading.Thread(target=die_when_read, daemon=True).start()

    def add_up(out: Tensor, terms: Sequence[Any], *args: Any, **named: Any) -> None:
        if where == "adding" and rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "read" and rank == reader and len(terms) == SIZE and not said("reading"):  # what all have laid down
            say("reading")
            hear("dying")
        adding.add_up(out, terms, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summing, "add_up", add_up)
        while True:
            step()


def die_when_read() -> None:
    hear("reading")
    say("dying")
    os.kill(os.getpid(), signal.SIGKILL)


KILLED = [(name, CARRIERS[m % len(CARRIERS)]) for m, name in enumerate(METHODS)]
KILLED += [("eager", "hosts"), ("ad_psgd", "gloo")]
# Who comes first adds all of it where meetings are; in step there is no hub, and other sums.
DYING = [
    (name, (m + k) % SIZE, where, way)
    for m, name in enumerate(METHODS)
    for k, (where, way) in enumerate([("adding", "shm"), ("read", "pooled"), ("read", "shm"), ("adding", "pooled")])
    if name not in ("ad_psgd", "allreduce")
]
Ended = dict[Any, tuple[list[Outcome], Path]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    jobs, folders = [], []
    for case in (*KILLED, *DYING):
        folders.append(tmp_path_factory.mktemp("job"))
        what = killed if len(case) == 2 else dying
        jobs.append(Job(over, SIZE, (case[-1], what, *case[:-1], str(folders[-1])), timeout_s=120))
    outcomes = forge.run(jobs, at_once=2)
    return dict(zip((*KILLED, *DYING), zip(outcomes, folders, strict=True), strict=True))


def nothing_is_left_of(outcomes: list[Outcome], folder: Path, way: str) -> None:
    everyones: list[Held] = [held for outcome in outcomes for held in outcome.noted]
    assert len(everyones) == SIZE
    assert [one.files for one in everyones] == [frozenset()] * SIZE, "in /dev/shm"
    assert way == "gloo" or everyones[0].memory
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
        assert outcomes[0].noted[0].children or way in ("gloo", "hosts"), "its hub"
    nothing_is_left_of(outcomes, folder, way)


@pytest.mark.parametrize("case", DYING, ids=lambda case: " ".join(map(str, case)))
def test_of_one_that_dies_in_a_sum_the_others_say_who_it_was_and_nothing_is_left(
    ended: Ended, case: tuple[str, int, str, str]
) -> None:
    (_, who, _, way), (outcomes, folder) = case, ended[case]
    for rank, outcome in enumerate(outcomes):
        assert (outcome.exit_code, outcome.hung) == (-signal.SIGKILL if rank == who else 1, False), outcome.stderr
        assert rank == who or f"rank {who} gives no sign of life: the process has ended" in outcome.error
    nothing_is_left_of(outcomes, folder, way)
