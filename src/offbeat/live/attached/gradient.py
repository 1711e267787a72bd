"""A model's gradients as one vector.

A gradient that *lies in place* is what ``p.grad`` holds already: the inner optimiser, which reads it there, needs no
copy. Whatever a strategy makes of it (a sum, a product) is an ordinary vector again, perhaps one that others read, too.
An optimiser that only reads is shown it where it lies; for another it is copied to memory of ``p.grad``'s own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from offbeat.live.attached.flat import Flat
from offbeat.live.attached.refusals import OnlyAttachedSteps
from offbeat.live.transport.errors import OffbeatError
from offbeat.tensors.vector import Vec, no_grad


class InPlace(Vec):
    """A gradient that lies in ``p.grad``."""

    __slots__ = ()


class OwnGradient(InPlace):
    """``p.grad`` of all parameters, gathered only if somebody reads it.

    Most strategies hand it straight back to the inner optimiser: then nothing is copied. Parameters without a gradient
    read as zeros.
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

    def clone(self) -> Vec:
        return self.put_into(Vec(self._flat.layout.empty()))

    def put_into(self, target: Vec, scale: float = 1.0) -> Vec:
        if self._gathered is not None:
            return super().put_into(target, scale)
        views, grads = self._cut(target), self._dense()
        with no_grad():
            if scale == 1.0 and grads is not None:
                torch._foreach_copy_(views, grads)  # many small calls take longer than copying
            else:
                for view, p in zip(views, self._flat.params, strict=True):
                    if p.grad is None:
                        view.zero_()
                    elif scale == 1.0:
                        view.copy_(p.grad)
                    else:
                        torch.mul(p.grad, scale, out=view)
        target.used = self.used
        return target

    def pairs_with(self, target: Vec) -> list[tuple[Tensor, Tensor]] | None:
        if self._gathered is not None:
            return super().pairs_with(target)
        grads = self._dense()
        return None if grads is None else list(zip(self._cut(target), grads, strict=True))

    def _dense(self) -> list[Tensor] | None:
        """All of them, if every parameter has one, and none is sparse."""
        dense = [p.grad for p in self._flat.params if p.grad is not None and p.grad.layout == torch.strided]
        return dense if len(dense) == len(self._flat.params) else None

    def _cut(self, target: Vec) -> list[Tensor]:
        if target.cut is None:
            target.cut = self._flat.layout.views(target.parts)
        return target.cut


class FlatGradient(InPlace):
    """Flat memory of which every ``p.grad`` is a view.

    ``whole`` has ``room`` numbers in front of the first part, for what is to travel with it.
    """

    __slots__ = ("_flat", "views", "whole")

    def __init__(self, flat: Flat, room: int = 0) -> None:
        self._flat, layout = flat, flat.layout
        self.whole = [
            torch.zeros(n + (room if k == 0 else 0), dtype=d, device=v)
            for k, (n, (d, v)) in enumerate(zip(layout.lengths, layout.kinds, strict=True))
        ]
        super().__init__([s[room:] if k == 0 else s for k, s in enumerate(self.whole)])
        self.views = layout.views(list(self.parts))

    def holds(self, slot: int) -> bool:
        """Whether the gradient of parameter ``slot`` lies here."""
        grad = self._flat.params[slot].grad
        return grad is not None and grad.layout == torch.strided and grad.data_ptr() == self.views[slot].data_ptr()

    def dense(self, slot: int) -> Tensor:
        """The gradient of parameter ``slot``, wherever it lies."""
        grad: Tensor | None = self._flat.params[slot].grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise OffbeatError(f"the gradient of {self._flat.names[slot]} is sparse; make its layer's gradients dense")
        return grad

    def collect(self, slot: int) -> None:
        """Parameter ``slot`` has its gradient: put it here if it is not here yet."""
        grad = self.dense(slot)
        if not self.holds(slot):
            self.views[slot].copy_(grad)
            self._flat.params[slot].grad = self.views[slot]

    def land(self, g: Vec) -> None:
        """``p.grad`` is ``g`` from now on."""
        self.copy_(g)
        self.present(g.used or [1.0] * len(self._flat.params))

    def present(self, counts: Sequence[float]) -> None:
        """``p.grad`` is what lies here where any worker had a gradient, and None where nobody had."""
        self.used = tuple(count > 0 for count in counts)
        for p, view, count in zip(self._flat.params, self.views, counts, strict=True):
            if count == 0:
                p.grad = None
            elif p.grad is not view:
                p.grad = view


READERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def only_reads_gradients(inner: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimiser leaves ``p.grad`` as it is: nothing that we do not know has a hand in it.

    Nesterov's momentum is added to the gradients themselves, and a scale is taken out of them where they lie.
    """
    every = [*inner._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values()]
    hooks = [hook for hook in every if not isinstance(hook, OnlyAttachedSteps)]  # a user's, which may clip
    if type(inner) not in READERS or hooks or getattr(inner, "grad_scale", None) is not None:
        return False
    return not any(group.get("nesterov") or group.get("differentiable") for group in inner.param_groups)


def views_for(flat: Flat, g: Vec) -> list[Tensor | None] | None:
    """``g`` as gradients of the parameters, where it lies; None: it lies otherwise than they do."""
    parts, layout = g.parts, flat.layout
    if flat.island is not None or [(p.dtype, p.device) for p in parts] != list(layout.kinds):
        return None
    if g.cut is None:
        g.cut = layout.views(parts)
    return [view if used else None for view, used in zip(g.cut, g.used or [True] * len(g.cut), strict=True)]


def land(flat: Flat, g: Vec) -> bool:
    """``p.grad`` is ``g`` from now on, in the memory that backward has made for it: no other is needed.

    False: somebody has no gradient of its own, or one whose memory holds more than that; nothing has been done.
    """
    own = [p.grad for p in flat.params]
    for p, grad in zip(flat.params, own, strict=True):
        if grad is None or grad.layout != torch.strided or grad.dtype != p.data.dtype or _shares_memory(grad):
            return False
    if not (g.used is None or all(g.used)) or len({grad.data_ptr() for grad in own}) < len(own):
        return False
    if g.cut is None:
        g.cut = flat.layout.views(g.parts)
    with torch.no_grad():
        torch._foreach_copy_(own, g.cut)
    return True


def _shares_memory(grad: Tensor) -> bool:
    """Whether something else may lie in its memory, or two of its own numbers in one place."""
    return grad.untyped_storage().nbytes() != grad.numel() * grad.element_size()
