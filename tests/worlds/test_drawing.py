"""What a model draws, such as dropout's masks, is a function of the run's seed, the worker and the step alone."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat as ob
from offbeat.live.job.worker import Job, take_part
from offbeat.sim.fleet import Fleet

ALONE = ob.local_sgd(99)  # nobody hears from anybody, so losses depend on one's own draws only


class Noisy(nn.Module):
    """Draws from a generator of somebody else's."""

    def __init__(self, draws: Any) -> None:
        super().__init__()
        self.layer, self.draws = nn.Linear(6, 1, dtype=torch.float64), draws

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.draws()


MODELS = {
    "dropout": lambda: nn.Sequential(
        nn.Linear(6, 16, dtype=torch.float64), nn.Dropout(0.5), nn.Linear(16, 1, dtype=torch.float64)
    ),
    "dropout and batch norm": lambda: nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)
    ).double(),
    "python": lambda: Noisy(random.random),
    "numpy": lambda: Noisy(np.random.rand),
}


def task(model: str = "dropout", evaluate: Any = None) -> ob.Task:
    plain = ob.tasks.regression(dimension=6, batch=16)
    return ob.Task(MODELS[model], plain.loss, plain.batch, lambda p: torch.optim.SGD(p, lr=0.01), None, evaluate)


@torch.no_grad()
def look(model: nn.Module) -> dict[str, float]:
    """An evaluation that draws, as it forgets to say ``model.eval()``."""
    return {"loss": model(torch.ones(2, 6, dtype=torch.float64)).mean().item()}


def disturb(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


METHODS = [ob.allreduce(), ALONE, ob.eager(), ob.wagma(2), ob.ad_psgd(), ob.nonblocking(3), ob.nonblocking("auto")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", METHODS, ids=lambda s: s.name)
def test_a_run_does_not_depend_on_what_was_drawn_before(strategy: ob.Strategy, model: Any) -> None:
    hashes = []
    for seed in (1, 2):
        disturb(seed)
        hashes.append(ob.simulate(strategy, task(model), 4, 5, delays=ob.delays.exponential(0.1)).hash)
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("model", MODELS)
def test_a_run_does_not_depend_on_whose_gradients_are_computed_together(model: Any) -> None:
    runs = [
        ob.simulate(ALONE, task(model), 4, 5, delays=delays)
        for delays in (None, ob.delays.exponential(0.3), ob.delays.chronic(0, 9.0))
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run.losses, runs[0].losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(run.weights, runs[0].weights, rtol=1e-12, atol=1e-14)


def test_another_seed_draws_otherwise() -> None:
    a, b = (ob.simulate(ALONE, masks(), 2, 1, seed=seed).weights for seed in (0, 1))
    assert not torch.equal(a, b)


@pytest.mark.parametrize("model", MODELS)
def test_the_global_generators_are_left_alone(model: Any) -> None:
    disturb(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for strategy in (ob.allreduce(), ob.nonblocking(3)):
        ob.simulate(strategy, task(model, look), 3, 3, watch_s=0.1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[2], strict=True))


def test_what_an_evaluation_draws_does_not_depend_on_the_past() -> None:
    seen = []
    for seed in (1, 2):
        disturb(seed)
        run = ob.simulate(ob.allreduce(), task(evaluate=look), 3, 3, watch_s=0.1)
        seen.append((run.metrics, run.curve))
    assert seen[0] == seen[1]


# A model whose gradient is its mask.


class Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.w.expand(len(x), -1), 0.5, training=self.training).sum(dim=1)


def masks(rows: int = 1) -> ob.Task:
    return ob.Task(
        Mask, lambda out, y: out.mean(), lambda rank, step: (torch.ones(rows, 1), torch.ones(rows)),
        lambda p: torch.optim.SGD(p, lr=1.0),
    )  # fmt: skip


def test_every_worker_and_every_step_draws_its_own() -> None:
    after = [ob.simulate(ALONE, masks(), 5, steps).weights for steps in range(5)]
    drawn = torch.cat([later - earlier for earlier, later in pairwise(after)])
    assert len(drawn.unique(dim=0)) == 20


def test_every_micro_batch_draws_its_own() -> None:
    """Of eight in a batch: with the masks of the first alone, every weight would be 0 or 2."""
    moved = ob.simulate(ob.nonblocking(8), masks(8), 1, 1).final
    assert len(moved.unique()) > 2
    whole, cut = (ob.simulate(s, masks(8), 3, 4).final for s in (ob.allreduce(), ob.nonblocking(1)))
    torch.testing.assert_close(whole, cut)  # one micro-batch is the batch, with its draws


def test_models_that_draw_nothing_are_still_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [], Fleet._loop

    def noted(self: Fleet, *how: Any) -> Any:
        calls.append(1)
        return original(self, *how)

    monkeypatch.setattr(Fleet, "_loop", noted)
    ob.simulate(ob.allreduce(), ob.tasks.regression(dimension=6), 3, 3)
    assert not calls
    ob.simulate(ob.allreduce(), task(), 3, 3)
    assert calls


# Live.


@pytest.mark.parametrize("strategy", [ob.local_sgd(2), ob.nonblocking(2)], ids=lambda s: s.name)
def test_a_live_run_draws_what_a_simulated_one_does(strategy: ob.Strategy) -> None:
    disturb(3)
    before = torch.get_rng_state()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        run = take_part(Job(strategy, masks(4), steps=5, seed=11))
    finally:
        dist.destroy_process_group()
    assert run is not None
    torch.testing.assert_close(run.final, ob.simulate(strategy, masks(4), 1, 5, seed=11).final)
    assert torch.equal(torch.get_rng_state(), before)
