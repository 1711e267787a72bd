"""Sharded models on a GPU: two islands of two ranks, all on one device, as far as that goes."""

from __future__ import annotations

import tempfile
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

import offbeat as ob
from tests.support import islands

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="there is no GPU here"),
]

STEPS = 7
# Nobody is late in these, so that the result does not depend on timing.
IN_STEP = {str(s): s for s in (ob.allreduce(), ob.local_sgd(2), ob.diloco(3), ob.dasgd(3, 1), ob.dpsgd())}
IN_STEP |= {str(s): s for s in (ob.eager("everyone"), ob.wagma(2, 3, "everyone", merge="correct"))}
METHODS = {**IN_STEP, **{str(s): s for s in (ob.self_clocked(), ob.eager(late=1), ob.wagma(late=1), ob.ad_psgd())}}


def train(rank: int, device: str, name: str) -> tuple[Tensor, int, int]:
    """My shard, and how many numbers of how many that is. (Putting shards together is a collective of torch's own.)"""
    work = islands.task()
    model = work.build(0).to(device)
    whole = sum(p.numel() for p in model.parameters())
    model = islands.sharded(model)
    optimizer = ob.attach(work.optimizer(list(model.parameters())), model, METHODS[name], patience_s=120)
    for step in range(STEPS):
        optimizer.zero_grad()
        work.value(model, tuple(part.to(device) for part in work.take(rank, step))).backward()
        optimizer.step()
    optimizer.finish()
    shard = torch.cat([p.to_local().detach().reshape(-1).cpu() for p in model.parameters()])  # type: ignore[attr-defined]
    return shard, shard.numel(), whole


Told = tuple[Tensor, int, int]


def one_of_them(rank: int, device: str, name: str, folder: str) -> None:
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", 4), rank=rank, world_size=4)
    torch.save(train(rank, device, name), f"{folder}/{rank}")


@cache
def ended(device: str, name: str) -> list[Told]:
    """In processes of their own, for each method: forked ones ended by signal 11."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(one_of_them, (device, name, folder), nprocs=4)
        return [torch.load(f"{folder}/{rank}") for rank in range(4)]


@pytest.mark.parametrize("name", METHODS)
def test_all_islands_on_a_gpu_end_with_one_model(name: str) -> None:
    shards = [shard for shard, _, _ in ended("cuda", name)]
    assert all(torch.equal(one, other) for one, other in zip(shards[: islands.OF], shards[islands.OF :], strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_rank_holds_its_shard_alone(name: str) -> None:
    assert all(held <= 0.6 * whole for _, held, whole in ended("cuda", name))


@pytest.mark.parametrize("name", IN_STEP)
def test_islands_on_a_gpu_end_where_those_on_cpus_do(name: str) -> None:
    for (there, _, _), (here, _, _) in zip(ended("cuda", name), ended("cpu", name), strict=True):
        assert (there - here).abs().max() < 1e-9
