"""What a sharded model asks of attach besides: memory, norms, buffers, checkpoints, failures, and who waits."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh

import offbeat as ob
from offbeat.live.memory.arena import ARENA_BYTES
from tests.support import forge, islands
from tests.support.forge import Job
from tests.support.scenarios import Told, over, scenario

pytestmark = pytest.mark.live

STEPS = 8
BESIDE: dict[str, tuple[ob.Strategy, dict[str, Any]]] = {
    "clipped": (ob.local_sgd(3), {"max_norm": 0.3}),
    "clipped, of gradients": (ob.allreduce(), {"max_norm": 0.3}),
    "accumulated": (ob.dpsgd(), {"accumulate": 2}),
    "by spread": (ob.adaptive(2, sampling=4), {}),
    "in rounds of all": (ob.self_clocked(2, None, "everyone", late=0), {}),
}
NOBODY_WAITS = {
    "self_clocked": ob.self_clocked(),
    "self_clocked, everyone": ob.self_clocked(1, None),
    "wagma": ob.wagma(tau=None),
    "eager": ob.eager(sync_every=None),
    "ad_psgd": ob.ad_psgd(),
}


def attached(model: nn.Module, strategy: ob.Strategy, **how: Any) -> ob.Attached:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return ob.attach(inner, model, strategy, patience_s=60, **how)


def learn(optimizer: ob.Attached, model: nn.Module, work: ob.Task, rank: int, step: int, passes: int = 1) -> None:
    optimizer.zero_grad()
    for again in range(passes):
        work.value(model, work.take(rank, passes * step + again)).backward()
    optimizer.step()


# Beside two workers with whole models.


Ended = dict[str, tuple[Tensor, int | None, float]]  # the weights; of methods that measure it, period and spread


def beside(rank: int, work: ob.Task, mesh: DeviceMesh | None) -> Ended:
    out = {}
    for name, (strategy, how) in BESIDE.items():
        model = work.build(0)
        with attached(model if mesh is None else islands.sharded(model, mesh), strategy, **how) as optimizer:
            for step in range(STEPS):
                learn(optimizer, model, work, rank, step, how.get("accumulate", 1))
        me = optimizer.me
        out[name] = islands.weights(model), me.reported.period, getattr(me.memory, "C2", 0.0)
    return out


@scenario(4)
def two_islands(rank: int) -> Ended:
    return beside(rank, islands.task(), islands.mesh())


@scenario(2)
def two_workers(rank: int) -> Ended:
    return beside(rank, islands.joined(), None)


@scenario(2)
def two_islands_of_one(rank: int) -> Ended:
    alone = [DeviceMesh("cpu", [each]) for each in range(2)]  # all ranks make both
    return beside(rank, islands.joined(), alone[rank])


@pytest.mark.parametrize("name", BESIDE)
def test_norms_and_periods_are_those_of_the_whole_model(told: Told, name: str) -> None:
    for rank, (ours, period, spread) in enumerate(one[name] for one in told(two_islands)):
        whole, its_period, its_spread = told(two_workers)[rank // islands.OF][name]
        assert (ours - whole).abs().max() < 1e-9
        assert period == its_period
        assert spread == pytest.approx(its_spread, rel=1e-9)
        assert bool(spread) == ("by spread" in name)


@pytest.mark.parametrize("name", BESIDE)
def test_an_island_of_one_rank_is_that_rank(told: Told, name: str) -> None:
    pairs = zip(told(two_islands_of_one), told(two_workers), strict=True)
    assert all((ours[name][0] - whole[name][0]).abs().max() < 1e-9 for ours, whole in pairs)


# Nobody waits.


@scenario(4)
def one_island_stands(rank: int) -> dict[str, dict[str, tuple[int, int]]]:
    """In the middle of its batches one island waits until the other has taken all its steps; on one host, and with a
    host for each rank."""
    return {where: over(rank, where, _one_island_stands, rank, where) for where in ("shm", "each")}


def _one_island_stands(_: int, rank: int, where: str) -> dict[str, tuple[int, int]]:
    out, work, island = {}, islands.task(), rank // islands.OF
    for name, strategy in NOBODY_WAITS.items():
        model = islands.sharded(work.build(0))
        optimizer = attached(model, strategy)
        for step in range(STEPS):
            if island == 1 and step == 3:
                forge.hear(f"{where}, {name}, rank {rank - islands.OF} is through")
            learn(optimizer, model, work, rank, step)
        forge.say(f"{where}, {name}, rank {rank} is through")
        optimizer.finish()
        out[name] = optimizer.me.t, len(optimizer.trace.rounds)
    return out


@pytest.mark.parametrize("where", ["shm", "each"])
@pytest.mark.parametrize("name", NOBODY_WAITS)
def test_an_island_that_stands_still_holds_up_no_other(told: Told, name: str, where: str) -> None:
    outs = [one[where][name] for one in told(one_island_stands)]
    assert [steps for steps, _ in outs] == [STEPS] * 4
    assert [rounds > 0 for _, rounds in outs] == [True, False, True, False], "leaders tell of the rounds"


# Memory.

WIDE = 256
HELD = {**NOBODY_WAITS, "local_sgd": ob.local_sgd(2), "diloco": ob.diloco(2), "allreduce": ob.allreduce()}
AT_MOST = 8  # copies: a visit under way takes four, in ad_psgd
Bytes = tuple[int, int]


@scenario(4)
def held(rank: int) -> dict[str, Bytes]:
    """Between two steps, the bytes that a run sees beside the model: of the largest tensor, and of all its own.

    What lies in the arena is all islands' on the host, of which this rank sees its shard.
    """
    out = {}
    for name, strategy in HELD.items():
        model = islands.sharded(nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, 2, bias=False)))
        before = memory()
        optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.01), model, strategy, patience_s=60)
        for _ in range(4):
            model(torch.ones(2, WIDE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ours = {where: size for where, size in memory().items() if where not in before}
        line = optimizer._run.transport.line
        assert line is not None
        arena = int(line.arena.bytes_at(0, 1).ctypes.data)
        own = [size for where, size in ours.items() if not arena <= where < arena + ARENA_BYTES]
        out[name] = max(ours.values(), default=0), sum(own)
        optimizer.finish()
    return out


def memory() -> dict[int, int]:
    """All that tensors hold: where, and how many bytes."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}


