"""Both worlds run the same text: live weights equal simulated ones, to rounding, whatever the timing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job

pytestmark = pytest.mark.live

STEPS = 12
DEPENDS_ON_TIMING = {"eager", "wagma", "nonblocking", "ad_psgd"}

CASES: dict[str, ob.Strategy] = {
    str(s): s
    for s in (
        ob.allreduce(),
        ob.qsgd(),
        ob.qsgd(bits=4, bucket=64),
        ob.local_sgd(),
        ob.local_sgd(period=3),
        ob.local_sgd(period=3, codec=ob.codec.qsgd(8)),
        ob.adaptive(),
        ob.adaptive(period=2, sampling=4),
        ob.dasgd(),
        ob.dasgd(period=3, delay=2, merge="correct"),
        ob.dasgd(period=4, delay=1, codec=ob.codec.qsgd(8)),
        ob.dpsgd(),
        ob.dpsgd(order="atc"),
        ob.dpsgd("complete"),
        ob.dpsgd(codec=ob.codec.qsgd(8)),
        ob.sgp(),
        ob.sgp("ring"),
        ob.matcha(),
        ob.matcha("complete", budget=0.7),
        ob.diloco(),
        ob.diloco(period=4),
        ob.diloco(period=6, fragments=2, overlap=1, merge=0.5),
        ob.noloco(),
        ob.noloco(period=3),
    )
}


def task() -> ob.Task:
    return ob.tasks.digits(batch=8, hidden=12, momentum=0.9, lr=0.05, dtype=torch.float64)


def train(rank: int, names: list[str], pauses: bool) -> dict[str, tuple[Any, Any]]:
    ob.init()
    out = {}
    held = ob.attach(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), torch.nn.Linear(1, 1), ob.allreduce())
    work = task()
    for name in names:
        model = work.build(0)
        optimizer = ob.attach(work.optimizer(list(model.parameters())), model, CASES[name], steps=STEPS, patience_s=120)
        for t in range(STEPS):
            if pauses:
                time.sleep(0.003 * ((rank * 7 + t * 5) % 4 == 0))
            optimizer.zero_grad()
            work.value(model, work.take(rank, t)).backward()
            optimizer.step()
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer.finish()
        out[name] = (before, torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    held.finish()
    return out


RUNS = [(1, False), (2, False), (3, True), (4, False), (5, True)]


@pytest.fixture(scope="module")
def live() -> dict[tuple[int, bool], list[dict[str, tuple[torch.Tensor, torch.Tensor]]]]:
    jobs = [Job(__name__, "train", size, (list(CASES), pauses), timeout_s=300) for size, pauses in RUNS]
    return {run: forge.values(outcomes) for run, outcomes in zip(RUNS, forge.run(jobs), strict=True)}


def test_every_strategy_that_does_not_depend_on_timing_is_in_the_table() -> None:
    assert {s.name for s in CASES.values()} == set(ob.STRATEGIES) - DEPENDS_ON_TIMING


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}{'-uneven' if run[1] else ''}")
def test_live_weights_equal_simulated_ones(live: Any, name: str, run: tuple[int, bool]) -> None:
    simulated = ob.simulate(CASES[name], task(), workers=run[0], steps=STEPS)
    before = torch.stack([worker[name][0] for worker in live[run]])
    after = torch.stack([worker[name][1] for worker in live[run]])
    assert (before - simulated.weights).abs().max() < 1e-9
    assert (after - simulated.final).abs().max() < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_with_the_same_bits(live: Any, name: str) -> None:
    for outcomes in live.values():
        assert all(torch.equal(worker[name][1], outcomes[0][name][1]) for worker in outcomes)
