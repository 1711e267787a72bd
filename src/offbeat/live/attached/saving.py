"""Checkpoints that write themselves: what a worker lays down for them, and how a run is taken up from one.

A run that is taken up begins as any does, with the saved model in place of a fresh one, what the optimiser remembers,
and the step: so it may have another number of workers, or another method. What a method remembers begins anew.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from offbeat.basics.version import __version__
from offbeat.basics.warn import warn
from offbeat.live.attached.flat import Flat
from offbeat.live.host import checkpoint
from offbeat.live.host.checkpoint import ModelFile, Saved
from offbeat.live.memory.arena import round_up
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.work import share
from offbeat.live.worker.board import Board
from offbeat.live.worker.line import Line
from offbeat.live.worker.news import HostSaver
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy

EACH_BYTES = 1 << 12  # beside a tensor's numbers, at most
ALL_BYTES = 1 << 20  # beside all tensors


class Memory:
    """Memory that ``torch.save`` writes from its beginning on."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self.at = memory, 0

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        self._memory[self.at : self.at + len(data)] = data
        self.at += len(data)
        return len(data)

    def flush(self) -> None:
        """It is there."""


def put(held: Any, into: memoryview) -> int:
    """Let plain data with tensors lie there, as ``torch.save`` packs it; answers how long it is."""
    memory = Memory(into)
    torch.save(held, cast(Any, memory))
    return memory.at


def room_for(held: Any) -> int:
    """At most."""
    return ALL_BYTES + sum(tensor.untyped_storage().nbytes() + EACH_BYTES for tensor in _tensors(held))


def _tensors(held: Any) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    inner = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
    return [tensor for one in inner for tensor in _tensors(one)]


class Saving:
    """One worker's. ``wait`` waits for the host process's answer at a channel; alone, the worker writes by itself."""

    def __init__(
        self,
        folder: Path,
        every_s: float,
        flat: Flat,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        me: Replica,
        strategy: Strategy,
        board: Board,
        wait: Callable[[str, Line], Any],
    ) -> None:
        self._folder, self._every_s = folder, every_s
        self._flat, self._model, self._inner, self._me, self._strategy = flat, model, inner, me, strategy
        self._due_s = time.monotonic() + every_s
        self._layout: ModelFile | None = None
        self._run = board.name
        self._saver: HostSaver | None = None
        beside = [rank for rank in range(board.size) if not board.homes or board.homes[rank] == board.homes[0]]
        if board.line is not None and board.rank in beside:
            plan = {**board.plan(beside), "folder": str(folder), "every_s": every_s, "about": self._about}
            self._saver = HostSaver(board.name, board.line, beside.index(board.rank), plan, wait)

    @property
    def _about(self) -> dict[str, Any]:
        """What a manifest says of the run."""
        numbers = sum(p.numel() for p in self._flat.tensors)
        return {"method": str(self._strategy), "parameters": numbers, "offbeat": __version__}

    def between_steps(self) -> None:
        """Lay down what is asked for, if anything is."""
        if self._saver is not None and self._saver.due:
            self._lay_down(self._saver)
        elif self._me.size == 1 and time.monotonic() >= self._due_s:
            self._write_alone()

    def _named(self) -> dict[str, Tensor]:
        self._flat.adopt()
        state = self._model.state_dict()
        return {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}

    def _state(self) -> dict[str, Any]:
        return {"optimizer": self._inner.state_dict(), "step": self._me.t, "shares": share.states(self._run)}

    def _lay_down(self, saver: HostSaver) -> None:
        named, state = self._named(), self._state()
        layout = self._layout = self._layout or ModelFile(named)
        room = room_for(state)
        place = saver.place(layout.nbytes, room)
        if place is None:
            return
        (at, whole), arena, nbytes, why = place, saver.line.arena, 0, ""
        try:
            layout.lay(named, memoryview(cast(Any, arena.bytes_at(at, layout.nbytes))))
            if whole:
                beside = arena.bytes_at(at + round_up(layout.nbytes, 64), room)
                nbytes = put(state, memoryview(cast(Any, beside)))
        except Exception as error:  # a state that cannot be packed, say: training goes on
            why = f"{type(error).__name__}: {error}"
        saver.has_saved(nbytes, self._me.t, why)

    def _write_alone(self) -> None:
        named, state = self._named(), io.BytesIO()
        layout = ModelFile(named)
        model = memoryview(bytearray(layout.nbytes))
        layout.lay(named, model)
        torch.save(self._state(), state)
        try:
            about = {**self._about, "step": self._me.t, "workers": 1, "models": 1}
            checkpoint.write(self._folder, model, state.getbuffer(), about)
        except OSError as error:
            warn(f"no checkpoint was written to {self._folder}: {error}; the one before stays")
        self._due_s = time.monotonic() + self._every_s

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()


class Resumed:
    """The checkpoint that this run is taken up from, if it is."""

    def __init__(self, folder: str | Path | None) -> None:
        self.saved: Saved | None = None
        if folder is None:
            return
        try:
            self.saved, damaged = checkpoint.newest(Path(folder))
        except ValueError as error:
            raise OffbeatError(str(error)) from None
        for one in damaged:
            warn(f"{one.damage}; the run is taken up from the one before")

    @property
    def in_words(self) -> str:
        """All ranks must have the same."""
        return "none" if self.saved is None else self.saved.in_words

    def load_model(self, model: nn.Module) -> None:
        """Into rank 0's model as it is; the others get it from there."""
        if self.saved is None:
            return
        saved = self.saved.model()
        own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        said = [f"no {name}" for name in own if name not in saved] + [
            f"{n}, which the model has not" for n in saved if n not in own
        ]
        said += [
            f"{name} of {[*saved[name].shape]} numbers, and the model of {[*value.shape]}"
            for name, value in own.items()
            if name in saved and saved[name].shape != value.shape
        ]
        if said:
            raise OffbeatError(
                f"{self.saved.place} is of another model: it has {'; '.join(said[:3])}; build the model that was saved"
            )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(saved[name])

    def load_state(self, inner: torch.optim.Optimizer, me: Replica) -> None:
        """What the optimiser remembered, and the step."""
        if self.saved is None:
            return
        state = torch.load(self.saved.place / checkpoint.STATE, map_location="cpu", weights_only=True)
        try:
            inner.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise OffbeatError(
                f"the optimizer state in {self.saved.place} does not fit this {type(inner).__name__} ({error}); build "
                "the optimizer that was saved, or load the model alone: it is model.safetensors"
            ) from error
        me.t = int(state["step"])
        share.take_up(state["shares"])