@pytest.mark.parametrize("name", HELD)
def test_no_rank_holds_more_of_the_model_than_its_shard(told: Told, name: str) -> None:
    shard, few = (
        4 * (WIDE**2 + 2 * WIDE) // islands.OF,
        4096,
    )  # of the large layer alone, all would be nearly twice that
    for largest, together in (one[name] for one in told(held)):
        assert largest <= shard + few
        assert together <= AT_MOST * shard + few
    assert any(one["self_clocked"][1] >= shard for one in told(held)), "it was looked at the right place"


# Buffers.


@scenario(4)
def buffers(rank: int) -> tuple[list[Tensor], int]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = islands.sharded(model)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.local_sgd(2), patience_s=60) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * rank + step)) + rank).sum().backward()
            optimizer.step()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    return [norm.running_mean, islands.weights(model)], int(norm.num_batches_tracked)


def test_all_ranks_end_with_equal_weights_and_statistics(told: Told) -> None:
    outs = told(buffers)
    for (mean, weights), batches in outs:
        assert torch.equal(mean, outs[0][0][0])
        assert torch.equal(weights, outs[0][0][1])
        assert batches == 3
    assert outs[0][0][0].abs().max() > 0


# Checkpoints.

SAVED = {
    "local_sgd": ob.local_sgd(3),
    "diloco": ob.diloco(3),
    "adaptive": ob.adaptive(2, sampling=4),
    "self_clocked": ob.self_clocked(2, None, "everyone", late=0),
    "wagma": ob.wagma(wait="everyone", tau=3),
}


