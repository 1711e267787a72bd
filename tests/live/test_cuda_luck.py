"""Several ranks on one GPU, whose results depend on who comes when, and bad luck: one is stopped, killed, refused.

All read each other's memory there (CUDA IPC), unless it is refused. The memory of a whole GPU is counted, since torch
does not know of what is asked of the driver.
"""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat as ob
from offbeat.live.memory import device
from tests.support import forge
from tests.support.forge import Job, hear, say
from tests.support.scenarios import Call, Turns, in_turn, over

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="there is no GPU here"),
]

SIZE, NUMBERS, STEPS, MEANWHILE = 4, 300_000, 12, 25
COUNTED = {
    "self_clocked": ob.self_clocked(),
    "self_clocked in pairs": ob.self_clocked(group=2, wait="first"),
    "eager, late": ob.eager(sync_every=None, late=1),
    "eager": ob.eager(sync_every=None),
    "wagma, correct": ob.wagma(2, tau=None, merge="correct"),
    "wagma, late": ob.wagma(tau=None, late=1),
    "ad_psgd": ob.ad_psgd(),
    "moments too": ob.self_clocked(group=2, wait="first", moments=2),
    "ad_psgd, moments too": ob.ad_psgd(moments=2),
}
METHODS = {
    **COUNTED,
    "wagma": ob.wagma(2),
    "m-sync": ob.msync(),
    "ringmaster": ob.ringmaster(),
    "decoupled": ob.decoupled(),
}
WAYS = ("ipc", "long", "peers", "apart")
PAGE_BYTES = 4 << 20  # in which a driver gives memory, twice


class Counter(nn.Module):
    """Every step of SGD with rate 1 adds 1 to every number."""

    def __init__(self, numbers: int = NUMBERS) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numbers, dtype=torch.float64, device="cuda"))

    def forward(self) -> torch.Tensor:
        return -self.w.sum()


class Ended(NamedTuple):
    first: float
    last: float
    steps: int
    carriers: tuple[str, ...]
    taken_bytes: int


def free_bytes() -> int:
    """Of the whole GPU, when all ranks have come to this line."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    free, _ = torch.cuda.mem_get_info()
    dist.barrier()
    return free


def trained(rank: int, name: str, victim: int | None = None) -> Ended:
    """A run in which one worker may be stopped while the others go on."""
    everyones: list[int] = [0] * SIZE
    dist.all_gather_object(everyones, os.getpid())
    model, before, steps = Counter(), free_bytes(), 0
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, METHODS[name], patience_s=120)

    def go(count: int) -> None:
        nonlocal steps
        for _ in range(count):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            steps += 1

    go(STEPS - rank)  # some have less to do
    if victim is not None:
        dist.barrier()
        if rank == victim:
            torch.cuda.synchronize()
            say(f"{name} stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            hear(f"{name} stops")
            go(MEANWHILE)
            say(f"{name} {rank} went on")
            for other in set(range(SIZE)) - {victim}:
                hear(f"{name} {other} went on")
            os.kill(everyones[victim], signal.SIGCONT)
        go(STEPS)
    optimizer.finish()
    optimizer.zero_grad()
    first, last = model.w[0].item() * SIZE, model.w[-1].item() * SIZE
    total = torch.tensor([steps])
    dist.all_reduce(total)
    return Ended(first, last, int(total), optimizer.carriers, before - free_bytes())


def again_and_again(rank: int, name: str) -> list[Ended]:
    return [trained(rank, name) for _ in range(4)]


@pytest.fixture(scope="module")
def ran() -> Turns[tuple[str, str]]:
    return in_turn(
        {(way, name): Call(over, (way, again_and_again, name)) for way in WAYS for name in METHODS}, SIZE, 300
    )


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_read_each_others_memory_where_their_gpu_can_and_end_equal(
    ran: Turns[tuple[str, str]], way: str, name: str
) -> None:
    for everyones in zip(*ran[way, name], strict=True):
        assert {one.carriers for one in everyones} == {("shm" if way == "apart" else "ipc",)}
        assert len({(one.first, one.last) for one in everyones}) == 1


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("way", WAYS)
def test_every_step_counts_once(ran: Turns[tuple[str, str]], way: str, name: str) -> None:
    for one in (one for ended in ran[way, name] for one in ended):
        assert one.first == pytest.approx(one.steps, rel=0, abs=1e-9)
        assert one.last == pytest.approx(one.steps, rel=0, abs=1e-9)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("way", WAYS)
def test_all_memory_of_a_run_is_given_back_to_the_gpu(ran: Turns[tuple[str, str]], way: str, name: str) -> None:
    """But for what libraries keep when they first do something, which may be in a later run than the first."""
    for _, *later in ran[way, name]:
        assert min(abs(one.taken_bytes) for one in later) <= PAGE_BYTES


@pytest.fixture(scope="module")
def stopped() -> Turns[tuple[str, str]]:
    cases = [(way, name) for name in COUNTED for way in WAYS]
    return in_turn({(w, n): Call(over, (w, trained, n, k % SIZE)) for k, (w, n) in enumerate(cases)}, SIZE, 300)


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("way", WAYS)
def test_beside_a_stopped_worker_the_others_go_on_and_every_step_counts_once(
    stopped: Turns[tuple[str, str]], way: str, name: str
) -> None:
    for one in stopped[way, name]:
        assert one.first == pytest.approx(one.steps, rel=0, abs=1e-9)
        assert one.last == pytest.approx(one.steps, rel=0, abs=1e-9)


def killed(rank: int, name: str) -> None:
    model = Counter()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, METHODS[name])
    for t in range(100_000):
        if rank == 1 and t == STEPS:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    optimizer.finish()


@pytest.fixture(scope="module")
def mourned() -> dict[str, list[forge.Outcome]]:
    jobs = [Job(killed, SIZE, (name,), timeout_s=120) for name in METHODS]
    return dict(zip(METHODS, forge.run(jobs, at_once=3), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_whoever_is_killed_with_work_on_the_gpu_is_named_by_the_others(
    mourned: dict[str, list[forge.Outcome]], name: str
) -> None:
    for outcome in (one for rank, one in enumerate(mourned[name]) if rank != 1):
        assert not outcome.hung, outcome.stderr[-2000:]
        assert "rank 1 gives no sign of life: the process has" in outcome.error, outcome.stderr[-2000:]


def refused(rank: int, name: str) -> str:
    """The driver of the last rank does not let it open the host process's memory."""
    answer = device.call_driver

    def refuse(what: str, *args: object) -> None:
        if what == "cuIpcOpenMemHandle_v2":
            raise OSError(f"{what}: operation not supported")
        answer(what, *args)

    with pytest.MonkeyPatch.context() as patch:
        if rank == SIZE - 1:
            patch.setattr(device, "call_driver", refuse)
        return forge.attempt(lambda: trained(rank, name))


REFUSALS = ("self_clocked", "eager", "ad_psgd")


@pytest.fixture(scope="module")
def refusals() -> Turns[str]:
    return in_turn({name: Call(refused, (name,)) for name in REFUSALS}, SIZE, 300)


@pytest.mark.parametrize("name", REFUSALS)
def test_where_the_driver_refuses_all_hear_why_and_the_way_out(refusals: Turns[str], name: str) -> None:
    for words in refusals[name]:
        assert "cuIpcOpenMemHandle_v2: operation not supported" in words
        assert "OFFBEAT_CARRIER=shm" in words
