"""Coded sums between processes: equal bits on all, and as many bytes as the simulator counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import offbeat as ob
from tests.support.scenarios import Told, over, scenario

pytestmark = pytest.mark.live

STEPS = 4
METHODS = {
    "local_sgd": ob.local_sgd(1, codec=ob.codec.int8(bucket=100)),
    "local_sgd, fewer buckets than workers": ob.local_sgd(1, codec=ob.codec.int8(bucket=400)),
    "local_sgd, one bucket": ob.local_sgd(1, codec=ob.codec.qsgd(4, bucket=4000)),
    "local_sgd, the largest": ob.local_sgd(1, codec=ob.codec.topk(5, chunk=100)),
    "wagma": ob.wagma(3, 1, "everyone", codec=ob.codec.int8(bucket=100)),
    "eager": ob.eager("everyone", sync_every=1, codec=ob.codec.int8(bucket=100)),
}


def task() -> ob.Task:
    return ob.tasks.regression(dimension=1000, batch=8, dtype=torch.float32)


Trained = dict[str, tuple[Tensor, int]]


def _train(rank: int) -> Trained:
    """For each method the weights after the last step, and the bytes sent until then."""
    out, work = {}, task()
    for name, strategy in METHODS.items():
        model = work.build(0)
        optimizer = ob.attach(work.optimizer(list(model.parameters())), model, strategy, patience_s=120)
        for t in range(STEPS):
            optimizer.zero_grad()
            work.value(model, work.take(rank, t)).backward()
            optimizer.step()
        out[name] = (torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone(), optimizer.wire_bytes)
        optimizer.finish()
    return out


@scenario(3)
def trained(rank: int) -> Trained:
    """As if each had a host of its own."""
    return over(rank, "each", _train)


@scenario(3)
def on_one_host(rank: int) -> Trained:
    return over(rank, "shm", _train)


@pytest.mark.parametrize("name", METHODS)
def test_all_workers_get_the_same_bits(told: Told, name: str) -> None:
    weights = [run[name][0] for run in told(trained)]
    assert all(torch.equal(w, weights[0]) for w in weights)


@pytest.mark.parametrize("name", METHODS)
def test_they_send_as_many_bytes_as_simulated_ones(told: Told, name: str) -> None:
    sent = sum(run[name][1] for run in told(trained))
    assert sent == ob.simulate(METHODS[name], task(), 3, STEPS).wire_bytes


@pytest.mark.parametrize("name", METHODS)
def test_on_one_host_nothing_is_coded_and_the_simulator_agrees(told: Told, name: str) -> None:
    everyones, strategy = [run[name] for run in told(on_one_host)], METHODS[name]
    uncoded = ob.strategy(strategy.name, **{**strategy.settings, "codec": None})
    there = [ob.simulate(s, task(), 3, STEPS, network=ob.Network(hosts=1)) for s in (strategy, uncoded)]
    sent = sum(sent for _, sent in everyones)
    assert all(0 <= run.wire_bytes - sent < 3 * STEPS for run in there)  # each counts whole bytes of every exchange
    for weights, _ in everyones:
        assert (weights - there[0].weights[0]).abs().max() < 1e-5  # some bits, of numbers up to 4
        assert (weights - there[1].weights[0]).abs().max() < 1e-5
