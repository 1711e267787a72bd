"""A user's model in flat memory: its parameters and buffers become views of a few long tensors.

Nothing is flattened per step. User code may break a view (by assigning ``p.data``, or a new tensor to a buffer): that
is noticed when a step begins, and the new values are taken over. To torch each view is a tensor with a storage of its
own: whoever saves it, or looks for tied weights, need not know of the flat memory.

What ``fully_shard`` has spread over several ranks stays where it is: FSDP gathers it from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.dlpack import from_dlpack

from offbeat.live.attached.shards import LocalShard, is_sharded, local, mesh_of, ranks_of
from offbeat.live.transport.errors import OffbeatError
from offbeat.tensors.layout import Layout
from offbeat.tensors.vector import Vec


class Flat:
    """The flat memory of one model, together with parameters that only the optimiser knows."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None = None) -> None:
        named = dict(model.named_parameters())
        known = {id(p) for p in named.values()}
        for g, group in enumerate(optimizer.param_groups):
            for k, p in enumerate(group["params"]):
                if id(p) not in known:
                    named[f"optimizer.group{g}.{k}"] = p
                    known.add(id(p))
        self.names = [n for n, p in named.items() if p.requires_grad]
        self.tensors = [p for p in named.values() if p.requires_grad]
        self._frozen = {n: p for n, p in named.items() if not p.requires_grad}
        self._homes = _buffer_homes(model)
        if not self.tensors:
            raise ValueError("the model has no trainable parameters; attach an optimizer to a model that can learn")
        self._check_kinds(named)
        mesh = mesh_of(named, mesh)
        self.island = None if mesh is None else ranks_of(mesh)  # the ranks that hold the model together
        self.params: list[Any] = self.tensors if mesh is None else [LocalShard(p) for p in self.tensors]
        if self.island is None:
            self.layout = Layout.of(zip(self.names, self.tensors, strict=True), keep_strides=True)
            self.parts = self.layout.empty()
        else:
            self.layout = Layout.apart((name, p.data) for name, p in zip(self.names, self.params, strict=True))
            self.parts = [p.data.view(-1) for p in self.params]
        self.views = _views(self.layout, self.parts)
        self.places = [(view.data_ptr(), view.shape, view.stride(), view.dtype) for view in self.views]
        self.x = Vec(self.parts)
        floating = [(n, b) for n, b in self._buffers.items() if b.is_floating_point()]
        self._floating = [n for n, _ in floating]
        layout = Layout.of(floating, keep_strides=True)
        parts = layout.empty()
        self._buffer_views = _views(layout, parts)
        self.buffers = Vec(parts)
        self.adopt()

    @property
    def _buffers(self) -> dict[str, Tensor]:
        """The buffers of now: modules may put new tensors in their place."""
        held = {name: module._buffers[key] for name, (module, key) in self._homes.items()}
        return {name: buffer for name, buffer in held.items() if buffer is not None}

    @property
    def frozen(self) -> list[Tensor]:
        """Parameters that do not learn."""
        return [local(p) for p in self._frozen.values()]

    @property
    def held_whole(self) -> list[Tensor]:
        """Those of them that are not sharded."""
        return [p for p in self._frozen.values() if not is_sharded(p)]

    @property
    def other_buffers(self) -> list[Tensor]:
        """Buffers that are not floating point."""
        return [b for b in self._buffers.values() if not b.is_floating_point()]

    @staticmethod
    def _check_kinds(named: dict[str, nn.Parameter]) -> None:
        for name, p in named.items():
            if p.requires_grad and not p.is_floating_point():
                raise ValueError(f"parameter {name} is {p.dtype}; only real floating point parameters can be averaged")
            if p.layout != torch.strided:
                raise ValueError(f"parameter {name} is {p.layout}; make it a dense tensor")

    def adopt(self) -> None:
        """Make every parameter and floating buffer a view again, keeping its values."""
        in_place = self.island is None and all(map(_is_at, self.params, self.places))
        if in_place and not self._floating:
            return
        with torch.no_grad():
            for name, p, view in zip(self.names, self.params, self.views, strict=True) if not in_place else ():
                if self.island is None:
                    _adopt(f"parameter {name}", p, view)
                elif p.data.data_ptr() != view.data_ptr():
                    raise OffbeatError(
                        f"the shard of parameter {name} has got other memory since it was attached; let "
                        "load_state_dict copy (assign=False), and convert the model before attach"
                    )
            if self._floating:
                buffers = self._buffers
                for name, view in zip(self._floating, self._buffer_views, strict=True):
                    if name in buffers:
                        _adopt(f"buffer {name}", buffers[name], view)

    def release(self) -> None:
        """Every tensor gets memory of its own again, with its values and strides, and ours is given back.

        A view keeps all of the flat memory: nothing could be freed. Where there is no room for the copies the views
        stay, which is no reason to lose a run that has ended.
        """
        with torch.no_grad(), suppress(torch.OutOfMemoryError):
            for p in self.params if self.island is None else ():
                p.data = p.data.clone()
            for name in self._floating:
                if (buffer := self._buffers.get(name)) is not None:
                    buffer.data = buffer.data.clone()
            self.parts, self.views, self._buffer_views = [], [], []
            self.x = self.buffers = Vec(())
            for p in self.params:
                if p.grad is not None and _is_part(p.grad):
                    p.grad = p.grad.clone()

    def whole(self) -> Iterator[Tensor]:
        """The parameters, one after the other. Of a sharded model all ranks of its island ask for them."""
        for p in self.tensors:
            yield p.full_tensor() if is_sharded(p) else p

    def facts(self) -> str:
        """Names, shapes and kinds of everything that must be the same on all ranks, one a line."""
        rows = [_fact(n, p) for n, p in zip(self.names, self.tensors, strict=True)]
        rows += [f"{_fact(n, p)} (frozen)" for n, p in self._frozen.items()]
        return "\n".join(rows + [f"{_fact(n, b)} (buffer)" for n, b in self._buffers.items()])


