"""Every sample once, through deaths: what a dead worker had not handed in is leased again, and what it had counts.

Four plain processes, whose store none of them hosts, as under ``offbeat launch``. The one that dies says so before,
and the others take no third batch until then: the order of events is the same however quick the machine is.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job
from tests.support.nets import PATIENCE_S
from tests.support.samples import Numbers, once, together
from tests.support.two_lives import die, lives_twice

pytestmark = pytest.mark.live

SIZE, WHO, SAMPLES, BATCH, LAST = 4, 2, 88, 4, 2

# Those whose every step hands in all that its worker has done.
AT_ONCE = {
    "in step": ob.allreduce(),
    "along a graph": ob.dpsgd(order="atc"),
    "eager": ob.eager(),
    "eager, late": ob.eager(late=1),
    "eager, all wait": ob.eager(wait="everyone"),
    "msync": ob.msync("50%"),
    "wagma": ob.wagma(),
}
# Those that hand in several steps together, or a step with the next one.
LATER = {
    "pairs": ob.self_clocked(group=2, wait="first"),
    "self_clocked": ob.self_clocked(),
    "local_sgd": ob.local_sgd(period=3),
    "sgp": ob.sgp(),
    "diloco": ob.diloco(period=3),
    "ad_psgd": ob.ad_psgd(),
}
METHODS = {**AT_ONCE, **LATER}
MOMENTS = ("with batches in its hands", "between backward and step", "as it leaves between two steps")


class Marks(nn.Module):
    """With SGD at rate −1, number s of the weights is what the gradients of sample s have counted."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))


def shared(samples: int = SAMPLES, **settings: Any) -> DataLoader[Any]:
    return ob.share(DataLoader(Numbers(samples), batch_size=BATCH, shuffle=True, **settings))


def attached(model: nn.Module, method: Any) -> ob.Attached:
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    return ob.attach(sgd, model, method, min_workers=1, patience_s=PATIENCE_S, seed=1)


def of_samples(optimizer: ob.Attached) -> list[str]:
    return [one for one in optimizer.summary().sentences if "samples" in one]


def dying(rank: int, method: str, moment: str, loaders: int, epochs: int) -> tuple[list[str], list[float]]:
    """What is said of the samples, and the weights. What a worker has taken steps with, it notes."""
    model = Marks()
    optimizer = attached(model, METHODS[method])
    loader = shared(num_workers=loaders)
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            if epoch == 0 and number == LAST:
                if rank == WHO:
                    forge.say("dying")
                    if moment == MOMENTS[0]:
                        die()
                    if moment == MOMENTS[2]:
                        optimizer.leave()
                        return [], []
                else:
                    forge.hear("dying")
            optimizer.zero_grad()
            (-model.w[batch].sum()).backward()
            if rank == WHO and epoch == 0 and number == LAST:
                die()
            optimizer.step()
            forge.note((epoch, batch.tolist()))
    optimizer.finish()
    return of_samples(optimizer), model.w.detach().tolist()


Case = tuple[str, str, int, int]
CASES: list[Case] = [
    *((method, MOMENTS[k % 2], 0, 1) for k, method in enumerate(METHODS)),
    *((method, MOMENTS[(k + 1) % 2], 0, 2) for k, method in enumerate(METHODS)),
    *((method, MOMENTS[2], 0, 1) for method in ("in step", "eager, late", "self_clocked")),
    ("eager", MOMENTS[0], 2, 1),
]


@pytest.fixture(scope="module")
def ended() -> dict[Case, list[forge.Outcome]]:
    jobs = [Job(dying, SIZE, case, timeout_s=90) for case in CASES]
    return dict(zip(CASES, forge.run(jobs, at_once=2), strict=True))


def survivors(outcomes: list[forge.Outcome]) -> list[Any]:
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != WHO]
    for outcome in others:
        assert outcome.returned, outcome.stderr[-3000:]
    return [outcome.value for outcome in others]


