"""Sharded models that cannot be attached are refused, on all ranks, in a sentence that names a way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import offbeat as ob
from offbeat.live.carriers.island import checked
from tests.support import islands
from tests.support.forge import attempt
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def refused(model: nn.Module, strategy: ob.Strategy | None = None, **how: Any) -> str:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def attach() -> None:
        ob.attach(inner, model, strategy or ob.local_sgd(2), patience_s=60, **how).finish()

    return attempt(attach)


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
    three, alone = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [3])  # all ranks make all of them
    one, apart = net(), net()
    fully_shard(one[0], mesh=inside)
    fully_shard(apart[0], mesh=inside)
    fully_shard(apart[1], mesh=grid["between"])
    return {
        "one island": refused(islands.sharded(net(), world)),
        "two dimensions": refused(islands.sharded(net(), grid)),
        "held whole": refused(one),
        "two meshes": refused(apart),
        "replicated": refused(placed(Replicate(), inside)),
        "partial": refused(placed(Partial(), inside)),
        "another mesh": refused(islands.sharded(net()), mesh=world),
        "not sharded": refused(net(), mesh=inside),
        "cut batches": refused(islands.sharded(net()), ob.nonblocking(2)),
        "nodes": stepped_in_nodes(),
        "on some": refused(islands.sharded(net()) if rank < 2 else net()),
        "two sizes": refused(islands.sharded(net(), three if rank < 3 else alone)),
        "nothing to hold": refused(islands.sharded(nn.Linear(4, 1))),
        "another shard": loaded({"shard-7": b""}),
        "other memory": stepped_after_assigning(),
        "nothing": refused(islands.sharded(net()), mesh=inside),
    }


def loaded(state: dict[str, bytes]) -> str:
    model = islands.sharded(net())
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.local_sgd(2), patience_s=60) as optimizer:
        return attempt(lambda: optimizer.load_state_dict({"offbeat": state}))


def stepped_in_nodes() -> str:
    """The first step of a method that is told to make nodes of ranks."""
    model = islands.sharded(net())
    strategy = ob.self_clocked(per_node=2)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy, patience_s=60)
    said = attempt(optimizer.step)
    dist.barrier()  # nobody leaves before all have come to it
    optimizer._run.abandon(said)
    return said


def stepped_after_assigning() -> str:
    """A step after the shards were given other memory."""
    model = islands.sharded(net())
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.local_sgd(2), patience_s=60)
    with torch.no_grad():
        for p in model.parameters():
            assert isinstance(p, DTensor)
            p._local_tensor = p._local_tensor.clone()
    said = attempt(optimizer.step)
    dist.barrier()  # nobody leaves before all have come to it
    optimizer._run.abandon(said)
    return said


WORDS = {
    "one island": ("sharded over all 4 ranks", "one island with nobody to average with", "meshes of 1 or 2 ranks"),
    "two dimensions": ("a mesh of ranks [[0, 1], [2, 3]]", "of 2 dimensions", "mesh=mesh[name]"),
    "held whole": ("parameter 1.weight is held whole", "0.weight is sharded", "shard it as well, or freeze it"),
    "two meshes": ("parameter 1.weight is sharded over a mesh of ranks", "shard the whole model over one mesh"),
    "replicated": ("parameter 1.weight is placed as R", "let fully_shard place it"),
    "partial": ("parameter 1.weight is placed as P", "let fully_shard place it"),
    "another mesh": ("mesh is a mesh of ranks [0, 1, 2, 3]", "0.weight is sharded over", "or none"),
    "not sharded": ("no parameter of the model is sharded", "call fully_shard(model, mesh=mesh) first"),
    "cut batches": ("nonblocking(", "all backward passes together", "ob.self_clocked()"),
    "nodes": ("per_node is 2", "its island is one worker already", "leave per_node out"),
    "on some": ("the models differ", "sharded", "build the same model on every rank"),
    "two sizes": ("the islands [0, 1, 2], [3] have 3, 1 ranks", "make them of one size"),
    "nothing to hold": ("holds nothing of the model", "no parameter has rows for 2 ranks", "shard it over fewer"),
    "another shard": ("of its island, and the state holds shard-7", "islands of the same size"),
    "other memory": ("the shard of parameter 0.weight has got other memory", "assign=False"),
}


@pytest.mark.parametrize("case", WORDS)
def test_what_cannot_be_sharded_so_is_refused_in_a_sentence_on_all_ranks(told: Told, case: str) -> None:
    for one in told(refusals):
        assert all(words in one[case] for words in WORDS[case]), one[case]


def test_what_can_be_is_not(told: Told) -> None:
    assert {one["nothing"] for one in told(refusals)} == {""}


def test_islands_that_do_not_make_up_the_world_are_refused() -> None:
    assert checked([(0, 2), (1, 3), (0, 2), (1, 3)]) == ((0, 2), (1, 3))
    with pytest.raises(ValueError, match=r"rank 0 is in an island of ranks \[0, 1\], but rank 1 is in one of ranks"):
        checked([(0, 1), (1, 2), (1, 2)])
    with pytest.raises(ValueError, match=r"rank 1 is in an island of ranks .* but rank 5 is not there"):
        checked([(0,), (1, 5)])
    with pytest.raises(ValueError, match=r"rank 0 is not in the mesh of ranks \[1, 2\]"):
        checked([(1, 2), (1, 2), (1, 2)])
