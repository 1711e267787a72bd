"""Gradients that are not finite: they are left out, and named.

One look at the gradients a step is about to use. What is not finite counts as zero in that step: nobody else gets it,
and the optimiser's memory of earlier steps, which would keep it for ever, does not either. On a GPU nobody waits for
what the look finds: the gradients are made zero there, and a later step tells of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from offbeat.basics.warn import warn
from offbeat.live.attached.flat import Flat
from offbeat.live.transport.errors import OffbeatError

Nonfinite = Literal["skip", "stop"]
SHOWN = 5  # warnings; of further steps the summary tells
FEW = 3  # names


class Glance(NamedTuple):
    """A look that nobody has read yet. ``there``: an event of the GPU that comes after it."""

    step: int
    what: str
    names: list[str]
    are_finite: Tensor
    there: Any


class Finite:
    """One worker's. ``how``: ``"skip"`` warns, ``"stop"`` ends the run. ``left_out`` is called once for each step."""

    def __init__(self, flat: Flat, rank: int, how: Nonfinite, left_out: Callable[[], None]) -> None:
        self._flat, self._rank, self._how, self._left_out = flat, rank, how, left_out
        self._unread: deque[Glance] = deque()
        self.steps: list[int] = []  # whose gradients were left out

    def look(self, step: int, what: str) -> None:
        """At ``p.grad`` of all parameters: ``what`` it is, in words."""
        self.tell(wait=False)
        named = [(name, p.grad) for name, p in zip(self._flat.names, self._flat.params, strict=True)]
        named = [(name, _numbers(grad)) for name, grad in named if grad is not None and grad.numel()]
        for device in dict.fromkeys(grad.device for _, grad in named):
            names = [name for name, grad in named if grad.device == device]
            grads = [grad for _, grad in named if grad.device == device]
            largest = torch._foreach_norm(grads, float("inf"))
            are_finite = torch.stack([one.double() for one in largest]).isfinite()
            if device.type == "cpu":
                if not are_finite.all():
                    for grad in grads:
                        grad.zero_()
                    self._unread.append(Glance(step, what, names, are_finite, None))
            else:
                any_is_not = ~are_finite.all()
                for grad in grads:
                    grad.masked_fill_(any_is_not, 0)
                there = torch.cuda.Event()
                self._unread.append(Glance(step, what, names, are_finite.to("cpu", non_blocking=True), there))
                there.record(torch.cuda.current_stream(device))
        self.tell(wait=False)

    def tell(self, wait: bool) -> None:
        """Of what has been found since; ``wait`` until all of it is known."""
        while self._unread and (self._unread[0].there is None or wait or self._unread[0].there.query()):
            found = self._unread.popleft()
            if found.there is not None:
                found.there.synchronize()
            if not found.are_finite.all():
                self._tell(found)

    def _tell(self, found: Glance) -> None:
        bad = [name for name, fine in zip(found.names, found.are_finite.tolist(), strict=True) if not fine]
        where = ", ".join(bad[:FEW]) + (f" and {len(bad) - FEW} more parameters" if len(bad) > FEW else "")
        said = f"rank {self._rank}: {found.what} of step {found.step} is not finite in {where}"
        if self.steps[-1:] != [found.step]:
            self.steps.append(found.step)
            self._left_out()
        if self._how == "stop":
            raise OffbeatError(f'{said}; nonfinite="stop" ends the run for that, "skip" leaves such gradients out')
        if len(self.steps) <= SHOWN:
            last = "; of further ones summary() tells" if len(self.steps) == SHOWN else ""
            warn(f"{said}, and counts as zero{last}")

    @property
    def in_words(self) -> list[str]:
        """For the summary."""
        if not self.steps:
            return []
        shown = ", ".join(map(str, self.steps[:FEW])) + (f" … ({len(self.steps)} in all)" * (len(self.steps) > FEW))
        return [f"Rank {self._rank}: gradients that were not finite counted as zero: of step {shown}."]


def _numbers(grad: Tensor) -> Tensor:
    return grad if grad.layout == torch.strided else grad._values()
