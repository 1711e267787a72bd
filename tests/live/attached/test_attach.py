"""An attached optimiser beside the rest of a script: other models, schedulers, evaluation, the default group."""

from __future__ import annotations

import io
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job
from tests.support.nets import SIZE, distance, flat, loss, net, same, serial, sgd, trained
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live


@scenario(SIZE)
def models_one_after_the_other(rank: int) -> Any:
    return [trained(rank, ob.local_sgd(period=2)) for _ in range(3)]


def test_models_can_be_attached_one_after_the_other(told: Told) -> None:
    for runs in told(models_one_after_the_other):
        assert same(runs)


@scenario(SIZE)
def two_models_at_once(rank: int) -> Any:
    alone = [trained(rank, ob.local_sgd(period=2)), trained(rank, ob.allreduce(), seed=5)]
    models = [net(), net(5)]
    first = ob.attach(sgd(models[0]), models[0], ob.local_sgd(period=2))
    second = ob.attach(sgd(models[1]), models[1], ob.allreduce())
    for t in range(5):
        for model, optimizer in zip(models, (first, second), strict=True):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
    second.finish()
    first.finish()
    return [torch.equal(a, flat(m)) for a, m in zip(alone, models, strict=True)]


def test_two_models_can_be_attached_at_once(told: Told) -> None:
    assert told(two_models_at_once) == [[True, True]] * SIZE


@scenario(SIZE)
def average_in_the_middle(rank: int) -> Any:
    out = {}
    for strategy in (ob.local_sgd(period=50), ob.dasgd(), ob.dpsgd(), ob.sgp(), ob.diloco(period=50)):
        model = net()
        optimizer = ob.attach(sgd(model), model, strategy)
        for t in range(5):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
            if t == 3:
                before = flat(model)
                optimizer.average()
                out[strategy.name] = before, flat(model)
        optimizer.finish()
    return out


@pytest.mark.parametrize("name", ["local_sgd", "dasgd", "dpsgd", "sgp", "diloco"])
def test_average_makes_all_ranks_equal_to_their_mean(told: Told, name: str) -> None:
    outs = [out[name] for out in told(average_in_the_middle)]
    assert not same(before for before, _ in outs)
    assert same(after for _, after in outs)
    assert distance(outs[0][1], torch.stack([before for before, _ in outs]).mean(dim=0)) < 1e-15


@scenario(SIZE)
def alone(rank: int) -> Any:
    """Rank 1 evaluates and saves by itself, in the middle."""
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    saved = None
    for t in range(5):
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()
        if rank == 1:
            with torch.no_grad():
                loss(model, rank, t)
            loss(model, rank, t)
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
    optimizer.finish()
    return distance(flat(model), serial(sgd, 5)), saved


def test_one_rank_may_evaluate_and_save_by_itself(told: Told) -> None:
    outs = told(alone)
    assert max(difference for difference, _ in outs) < 1e-14
    saved = outs[1][1]
    assert saved["offbeat"]["strategy"] == "allreduce()"
    assert len(saved["state"]) == 4
    assert saved["param_groups"][0]["momentum"] == 0.9


@scenario(SIZE)
def users_own_collectives(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.dasgd(period=2, delay=1))
    sums = []
    for t in range(6):
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        mine = torch.tensor([float(rank + t)])
        dist.all_reduce(mine)
        sums.append(mine.item())
        optimizer.step()
    groups = dist.distributed_c10d._world.pg_map
    optimizer.finish()
    mine = torch.ones(1)
    dist.all_reduce(mine)
    return sums, mine.item(), len(groups), dist.is_initialized()


def test_the_default_group_stays_the_users(told: Told) -> None:
    for sums, after, groups, alive in told(users_own_collectives):
        assert sums == [3.0 + 3 * t for t in range(6)]
        assert after == SIZE
        assert groups == 1
        assert alive


@scenario(SIZE)
def schedulers(rank: int) -> Any:
    return {name: _scheduled(rank, strategy) for name, strategy in SCHEDULED.items()}


SCHEDULED = {"at once": ob.allreduce(), "a step later": ob.eager("everyone", late=1)}


def _scheduled(rank: int, strategy: ob.Strategy) -> Any:
    out = {}
    for when in ("before", "after"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = net()
            inner = sgd(model)
            if when == "before":
                scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
            optimizer = ob.attach(inner, model, strategy)
            if when == "after":
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            rates = []
            for t in range(5):
                optimizer.zero_grad()
                loss(model, rank, t).backward()
                optimizer.step()
                scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
            optimizer.finish()
        out[when] = flat(model), rates, inner.param_groups[0]["lr"]
    return out


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedulers_work_without_a_warning_on_the_inner_and_on_the_attached_optimizer(told: Told, name: str) -> None:
    for out in (one[name] for one in told(schedulers)):
        assert out["before"][1] == out["after"][1] == [0.1, 0.05, 0.05, 0.025, 0.025]
        assert out["before"][2] == out["after"][2] == 0.025
        assert torch.equal(out["before"][0], out["after"][0])


def alone_in_the_world(rank: int) -> Any:

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    before = dist.is_initialized()
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    during = dist.is_initialized()
    for t in range(5):
        optimizer.zero_grad()
        loss(model, 0, t).backward()
        optimizer.step()
    optimizer.finish()
    after = dist.is_initialized()
    second = ob.attach(sgd(model), model, ob.allreduce())
    again = dist.is_initialized()
    reference = serial(sgd, 5, ranks=lambda t: [0])
    difference = distance(flat(model), reference)
    second.finish()
    return before, during, after, again, difference


def test_a_plain_script_needs_neither_torchrun_nor_init() -> None:
    (outcome,) = forge.run([Job(alone_in_the_world, 1)])[0]
    before, during, after, again, difference = forge.values([outcome])[0]
    assert (before, during, after, again) == (False, True, False, True)
    assert difference < 1e-14


@scenario(2)
def names_no_strategy(rank: int) -> tuple[str, int]:
    model = torch.nn.Linear(3, 1)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, patience_s=120) as optimizer:
        for _ in range(6):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    return str(optimizer.strategy), len(optimizer.trace.rounds)


def test_without_a_strategy_it_is_the_self_clocked_one(told: Told) -> None:
    for strategy, rounds in told(names_no_strategy):
        assert strategy == str(ob.self_clocked())
        assert rounds > 0
