"""On one host nobody is needed who is not there: a worker that is stopped, or holds its interpreter, delays nobody.

The claims are not about seconds: the others take so many steps while it is stopped, and let it go on only then. If they
needed it they would never come to that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat as ob
from tests.support.forge import hear, said, say
from tests.support.long import LONG, every_or_in_turns
from tests.support.moments import MOMENTS, at
from tests.support.scenarios import CARRIERS, Call, Turns, in_turn, over

pytestmark = pytest.mark.live

SIZE, MEANWHILE, FEWER, BEFORE_AND_AFTER = 3, 25, 10, 6
METHODS = {
    "eager": ob.eager(sync_every=None),
    "eager, late": ob.eager(sync_every=None, late=1),
    "wagma, correct": ob.wagma(group=2, tau=None, merge="correct"),
    "wagma, late": ob.wagma(tau=None, late=1),
    "self_clocked": ob.self_clocked(codec=None),
    "self_clocked-first": ob.self_clocked(wait="first", codec=None),
    "ad_psgd": ob.ad_psgd(),
    "moments too": ob.self_clocked(wait="first", codec=None, moments=2),
}
# The host process makes sums of few at once, and of many beside its loop; "long": as if they were very many.
NUMBERS = {"few": 100, "many": 40_000, "long": 40_000}


class Counter(nn.Module):
    """Every step of SGD with rate 1 adds 1 to every number."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numbers, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return -self.w.sum()


def pids() -> list[int]:
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, os.getpid())
    return found


def stopped(rank: int, name: str, numbers: str, victim: int, where: str) -> tuple[float, float, int]:
    """The first and the last number at the end, times the workers, and the steps of all.

    ``where``: the victim is stopped while it computes, or at one of ``MOMENTS``, or holds its interpreter.
    """
    model, everyones = Counter(NUMBERS[numbers]), pids()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, METHODS[name], patience_s=120)
    key, steps = f"{name} {numbers} {victim} {where}", 0

    def step() -> None:
        nonlocal steps
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        steps += 1

    for _ in range(BEFORE_AND_AFTER):
        step()
    dist.barrier()
    if rank == victim:
        be_stopped(key, where, step)
    else:
        while not said(f"{key} stops"):  # it may need somebody to come to that moment
            step()
            time.sleep(0.001)
        for _ in range(MEANWHILE):
            step()
            time.sleep(0.001)
        say(f"{key} {rank} has gone on")
        hear_all(key, victim)
        if rank == (victim + 1) % SIZE and where != "holding":
            let_go_on(everyones[victim])
    for _ in range(BEFORE_AND_AFTER):
        step()
    optimizer.finish()
    return counted(model, steps)


def counted(model: Counter, steps: int) -> tuple[float, float, int]:
    total = torch.tensor([steps])
    dist.all_reduce(total)
    return model.w[0].item() * SIZE, model.w[-1].item() * SIZE, int(total)


def let_go_on(pid: int) -> None:
    """A worker that says that it stops has not stopped yet; what comes before would be lost."""
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "T":
        time.sleep(0.001)
    os.kill(pid, signal.SIGCONT)


def hear_all(key: str, victim: int) -> None:
    for rank in range(SIZE):
        if rank != victim:
            hear(f"{key} {rank} has gone on")


def be_stopped(key: str, where: str, step: Callable[[], None]) -> None:
    if where == "holding":
        say(f"{key} stops")
        pause = ctypes.PyDLL(None).usleep  # a call that does not let go of the interpreter
        while not all(said(f"{key} {r} has gone on") for r in range(SIZE) if r != int(key.split()[-2])):
            pause(300_000)
    elif where == "computing":
        say(f"{key} stops")
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        has_stopped = False

        def stop() -> None:
            nonlocal has_stopped
            if not has_stopped:
                has_stopped = True
                say(f"{key} stops")
                os.kill(os.getpid(), signal.SIGSTOP)

        with at(where, stop):
            while not has_stopped:
                step()
                time.sleep(0.001)


def stopped_in_turn(rank: int, name: str, way: str) -> tuple[float, float, int]:
    """One worker after the other is stopped, and goes on when the others have."""
    model, everyones = Counter(NUMBERS["many"]), pids()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, METHODS[name], patience_s=120)
    done = 0

    def steps(count: int) -> None:
        nonlocal done
        for _ in range(count):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            done += 1
            time.sleep(0.001)

    for victim in range(SIZE):
        key = f"{name} {way} in turn {victim}"
        steps(3)
        dist.barrier()
        if rank == victim:
            say(f"{key} stops")
            os.kill(os.getpid(), signal.SIGSTOP)
            continue
        hear(f"{key} stops")
        steps(FEWER)
        say(f"{key} {rank} has gone on")
        hear_all(key, victim)
        if rank == (victim + 1) % SIZE:
            let_go_on(everyones[victim])
    steps(BEFORE_AND_AFTER)
    optimizer.finish()
    return counted(model, done)


Case = tuple[str, str, int, str]
IN_TURN = every_or_in_turns(METHODS, (*CARRIERS, "long"))
WHERE = [("few", 0, "computing"), ("many", 1, "computing"), ("long", 1, "computing"), ("few", 0, "holding")]


def cases() -> list[Case]:
    """At every change a method sees half of it, and the next one the other half."""
    out = list[Case]()
    for m, name in enumerate(METHODS):
        kinds = list(NUMBERS)
        moments = [(kinds[(m + k) % 3], (m + 2 * k) % SIZE, moment) for k, moment in enumerate(MOMENTS)]
        out += [(name, *case) for k, case in enumerate([*WHERE, *moments]) if LONG or (k + m) % 2 == 0]
    return out


CASES = cases()


@pytest.fixture(scope="module")
def ran() -> Turns[Case]:
    calls = {c: Call(over, ("long", stopped, *c)) if "long" in c else Call(stopped, c) for c in CASES}
    return in_turn(calls, SIZE, timeout_s=300)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_others_go_on_and_every_step_counts_once(ran: Turns[Case], case: Case) -> None:
    for first, last, steps in ran[case]:
        assert first == pytest.approx(steps, rel=0, abs=1e-9)
        assert last == pytest.approx(steps, rel=0, abs=1e-9)


@pytest.fixture(scope="module")
def in_turns() -> Turns[tuple[str, str]]:
    return in_turn({c: Call(over, (c[1], stopped_in_turn, *c)) for c in IN_TURN}, SIZE, timeout_s=300)


@pytest.mark.parametrize("case", IN_TURN, ids=" ".join)
def test_whoever_is_stopped_one_after_the_other_every_step_counts_once(
    in_turns: Turns[tuple[str, str]], case: tuple[str, str]
) -> None:
    for first, last, steps in in_turns[case]:
        assert first == pytest.approx(steps, rel=0, abs=1e-9)
        assert last == pytest.approx(steps, rel=0, abs=1e-9)
