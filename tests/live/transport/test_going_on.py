"""With ``min_workers`` the others go on when a worker dies, and what it had submitted still counts.

Four plain processes, whose store none of them hosts, as under ``offbeat launch``. ``make long`` has every method with
every death of every rank; else each method sees two.
"""

from __future__ import annotations

import itertools
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job
from tests.support.going_on import COUNTED, LAST, METHODS, MOMENTS, SIZE, STEPS, Ticks, die, left_behind
from tests.support.long import LONG
from tests.support.nets import loss, net, sgd

pytestmark = pytest.mark.live

WHO = ((0,), (SIZE - 1,), (1,), (0, 2))


Case = tuple[str, str, tuple[int, ...]]


def cases() -> list[Case]:
    if LONG:
        return list(itertools.product(METHODS, MOMENTS, WHO))
    return [(m, MOMENTS[(k + 2 * i + k // 4) % 4], WHO[(k + i) % 4]) for k, m in enumerate(METHODS) for i in range(2)]


CASES = cases()


def test_every_method_is_in_the_table_and_every_death_at_every_moment() -> None:
    assert {strategy.name for strategy in METHODS.values()} == set(ob.STRATEGIES)
    assert {case[0] for case in CASES} == set(METHODS)
    assert {case[1:] for case in CASES} == set(itertools.product(MOMENTS, WHO))


@pytest.fixture(scope="module")
def ended() -> dict[Case, list[forge.Outcome]]:
    jobs = [Job(left_behind, SIZE, case, timeout_s=120) for case in CASES]
    return dict(zip(CASES, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[2]} {case[1]}")
def test_the_others_take_all_their_steps_and_end_equal(ended: Any, case: Case) -> None:
    outcomes, dead = ended[case], case[2]
    assert all(outcomes[rank].exit_code == -signal.SIGKILL for rank in dead)
    others = [outcome for rank, outcome in enumerate(outcomes) if rank not in dead]
    for outcome in others:
        assert outcome.returned, outcome.stderr[-3000:]
    assert all(torch.tensor(outcome.value).isfinite().all() for outcome in others)
    assert len({tuple(outcome.value) for outcome in others}) == 1


# What counts.


def counted(rank: int, method: str) -> list[float]:
    model = Ticks()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, COUNTED[method], min_workers=1)
    for t in range(STEPS):
        if rank == 2 and t == LAST:
            die()
        optimizer.zero_grad()
        (-model.w[rank]).backward()
        optimizer.step()
    optimizer.finish()
    return model.w.detach().tolist()


@pytest.fixture(scope="module")
def counts() -> dict[str, list[forge.Outcome]]:
    jobs = [Job(counted, SIZE, (method,), timeout_s=120) for method in COUNTED]
    return dict(zip(COUNTED, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("method", [method for method in COUNTED if method != "msync"])
def test_every_gradient_that_the_dead_one_had_submitted_counts_once_and_is_a_part_of_four(
    counts: Any, method: str
) -> None:
    for rank, outcome in enumerate(counts[method]):
        if rank != 2:
            assert outcome.returned, outcome.stderr[-3000:]
            assert outcome.value[2] == pytest.approx(LAST / SIZE, abs=1e-12)


@pytest.mark.parametrize("method", COUNTED)
def test_after_its_death_a_mean_is_one_of_three(counts: Any, method: str) -> None:
    """Each of the others' gradients counts a quarter or a third; together between both."""
    for rank, outcome in enumerate(counts[method]):
        if rank != 2:
            assert outcome.returned, outcome.stderr[-3000:]
    ends = {tuple(outcome.value) for rank, outcome in enumerate(counts[method]) if rank != 2}
    assert len(ends) == 1
    if method == "allreduce":
        assert list(next(iter(ends))) == pytest.approx(
            [LAST / SIZE + (STEPS - LAST) / (SIZE - 1) if rank != 2 else LAST / SIZE for rank in range(SIZE)]
        )
    elif method != "msync":
        for rank in (0, 1, 3):
            assert next(iter(ends))[rank] + 1e-9 >= STEPS / SIZE
            assert next(iter(ends))[rank] <= STEPS / (SIZE - 1) + 1e-9


BIG = 1 << 18  # numbers: a bucket of its own, which travels while backward goes on


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        self.last = nn.Parameter(torch.zeros(BIG, dtype=torch.float64))


def between_two_buckets(rank: int) -> list[list[float]]:
    """One dies in the middle of a backward, when the gradients of the last layer have left and the first's have not."""
    model = Layers()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, ob.allreduce(), min_workers=1)
    for t in range(STEPS):
        optimizer.zero_grad()
        if rank == 2 and t == LAST:
            model.first.register_post_accumulate_grad_hook(lambda _: die())
        first = model.first[rank]
        (-(first + model.last[rank])).backward()  # the last one's gradient comes first
        optimizer.step()
    optimizer.finish()
    return [model.first.tolist(), model.last[:SIZE].tolist()]


def test_of_a_step_in_whose_middle_one_dies_what_had_left_is_a_mean_of_four_and_the_rest_of_three() -> None:
    (outcomes,) = forge.run([Job(between_two_buckets, SIZE, timeout_s=120)])
    later, others = (STEPS - LAST) / (SIZE - 1), (0, 1, 3)
    for rank in others:
        assert outcomes[rank].returned, outcomes[rank].stderr[-3000:]
        first, last = outcomes[rank].value
        assert [first[r] for r in others] == pytest.approx([LAST / SIZE + later] * 3)
        assert first[2] == pytest.approx(LAST / SIZE)
        assert [last[r] for r in others] == pytest.approx([(LAST + 1) / SIZE + later - 1 / (SIZE - 1)] * 3)
        assert last[2] == pytest.approx((LAST + 1) / SIZE)


OF_WEIGHTS = [
    ob.dpsgd(),
    ob.sgp(),
    ob.matcha(),
    ob.local_sgd(period=2),
    ob.dasgd(period=2, delay=1),
    ob.noloco(period=2),
]


def resting(rank: int, method: str) -> list[float]:
    model = Ticks()
    with torch.no_grad():
        model.w.fill_(1.0)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, METHODS[method], min_workers=1)
    for t in range(STEPS):
        if rank == 2 and t == LAST:
            die()
        optimizer.zero_grad()
        model.w.sum().backward()
        optimizer.step()
    optimizer.finish()
    return model.w.tolist()


@pytest.mark.parametrize("method", OF_WEIGHTS, ids=str)
def test_where_nothing_is_learned_nothing_moves_whoever_dies(method: ob.Method) -> None:
    """Rows of a mixing matrix go on summing to one, and means are divided by those who are there."""
    (outcomes,) = forge.run([Job(resting, SIZE, (str(method),), timeout_s=120)])
    for rank, outcome in enumerate(outcomes):
        if rank != 2:
            assert outcome.returned, outcome.stderr[-3000:]
            assert outcome.value == pytest.approx([1.0] * SIZE, abs=1e-12)


# What ends a run all the same.


def too_few(rank: int) -> None:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=3)
    for t in range(400):
        if (rank == 1 and t == 3) or (rank == 2 and t == 30):
            die()
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()


def failing(rank: int) -> None:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=1)
    for t in range(400):
        if rank == 1 and t == 3:
            raise ValueError("a bug")
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()


def alone(rank: int) -> tuple[tuple[int, ...], list[str], list[str]]:
    """All but one die, one after the other. Whom the last one finds, what its summary and the status say of them."""
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.self_clocked(), min_workers=1)
    for t in range(60):
        if rank < SIZE - 1 and t == 5 * (rank + 1):
            die()
        loss(model, rank, t).backward()
        optimizer.step()
        time.sleep(0.002)
    notes = list(optimizer.status().notes)
    optimizer.finish()
    return optimizer.members, [said for said in optimizer.summary().sentences if "died" in said], notes


SAMPLES, OF_A_BATCH, BEGUN = 480, 4, 16  # a worker begins so many batches with one request


def sharing(rank: int) -> list[int]:
    """The samples that a worker has taken steps with; one of them dies after three."""
    data = TensorDataset(torch.arange(SAMPLES))
    loader = DataLoader(data, batch_sampler=ob.share(data, batch_size=OF_A_BATCH))
    model, used = net(), list[int]()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=1)
    for t, (samples,) in enumerate(loader):
        if rank == 1 and t == 3:
            die()
        loss(model, rank, t).backward()
        optimizer.step()
        used += samples.tolist()
    optimizer.finish()
    return used


