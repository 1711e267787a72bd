"""This worker's own gradient, gathered only if somebody reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.live.attached.flat import Flat
from offbeat.tensors.vector import Vec


class OwnGradient(Vec):
    """``p.grad`` of all parameters as one vector.

    Most strategies hand it straight back to the inner optimiser, which reads ``p.grad`` itself: then nothing is copied.
    Parameters without a gradient read as zeros.
    """

    __slots__ = ("_flat", "_gathered")

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._gathered: tuple[Tensor, ...] | None = None
        self._phantom_bytes = 0
        self.used = tuple(p.grad is not None for p in flat.params)

    @property
    def parts(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        if self._gathered is None:
            gathered = self._flat.layout.empty()
            with torch.no_grad():
                for view, p in zip(self._flat.layout.views(gathered), self._flat.params, strict=True):
                    if p.grad is not None:
                        view.copy_(p.grad)
            self._gathered = tuple(gathered)
        return self._gathered

    def put_into(self, target: Vec, scale: float = 1.0) -> Vec:
        if self._gathered is not None:
            return super().put_into(target, scale)
        with torch.no_grad():
            for view, p in zip(self._flat.layout.views(target.parts), self._flat.params, strict=True):
                if p.grad is None:
                    view.zero_()
                elif scale == 1.0:
                    view.copy_(p.grad)
                else:
                    torch.mul(p.grad, scale, out=view)
        target.used = self.used
        return target