def everything(model: nn.Module, optimizer: ob.Attached) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer.inner)
    return {"model": weights, "inner": moments, "offbeat": optimizer.state_dict()["offbeat"]}


@scenario(4)
def resumed(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Each method's weights after a run, and after one that was saved in the middle and taken up anew."""
    out, work = {}, islands.task()
    for name, strategy in SAVED.items():
        place = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(place)
        folder = Path(place[0], f"island-{rank // islands.OF}")
        model = islands.sharded(work.build(0))
        optimizer = attached(model, strategy)
        for step in range(STEPS):
            if step == 5:
                optimizer.average()
                save(everything(model, optimizer), checkpoint_id=folder, process_group=islands.mesh().get_group())
            learn(optimizer, model, work, rank, step)
        optimizer.finish()
        again = islands.sharded(work.build(1))
        optimizer = attached(again, strategy)
        state = everything(again, optimizer)
        load(state, checkpoint_id=folder, process_group=islands.mesh().get_group())
        set_state_dict(again, optimizer.inner, model_state_dict=state["model"], optim_state_dict=state["inner"])
        optimizer.load_state_dict({"offbeat": state["offbeat"]})
        for step in range(5, STEPS):
            learn(optimizer, again, work, rank, step)
        optimizer.finish()
        out[name] = islands.weights(model), islands.weights(again)
    return out


@pytest.mark.parametrize("name", SAVED)
def test_a_run_from_a_distributed_checkpoint_goes_on_as_if_nothing_had_happened(told: Told, name: str) -> None:
    for one in told(resumed):
        through, again = one[name]
        assert (through - again).abs().max() < 1e-12


@scenario(4)
def full(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """The full state in the middle of a run, after its end, and the weights it has ended with."""
    work = islands.task()
    model = islands.sharded(work.build(0))
    with attached(model, ob.local_sgd(1000)) as optimizer:
        for step in range(STEPS):
            learn(optimizer, model, work, rank, step)
        middle = optimizer.full_state_dict()
    return middle, optimizer.full_state_dict(), islands.weights(model)


def test_the_full_state_of_a_sharded_model_is_whole_on_the_first_rank_of_each_island(told: Told) -> None:
    outs = told(full)
    for middle, end, weights in (outs[0], outs[2]):
        whole = islands.task().build(0)
        for state in (middle, end):
            whole.load_state_dict(state)
            assert torch.equal(torch.cat([p.detach().flatten() for p in whole.parameters()]), weights)
    assert [outs[rank][:2] for rank in (1, 3)] == [({}, {}), ({}, {})]


# Failure.


def fails(rank: int, strategy: ob.Strategy) -> None:
    dist.init_process_group("gloo")
    work = islands.task()
    model = islands.sharded(work.build(0))
    with attached(model, strategy) as optimizer:
        for step in range(STEPS):
            if rank == 3 and step == 3:
                raise ArithmeticError("the third shard is ill")
            learn(optimizer, model, work, rank, step)


@pytest.mark.parametrize("where", ["shm", "each"])
@pytest.mark.parametrize("strategy", [ob.local_sgd(2), ob.self_clocked(), ob.ad_psgd()], ids=lambda s: s.name)
def test_a_rank_that_fails_ends_the_run_on_all_islands(strategy: ob.Strategy, where: str) -> None:
    (outcomes,) = forge.run([Job(over, 4, (where, fails, strategy), timeout_s=120, outlives_s=60)])
    assert not any(outcome.hung for outcome in outcomes)
    assert all(outcome.exit_code for outcome in outcomes)
    assert "the third shard is ill" in outcomes[3].stderr
    assert "rank 3 failed: ArithmeticError: the third shard is ill" in outcomes[1].stderr, "it holds the same shard"
