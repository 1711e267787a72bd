"""Sharded models that cannot be attached are refused, on all ranks, in a sentence that names a way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, DTensor

import offbeat as ob
from offbeat.live.transport.island import checked
from tests.support import islands
from tests.support.forge import attempt
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def refused(model: nn.Module, strategy: ob.Strategy | None = None, **how: Any) -> str:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return attempt(lambda: ob.attach(inner, model, strategy or ob.local_sgd(2), patience_s=60, **how))


def placed(placement: Any, mesh: DeviceMesh) -> nn.Module:
    """A model of which one parameter lies so."""
    model = net()
    fully_shard(model[0], mesh=mesh)
    for name, p in list(model[1].named_parameters()):
        laid = distribute_tensor(p.detach(), mesh, [Replicate()])
        if isinstance(placement, Partial):
            laid = DTensor.from_local(p.detach(), mesh, [placement], run_check=False)
        model[1].register_parameter(name, nn.Parameter(laid))
    return model


@scenario(4)
def refusals(rank: int) -> dict[str, str]:
    inside, world = islands.mesh(), init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    three = DeviceMesh("cpu", [0, 1, 2]) if rank < 3 else None
    one = net()
    fully_shard(one[0], mesh=inside)
    apart = net()
    fully_shard(apart[0], mesh=inside)
    fully_shard(apart[1], mesh=grid["between"])
    out = {
        "one island": refused(fully_shard(net(), mesh=world)),
        "replicated between": refused(fully_shard(net(), mesh=grid)),
        "held whole": refused(one),
        "two meshes": refused(apart),
        "replicated": refused(placed(Replicate(), inside)),
        "partial": refused(placed(Partial(), inside)),
        "another mesh": refused(islands.sharded(net()), mesh=world),
        "not sharded": refused(net(), mesh=inside),
        "cut": refused(islands.sharded(net()), ob.nonblocking(2)),
        "nodes": refused(islands.sharded(net()), ob.self_clocked(per_node=2)),
        "some are sharded": refused(islands.sharded(net()) if rank < 2 else net()),
        "of two sizes": refused(fully_shard(net(), mesh=three if three is not None else _alone(rank))),
    }
    model = islands.sharded(net())
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.local_sgd(2), patience_s=60)
    whole = {"offbeat": {"shard-7": b""}}
    out["another shard"] = attempt(lambda: optimizer.load_state_dict(whole))
    model.load_state_dict(model.state_dict(), assign=True)
    out["other memory"] = ""
    optimizer.finish()
    return out


def _alone(rank: int) -> DeviceMesh:
    return DeviceMesh("cpu", [rank])