def named(case: Case) -> str:
    method, moment, loaders, epochs = case
    return f"{method}: {moment}{', which were loaded ahead' if loaders else ''}, {epochs} epochs"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_sample_is_used_once_and_the_run_says_so(ended: Any, case: Case) -> None:
    epochs = case[3]
    each = "" if epochs == 1 else f", in each of {epochs} epochs"
    for said, _ in survivors(ended[case]):
        assert said == [f"{SAMPLES} of {SAMPLES} samples were used once{each}."]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_steps_were_taken_once_with_what_had_been_handed_in_and_again_with_what_had_not(ended: Any, case: Case) -> None:
    """In step the dead one hands its gradient in while it computes, and dies before its step is over."""
    method, moment, _, epochs = case
    survivors(ended[case])
    noted = [outcome.noted for outcome in ended[case]]
    for epoch in range(epochs):
        used = together([samples for one in noted for at, samples in one if at == epoch])
        dead = together([samples for at, samples in noted[WHO] if at == epoch])
        if epoch == 0 and method == "in step" and moment == MOMENTS[1]:
            assert set(used.values()) == {1}
            assert used.total() == SAMPLES - BATCH
        elif method in AT_ONCE:
            assert used == once(SAMPLES)
        else:
            assert set(used) == set(range(SAMPLES))
            assert {sample for sample, times in used.items() if times > 1} <= set(dead)
            assert set(used.values()) <= {1, 2}


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in ("in step", "eager")], ids=named)
def test_every_gradient_is_in_the_weights_once(ended: Any, case: Case) -> None:
    """As a part of those who were there: of four, of three, or of those who still had data."""
    parts = (1 / 4, 1 / 3, 1 / 2, 1.0)
    sums = {round(sum(some), 9) for some in itertools.combinations_with_replacement(parts, case[3])}
    for _, weights in survivors(ended[case]):
        assert {round(weight, 9) for weight in weights} <= sums


def dies_last(rank: int, method: str) -> list[str]:
    """One keeps its second batch, and what its loader has fetched, until the others have nothing else to do."""
    model = Marks()
    optimizer = attached(model, METHODS[method])
    for number, batch in enumerate(shared(num_workers=2 if rank == WHO else 0)):
        if rank == WHO and number == 1:
            others = set(range(SIZE)) - {WHO}
            while {one.rank for one in optimizer.status().workers if "give back" in one.doing} != others:
                pass
            die()
        optimizer.zero_grad()
        (-model.w[batch].sum()).backward()
        optimizer.step()
    optimizer.finish()
    return of_samples(optimizer)


@pytest.mark.parametrize("method", ["eager", "eager, late", "wagma", "self_clocked", "ad_psgd"])
def test_those_who_have_no_work_left_wait_for_what_the_last_one_may_give_back(method: str) -> None:
    (outcomes,) = forge.run([Job(dies_last, SIZE, (method,), timeout_s=90)])
    for rank, outcome in enumerate(outcomes):
        if rank != WHO:
            assert outcome.returned, outcome.stderr[-3000:]
            assert outcome.value == [f"{SAMPLES} of {SAMPLES} samples were used once."]


# Coming back.

MANY, MORE = 200_000, 3


def comes_back(rank: int, method: str) -> tuple[list[int], list[str]]:
    """One whole epoch would last for minutes; it ends when the one that is back has had some batches of it."""
    model = nn.Linear(1, 1).double()

    def life(last: int | None) -> tuple[list[int], ob.Attached]:
        optimizer, used = attached(model, method), list[int]()
        for number, batch in enumerate(shared(MANY)):
            if forge.said("enough"):
                break
            if number == last:
                forge.note(used)
                die()
            optimizer.zero_grad()
            (0.0 * model(batch.double()[:, None])).mean().backward()
            optimizer.step()
            used += batch.tolist()
            if rank == WHO and last is None and number == MORE:
                forge.say("enough")
        return used, optimizer

    if rank == WHO:
        lives_twice(lambda: life(LAST))
    used, optimizer = life(None)
    optimizer.finish()
    return used, of_samples(optimizer)


@pytest.mark.parametrize("method", ["allreduce", "eager", "self_clocked"])
def test_a_worker_that_is_back_is_given_batches_and_no_sample_is_used_twice(method: str) -> None:
    (outcomes,) = forge.run([Job(comes_back, SIZE, (method,), timeout_s=90)])
    out = forge.values(outcomes)
    assert len(out[WHO][0]) > MORE * BATCH
    (before,) = outcomes[WHO].noted
    used: Counter[int] = together([before, *(one for one, _ in out)])
    again = {sample for sample, times in used.items() if times > 1}
    assert not again if method != "self_clocked" else again <= set(before)  # it hands in several steps together
    for _, (said, *_) in out:
        found = re.match(r"Epoch 0: ([\d,]+) of 200,000 samples were used, and not ", said)
        assert found is not None, said
        assert int(found[1].replace(",", "")) == len(used)
