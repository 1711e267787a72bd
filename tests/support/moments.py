"""Moments of a worker at a channel, or at shared weights, at which something can happen to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offbeat.live.host.protocol import AddStep, Ref, Submit
from offbeat.live.worker.line import Line
from offbeat.live.worker.slots import OnHost
from offbeat.tensors.vector import Vec, Way

# It writes into a slot, in which there is anything so far; what it has written is not submitted yet; it has just
# submitted it, and has not heard of it; it was given a result, and has not read it yet.
MOMENTS = ("writing", "before submitting", "submitted", "reading")


@contextmanager
def at(moment: str, happens: Callable[[], None]) -> Iterator[None]:
    """While this lasts, ``happens`` is called whenever this worker comes to that moment."""
    assert moment in MOMENTS
    write, read, send = OnHost.write, OnHost.read, Line.send

    def writing(self: OnHost, x: Vec, slot: int) -> None:
        if moment == "writing":
            for part in () if isinstance(x, Way) else self.memory.vec(slot).parts:  # where a way begins in its slot
                part[: part.numel() // 2].fill_(torch.nan)
            happens()
        write(self, x, slot)

    def reading(self: OnHost, refs: Sequence[Ref], plus: int | None = None) -> Vec:
        found = read(self, refs, plus)
        if moment == "reading":
            happens()
        return found

    def sending(self: Line, message: Any) -> None:
        of_a_step = isinstance(message, Submit | AddStep)
        if of_a_step and moment == "before submitting":
            happens()
        send(self, message)
        if of_a_step and moment == "submitted":
            happens()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnHost, "write", writing)
        patch.setattr(OnHost, "read", reading)
        patch.setattr(Line, "send", sending)
        yield
