"""With ``min_workers`` the others go on also where workers are on several hosts, whose host processes live.

Four plain processes on two or three hosts of one machine. A host process whose workers are all dead answers for them.
``make long`` has every method with every death at every layout; else each method sees three.
"""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job
from tests.support.going_on import COUNTED, LAST, METHODS, MOMENTS, SIZE, STEPS, Ticks, die, left_behind, on_host
from tests.support.long import LONG
from tests.support.nets import loss, net, sgd

pytestmark = pytest.mark.live

LAYOUTS = ((0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 1))
WHO = ((0,), (SIZE - 1,), (1, SIZE - 1), (2, SIZE - 1))


Case = tuple[str, str, tuple[int, ...], tuple[int, ...]]


def cases() -> list[Case]:
    if LONG:
        return list(itertools.product(METHODS, MOMENTS, WHO, LAYOUTS))
    return [
        (m, MOMENTS[(k + i + k // 4) % 4], WHO[(k + 3 * i + k // 2) % 4], LAYOUTS[(k + i) % 3])
        for k, m in enumerate(METHODS)
        for i in range(3)
    ]


CASES = cases()


def test_every_method_is_in_the_table_and_every_death_in_every_layout() -> None:
    assert {case[0] for case in CASES} == set(METHODS)
    assert {case[2:] for case in CASES} == set(itertools.product(WHO, LAYOUTS))
    assert {case[1:3] for case in CASES} == set(itertools.product(MOMENTS, WHO))


@pytest.fixture(scope="module")
def ended() -> dict[Case, list[forge.Outcome]]:
    jobs = [Job(left_behind, SIZE, case, timeout_s=120) for case in CASES]
    return dict(zip(CASES, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[2]} {case[1]}, {case[3]}")
def test_the_others_take_all_their_steps_and_end_equal(ended: Any, case: Case) -> None:
    outcomes, dead = ended[case], case[2]
    assert all(outcomes[rank].exit_code == -signal.SIGKILL for rank in dead)
    others = [outcome for rank, outcome in enumerate(outcomes) if rank not in dead]
    for outcome in others:
        assert outcome.returned, outcome.stderr[-3000:]
    assert all(torch.tensor(outcome.value).isfinite().all() for outcome in others)
    assert len({tuple(outcome.value) for outcome in others}) == 1


# What counts.


def counted(rank: int, method: str, layout: tuple[int, ...], leaves: bool) -> list[float]:
    """One of them dies, or leaves."""
    on_host(layout[rank])
    model = Ticks()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, COUNTED[method], min_workers=1)
    for t in range(STEPS):
        if rank == 2 and t == LAST:
            if leaves:
                optimizer.leave()
                return []
            die()
        optimizer.zero_grad()
        (-model.w[rank]).backward()
        optimizer.step()
    optimizer.finish()
    return model.w.detach().tolist()


COUNTS = [
    (m, LAYOUTS[(k + leaves) % 3], leaves)
    for k, m in enumerate(m for m in COUNTED if m != "msync")
    for leaves in (False, True)
]


@pytest.fixture(scope="module")
def counts() -> dict[Any, list[forge.Outcome]]:
    jobs = [Job(counted, SIZE, case, timeout_s=120) for case in COUNTS]
    return dict(zip(COUNTS, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("case", COUNTS, ids=lambda case: f"{case[0]}, {case[1]}{', leaves' if case[2] else ''}")
def test_every_gradient_that_the_dead_one_had_submitted_counts_once_and_then_a_mean_is_one_of_three(
    counts: Any, case: tuple[str, tuple[int, ...], bool]
) -> None:
    assert counts[case][2].exit_code == (0 if case[2] else -signal.SIGKILL)
    for rank, outcome in enumerate(counts[case]):
        if rank != 2:
            assert outcome.returned, outcome.stderr[-3000:]
            assert outcome.value[2] == pytest.approx(LAST / SIZE, abs=1e-12)
            for other in (0, 1, 3):
                assert STEPS / SIZE - 1e-9 <= outcome.value[other] <= STEPS / (SIZE - 1) + 1e-9
    if case[0] == "allreduce":
        later = (STEPS - LAST) / (SIZE - 1)
        wanted = [LAST / SIZE + (later if rank != 2 else 0.0) for rank in range(SIZE)]
        assert counts[case][0].value == pytest.approx(wanted)


# Beside it.


def too_few(rank: int) -> None:
    """Two die at the same time on two hosts: each of them alone would leave enough."""
    on_host(rank % 2)
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=3)
    for t in range(400):
        if rank in (1, 2) and t == 3:
            die()
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()


def test_a_run_that_has_become_too_small_ends_on_all_hosts_and_says_so() -> None:
    (outcomes,) = forge.run([Job(too_few, SIZE, timeout_s=120)])
    said = [outcomes[rank].error for rank in (0, 3)]
    assert all("2 would be left, and min_workers is 3" in one for one in said), said


SAMPLES, OF_A_BATCH = 480, 4


def sharing(rank: int, layout: tuple[int, ...], who: int) -> list[int]:
    """The samples that a worker has taken steps with; one of them dies after three."""
    on_host(layout[rank])
    data = TensorDataset(torch.arange(SAMPLES))
    loader = DataLoader(data, batch_sampler=ob.share(data, batch_size=OF_A_BATCH))
    model, used = net(), list[int]()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=1)
    for t, (samples,) in enumerate(loader):
        if rank == who and t == 3:
            for sample in used:
                forge.say(str(sample))
            die()
        loss(model, rank, t).backward()
        optimizer.step()
        used += samples.tolist()
    optimizer.finish()
    if rank == 1 - who:
        assert any(f"{SAMPLES} of {SAMPLES} samples were used once" in one for one in optimizer.summary().sentences), (
            optimizer.summary().sentences
        )
    return used


@pytest.mark.parametrize("who", [0, 1])
def test_of_shared_work_every_sample_is_used_once_whoever_dies(who: int) -> None:
    layout = (0, 1, 1, 1) if who == 0 else (0, 1, 0, 0)
    (outcomes,) = forge.run([Job(sharing, SIZE, (layout, who), timeout_s=120)])
    used = [sample for rank, one in enumerate(outcomes) if rank != who for sample in forge.values([one])[0]]
    assert len(used) == len(set(used))
    assert len(used) == SAMPLES - 3 * OF_A_BATCH
