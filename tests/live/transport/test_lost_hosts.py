"""With ``min_workers`` the others go on though a host is lost: all of its processes, or every way to it.

Four plain processes on two or three hosts of one machine. The host of rank 0 decides, and stays. ``make long`` has
every method with every loss at every layout; else each method sees one. How long a silent host is waited for is set
shorter here.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat as ob
from offbeat.live.host import links, process
from offbeat.live.worker import start
from tests.support import forge, namespaces
from tests.support.forge import Job
from tests.support.going_on import (
    COUNTED,
    LAST,
    METHODS,
    MOMENTS,
    SILENT_SOON,
    SIZE,
    STEPS,
    Ticks,
    host_pid,
    left_by_a_host,
    on_host_that_is_missed_soon,
    this_host_is_lost,
)
from tests.support.long import LONG
from tests.support.namespaces import TwoHosts
from tests.support.nets import flat, loss, net, sgd

pytestmark = pytest.mark.live

LAYOUTS = ((0, 0, 1, 1), (0, 1, 2, 1), (0, 1, 1, 1), (0, 1, 2, 2), (0, 2, 1, 0))
LOST = 1
Case = tuple[str, str, int, tuple[int, ...]]


def cases() -> list[Case]:
    if LONG:
        return [(m, moment, LOST, layout) for m, moment, layout in itertools.product(METHODS, MOMENTS, LAYOUTS)]
    return [(m, MOMENTS[(k + k // 4) % 4], LOST, LAYOUTS[k % 5]) for k, m in enumerate(METHODS)]


CASES = cases()


def test_every_method_is_in_the_table_and_every_moment_in_every_layout() -> None:
    assert {case[0] for case in CASES} == set(METHODS)
    assert {(moment, layout) for _, moment, _, layout in CASES} == set(itertools.product(MOMENTS, LAYOUTS))


def left(layout: tuple[int, ...], outcomes: list[forge.Outcome]) -> list[forge.Outcome]:
    """How those ended whose host is not lost."""
    assert all(one.exit_code == -signal.SIGKILL for host, one in zip(layout, outcomes, strict=True) if host == LOST)
    return [one for host, one in zip(layout, outcomes, strict=True) if host != LOST]


@pytest.fixture(scope="module")
def ended() -> dict[Case, list[forge.Outcome]]:
    jobs = [Job(left_by_a_host, SIZE, case, timeout_s=120) for case in CASES]
    return dict(zip(CASES, forge.run(jobs, at_once=3), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1]}, {case[3]}")
def test_the_others_take_all_their_steps_and_end_equal(ended: Any, case: Case) -> None:
    others = left(case[3], ended[case])
    for outcome in others:
        assert outcome.returned, outcome.stderr[-3000:]
    assert all(torch.tensor(outcome.value).isfinite().all() for outcome in others)
    assert len({tuple(outcome.value) for outcome in others}) == 1


# What counts.


def counted(rank: int, method: str, layout: tuple[int, ...]) -> list[float]:
    on_host_that_is_missed_soon(rank, layout)
    model = Ticks()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, COUNTED[method], min_workers=1)
    for t in range(STEPS):
        if rank == layout.index(LOST) and t == LAST:
            this_host_is_lost(layout)
        optimizer.zero_grad()
        (-model.w[rank]).backward()
        optimizer.step()
    optimizer.finish()
    return model.w.detach().tolist()


COUNTS = [(m, LAYOUTS[k % 3]) for k, m in enumerate(m for m in COUNTED if m != "msync")]


@pytest.fixture(scope="module")
def counts() -> dict[Any, list[forge.Outcome]]:
    jobs = [Job(counted, SIZE, case, timeout_s=120) for case in COUNTS]
    return dict(zip(COUNTS, forge.run(jobs, at_once=3), strict=True))


@pytest.mark.parametrize("case", COUNTS, ids=lambda case: f"{case[0]}, {case[1]}")
def test_a_gradient_counts_once_for_all_or_for_nobody_and_those_of_the_others_all_count(
    counts: Any, case: tuple[str, tuple[int, ...]]
) -> None:
    method, layout = case
    others = left(layout, counts[case])
    for outcome in others:
        assert outcome.returned, outcome.stderr[-3000:]
    assert len({tuple(outcome.value) for outcome in others}) == 1
    value, there = others[0].value, len(others)
    for rank, host in enumerate(layout):
        if host == LOST:
            whole = value[rank] * SIZE
            assert whole == pytest.approx(round(whole), abs=1e-9), "a part of a gradient"
            assert whole <= STEPS  # its other worker may have been ahead
        else:
            assert STEPS / SIZE - 1e-9 <= value[rank] <= STEPS / there + 1e-9
    if method == "allreduce":
        together = round(value[layout.index(LOST)] * SIZE)
        assert together in (LAST, LAST + 1)
        assert value[0] == pytest.approx(together / SIZE + (STEPS - together) / there)


SAMPLES, OF_A_BATCH = 480, 4


def sharing(rank: int, layout: tuple[int, ...]) -> list[int]:
    """The samples that a worker has taken steps with; a host is lost after three."""
    on_host_that_is_missed_soon(rank, layout)
    data = TensorDataset(torch.arange(SAMPLES))
    loader = DataLoader(data, batch_sampler=ob.share(data, batch_size=OF_A_BATCH))
    model, used = net(), list[int]()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=1)
    for t, (samples,) in enumerate(loader):
        if rank == layout.index(LOST) and t == 3:
            forge.hear(f"{rank} has used")
            this_host_is_lost(layout)
        if layout[rank] == LOST:  # before the step, which counts though its worker dies right after
            forge.note(samples.tolist())
        loss(model, rank, t).backward()
        optimizer.step()
        used += samples.tolist()
        if rank == layout.index(LOST) and t == 2:
            forge.say(f"{rank} has used")
    optimizer.finish()
    return used


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_of_shared_work_no_sample_is_left_out(layout: tuple[int, ...]) -> None:
    (outcomes,) = forge.run([Job(sharing, SIZE, (layout,), timeout_s=120)])
    used = [sample for one in left(layout, outcomes) for sample in forge.values([one])[0]]
    of_lost = {sample for one in outcomes for batch in one.noted for sample in batch}
    assert len(used) == len(set(used))
    assert of_lost
    assert set(used) | of_lost == set(range(SAMPLES))


# Beside it.


def ending(rank: int, layout: tuple[int, ...], lost: int, least: int) -> None:
    on_host_that_is_missed_soon(rank, layout)
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=least or None)
    for t in range(100_000):
        if rank == layout.index(lost) and t == 3:
            this_host_is_lost(layout)
        loss(model, rank, t).backward()
        optimizer.step()


ENDS = {
    "too few are left": (
        (0, 1, 2, 1),
        1,
        3,
        "the host of ranks 1 and 3 is lost: 127.0.0.1:",
        "2 would be left, and min",
    ),
    "it needs all": ((0, 1, 2, 1), 1, 0, "the host of ranks 1 and 3 is lost: 127.0.0.1:", "nobody listens there"),
    "the first host": ((0, 0, 1, 1), 0, 1, "the host of ranks 0 and 1 is lost: 127.0.0.1:", "offbeat launch --resume"),
}


@pytest.fixture(scope="module")
def ends() -> dict[str, list[forge.Outcome]]:
    jobs = [Job(ending, SIZE, case[:3], timeout_s=120) for case in ENDS.values()]
    return dict(zip(ENDS, forge.run(jobs, at_once=3), strict=True))


@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_cannot_go_on_ends_with_a_sentence_that_names_the_host_and_its_ranks(ends: Any, name: str) -> None:
    layout, lost, _, *words = ENDS[name]
    for host, outcome in zip(layout, ends[name], strict=True):
        if host != lost:
            assert all(one in outcome.error for one in words), outcome.stderr[-3000:]


def host_process_of_this_network(listener: socket.socket, token: str) -> None:
    """The forge, which would fork it, is on neither host."""
    if os.fork() == 0:
        try:
            os.setsid()
            vars(links).update(SILENT_SOON)
            process.serve(listener, token)
        finally:
            os._exit(0)


def parted(rank: int, layout: tuple[int, ...], how: str, cable: TwoHosts | None) -> list[float]:
    """For a while the last host cannot be reached: its host process is stopped, or its cable is dead."""
    if cable is not None:
        cable.move_in(layout[rank], 29_500)
        start.spawn = host_process_of_this_network
    on_host_that_is_missed_soon(rank, layout, SILENT_SOON)
    model = net()
    optimizer = ob.attach(sgd(model, momentum=0.0), model, ob.eager(), min_workers=1)
    for t in range(STEPS):
        if rank == SIZE - 1 and t == LAST:
            if cable is None:
                Path(os.environ["JOB_FOLDER"], "stopped").write_text(str(host_pid()))
                os.kill(host_pid(), signal.SIGSTOP)
            else:
                subprocess.run(["ip", "link", "set", cable.ends[1], "down"], check=True)
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()
    if rank == 0 and cable is None:
        os.kill(int(Path(os.environ["JOB_FOLDER"], "stopped").read_text()), signal.SIGCONT)
    return flat(model).tolist()


def ends_on_one_side(layout: tuple[int, ...], outcomes: list[forge.Outcome]) -> None:
    for host, outcome in zip(layout, outcomes, strict=True):
        if host == max(layout):
            assert "the host of rank" in outcome.error, outcome.stderr[-3000:]
            assert "it decides for all, so the run ends here" in outcome.error
        else:
            assert outcome.returned, outcome.stderr[-3000:]
    assert len({tuple(one.value) for one in outcomes if one.returned}) == 1


def test_of_two_sides_that_do_not_hear_each_other_that_of_rank_0_goes_on_and_the_other_says_why_it_ends() -> None:
    layouts = ((0, 0, 1, 1), (0, 1, 1, 2))
    jobs = [Job(parted, SIZE, (layout, "stopped", None), timeout_s=120) for layout in layouts]
    for layout, outcomes in zip(layouts, forge.run(jobs, at_once=2), strict=True):
        ends_on_one_side(layout, outcomes)


def test_the_same_holds_if_a_cable_is_dead() -> None:
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    with TwoHosts() as cable:
        layout = (0, 0, 1, 1)
        (outcomes,) = forge.run([Job(parted, SIZE, (layout, "cut", cable), rank_0_hosts=True, timeout_s=120)])
        ends_on_one_side(layout, outcomes)
