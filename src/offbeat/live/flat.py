"""A user's model in flat memory: its parameters and buffers become views of a few long tensors.

Nothing is flattened per step. User code may break a view (by assigning ``p.data``): that is noticed when a step begins,
and the new values are taken over.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offbeat.layout import Layout
from offbeat.vector import Vec


class Flat:
    """The flat memory of one model, together with parameters that only the optimiser knows."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        named = dict(model.named_parameters())
        known = {id(p) for p in named.values()}
        for g, group in enumerate(optimizer.param_groups):
            for k, p in enumerate(group["params"]):
                if id(p) not in known:
                    named[f"optimizer.group{g}.{k}"] = p
                    known.add(id(p))
        self.names = [n for n, p in named.items() if p.requires_grad]
        self.params = [p for p in named.values() if p.requires_grad]
        self.frozen = [p for p in named.values() if not p.requires_grad]
        self._buffers = [(n, b) for n, b in model.named_buffers() if b is not None]
        self.floating = [b for _, b in self._buffers if b.is_floating_point()]
        self.counting = [b for _, b in self._buffers if not b.is_floating_point()]
        if not self.params:
            raise ValueError("the model has no trainable parameters; attach an optimizer to a model that can learn")
        self._check_kinds(named)
        self.layout = Layout.of(zip(self.names, self.params, strict=True), keep_strides=True)
        self.parts = self.layout.empty()
        self.views = self.layout.views(self.parts)
        self.x = Vec(self.parts)
        self._buffer_layout = Layout.of(((n, b) for n, b in self._buffers if b.is_floating_point()), keep_strides=True)
        self._buffer_parts = self._buffer_layout.empty()
        self._buffer_views = self._buffer_layout.views(self._buffer_parts)
        self.buffers = Vec(self._buffer_parts)
        self.adopt()

    @staticmethod
    def _check_kinds(named: dict[str, nn.Parameter]) -> None:
        for name, p in named.items():
            if p.requires_grad and not p.is_floating_point():
                raise ValueError(f"parameter {name} is {p.dtype}; only real floating point parameters can be averaged")
            if p.is_sparse or p.layout != torch.strided:
                raise ValueError(f"parameter {name} is {p.layout}; make it a dense tensor")

    def adopt(self) -> None:
        """Make every parameter and floating buffer a view again, keeping its values."""
        with torch.no_grad():
            _adopt(self.params, self.views)
            _adopt(self.floating, self._buffer_views)

    def facts(self) -> str:
        """Names, shapes and dtypes of everything that must be the same on all ranks, one a line."""
        rows = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in zip(self.names, self.params, strict=True)]
        return "\n".join(rows + [f"{n} {tuple(b.shape)} {b.dtype} (buffer)" for n, b in self._buffers])


def _adopt(tensors: list[Tensor] | list[nn.Parameter], views: list[Tensor]) -> None:
    for tensor, view in zip(tensors, views, strict=True):
        if tensor.data_ptr() == view.data_ptr() and tensor.dtype == view.dtype:
            continue
        if tensor.dtype != view.dtype or tensor.device != view.device or tensor.shape != view.shape:
            raise RuntimeError(
                f"a parameter of shape {tuple(view.shape)} was {view.dtype} on {view.device} when it was attached and is now "
                f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; convert the model before attach"
            )
        view.copy_(tensor.detach())
        tensor.data = view