def _buffer_homes(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where each buffer lives, by name; one that several modules share is listed once."""
    homes, seen = {}, set[int]()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                homes[f"{prefix}.{key}" if prefix else key] = (module, key)
    return homes


def _views(layout: Layout, parts: list[Tensor]) -> list[Tensor]:
    """All tensors inside the flat parts, each with a storage that begins and ends with it.

    ``torch.save`` writes the whole storage of a tensor, and other libraries take tensors of one storage for tied
    weights. DLPack makes a tensor of memory that another one keeps.
    """
    plain = layout.views(parts)
    for k, slot in enumerate(layout.slots):
        part = parts[slot.part]
        if slot.numel and part.device.type in ("cpu", "cuda"):
            own = from_dlpack(part[slot.offset : slot.offset + slot.numel])
            plain[k] = own.as_strided(slot.shape, slot.stride)
    return plain


def _fact(name: str, tensor: Tensor) -> str:
    order = "" if tensor.is_contiguous() else f" strides {tensor.stride()}"
    shards = " sharded" if is_sharded(tensor) else ""
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}{order}{shards}"


def _is_part(tensor: Tensor) -> bool:
    """Whether its memory holds more than itself."""
    return tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _is_at(tensor: Tensor, place: tuple[int, torch.Size, tuple[int, ...], torch.dtype]) -> bool:
    """Whether it is still the view that it was made. (Asked of every parameter in every step.)"""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) == place


def _adopt(name: str, tensor: Tensor, view: Tensor) -> None:
    if tensor.dtype != view.dtype or tensor.device != view.device or tensor.shape != view.shape:
        raise OffbeatError(
            f"{name} was {tuple(view.shape)} {view.dtype} on {view.device} when it was attached and is now "
            f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; convert the model before attach"
        )
    if tensor.data_ptr() != view.data_ptr() or tensor.stride() != view.stride():
        # Through a copy: what the user assigned may be another view of the very same memory.
        view.copy_(tensor.detach().clone())
        tensor.data = view
