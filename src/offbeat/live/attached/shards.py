"""Parameters that ``fully_shard`` has spread over the ranks of an island, as one rank holds them.

``torch.distributed.tensor`` takes a second to import; who has a sharded model has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is spread over several ranks, in whatever way."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(tensor, known.DTensor)


def local(tensor: Any) -> Any:
    """What of a tensor lies on this rank, in its own memory; of anything else, itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


class LocalShard:
    """A sharded parameter, of which everything is said that is so of what lies here: its gradient, too."""

    def __init__(self, whole: nn.Parameter) -> None:
        assert is_sharded(whole)
        self.whole: DTensor = whole

    @property
    def data(self) -> Tensor:
        return local(self.whole).detach()  # type: ignore[no-any-return]

    @property
    def grad(self) -> Tensor | None:
        return local(self.whole.grad)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if grad is not None:
            p = self.whole
            grad = type(p).from_local(
                grad, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        self.whole.grad = grad


def mesh_of(named: Mapping[str, nn.Parameter], mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The island of a model's parameters; None where it is not sharded. What cannot work is refused."""
    sharded = {name: p for name, p in named.items() if is_sharded(p)}
    if not sharded:
        if mesh is None:
            return None
        raise ValueError(
            f"mesh is {_said(mesh)}, but no parameter of the model is sharded; call fully_shard(model, mesh=mesh) first"
        )
    first, p = next(iter(sharded.items()))
    if mesh is not None and mesh != p.device_mesh:
        raise ValueError(
            f"mesh is {_said(mesh)}, but {first} is sharded over {_said(p.device_mesh)}; give attach the mesh that "
            "fully_shard was given, or none"
        )
    mesh = p.device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"{first} is sharded over {_said(mesh)}, of {mesh.ndim} dimensions; an island has one: call "
            "fully_shard(layer, mesh=mesh[name]) with the dimension that is an island, and leave what lies between "
            "islands to Offbeat"
        )
    for name, one in named.items():
        _check(name, one, mesh, first)
    for rank, shard in zip(ranks_of(mesh), range(mesh.size()), strict=True):
        if not any(_rows(p, shard) for p in sharded.values() if p.requires_grad):
            raise ValueError(
                f"rank {rank} holds nothing of the model: no parameter has rows for {mesh.size()} ranks; shard it over "
                "fewer"
            )
    return mesh


def _rows(p: DTensor, shard: int) -> int:
    """How many of them a shard has, as torch deals them out: all alike, the last ones fewer or none."""
    placement: Any = p.placements[0]
    rows, size = p.shape[placement.dim] if p.numel() else 0, p.device_mesh.size()
    most = -(-rows // size)
    return max(0, min(most, rows - shard * most))


def _check(name: str, p: nn.Parameter, mesh: DeviceMesh, first: str) -> None:
    if not is_sharded(p):
        if p.requires_grad:
            raise ValueError(
                f"parameter {name} is held whole by every rank, while {first} is sharded: nobody averages its "
                "gradient inside the island; shard it as well, or freeze it"
            )
        return
    if p.device_mesh != mesh:
        raise ValueError(
            f"parameter {name} is sharded over {_said(p.device_mesh)}, but {first} over {_said(mesh)}; shard the whole "
            "model over one mesh"
        )
    (placement,) = p.placements
    if not placement.is_shard():
        raise ValueError(
            f"parameter {name} is placed as {placement}, and only what is sharded belongs to one rank of an island; "
            "let fully_shard place it"
        )
    inner = local(p)
    if type(inner) is not Tensor and type(inner) is not nn.Parameter:
        raise ValueError(f"parameter {name} is held as {type(inner).__name__}; Offbeat averages plain tensors only")
    if inner.is_meta:
        raise ValueError(f"parameter {name} has no memory yet; call model.to_empty(device=…) and give it values first")
    if not inner.is_contiguous():
        raise ValueError(f"this rank's part of parameter {name} is not contiguous; shard it along its first dimension")


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def whole_bytes(params: Iterable[Any]) -> list[int]:
    """How large parameters are, with what lies elsewhere."""
    return [p.whole.numel() * p.whole.element_size() for p in params if isinstance(p, LocalShard)]


def _said(mesh: DeviceMesh) -> str:
    return f"a mesh of ranks {mesh.mesh.tolist()}"