def too_many_wanted(rank: int) -> str:
    model = net()
    with pytest.raises(ValueError, match="min_workers is 5, and there are 4 workers") as found:
        ob.attach(sgd(model), model, ob.eager(), min_workers=5)
    return str(found.value)


SCRIPTS = (too_few, failing, alone, sharing, too_many_wanted)


@pytest.fixture(scope="module")
def scripts() -> dict[Any, list[forge.Outcome]]:
    jobs = [Job(script, SIZE, timeout_s=120) for script in SCRIPTS]
    return dict(zip(SCRIPTS, forge.run(jobs, at_once=2), strict=True))


def test_a_run_that_has_become_too_small_ends_and_says_so(scripts: Any) -> None:
    for rank in (0, 3):
        assert "rank 2 gives no sign of life: the process has ended; 2 would be left, and min_workers is 3" in (
            scripts[too_few][rank].error
        )


def test_an_exception_in_the_script_of_one_worker_ends_all(scripts: Any) -> None:
    for rank in (0, 2, 3):
        assert "rank 1 failed: ValueError: a bug" in scripts[failing][rank].error


def test_the_last_worker_goes_on_alone(scripts: Any) -> None:
    outcome = scripts[alone][SIZE - 1]
    assert outcome.returned, outcome.stderr[-3000:]
    members, sentences, notes = outcome.value
    assert members == (SIZE - 1,)
    assert sorted(said[:11] for said in sentences) == [f"Rank {rank} died" for rank in range(SIZE - 1)]
    assert notes == ["The run goes on without ranks 0, 1 and 2."]


def test_of_shared_work_only_what_the_dead_one_had_begun_is_left_out(scripts: Any) -> None:
    used = [forge.values([scripts[sharing][rank]])[0] for rank in (0, 2, 3)]
    samples = [sample for some in used for sample in some]
    assert len(samples) == len(set(samples))
    assert len(samples) >= SAMPLES - (BEGUN + 2) * OF_A_BATCH


def test_more_workers_than_there_are_cannot_be_asked_for(scripts: Any) -> None:
    forge.values(scripts[too_many_wanted])
