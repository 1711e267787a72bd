"""Replicas, their optimisers and their gradients lie where the task's model does: in virtual time, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import offbeat as ob

GPU = pytest.param("cuda", marks=pytest.mark.skipif("not torch.cuda.is_available()", reason="there is no GPU here"))
DEVICES = ("cpu", GPU)
OPTIMISERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.005),
    "fused": partial(torch.optim.AdamW, lr=0.005, fused=True),
}
METHODS = (ob.allreduce(), ob.self_clocked(), ob.ad_psgd(), ob.eager(late=1), ob.wagma(merge="correct"))
WORKERS, STEPS = 6, 12


def run(device: str, strategy: ob.Strategy, optimiser: str) -> ob.Run:
    """In double precision: what a GPU rounds otherwise must not be taken for something that it does otherwise."""
    task = ob.tasks.digits(batch=8, hidden=16, dtype=torch.float64, device=device)
    task = replace(task, optimizer=OPTIMISERS[optimiser])
    return ob.simulate(strategy, task, WORKERS, STEPS, seed=3, compute_s=ob.delays.lognormal(0.1, 0.5))


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("strategy", METHODS, ids=lambda s: s.name)
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_lies_on_the_device_and_ends_as_on_the_cpu(device: str, strategy: ob.Strategy, optimiser: str) -> None:
    there, here = run(device, strategy, optimiser), run("cpu", strategy, optimiser)
    assert there.weights.device.type == there.final.device.type == device
    assert (there.seconds, there.gradients) == (here.seconds, here.gradients)
    assert there.losses[-1] < there.losses[0], "it learns"
    torch.testing.assert_close(there.final.cpu(), here.final, rtol=1e-9, atol=1e-9)
    assert there.metrics["loss"] == pytest.approx(here.metrics["loss"], rel=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_run_on_the_same_device_ends_with_the_same_bits(device: str) -> None:
    ends = [run(device, ob.self_clocked(), "AdamW").final for _ in range(2)]
    assert torch.equal(*ends)


@pytest.mark.parametrize("device", DEVICES)
def test_batches_may_lie_elsewhere_than_the_model(device: str) -> None:
    images = ob.tasks.digits(batch=8, hidden=16, device="cpu")
    task = replace(images, model=lambda: images.model().to(device), evaluate=None)
    done = ob.simulate(ob.local_sgd(3), task, WORKERS, STEPS, seed=3)
    assert done.final.device.type == device
    torch.testing.assert_close(done.final.cpu(), ob.simulate(ob.local_sgd(3), images, WORKERS, STEPS, seed=3).final)
