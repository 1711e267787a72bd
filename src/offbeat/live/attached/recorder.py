"""Writing down what decides a run, on one rank, so that it can be replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from offbeat.method.strategy import Strategy
from offbeat.runs import order
from offbeat.runs.order import About, Event, Part, Told


class NoRecorder:
    """Of a run that nobody records: all that a `Recorder` hears, and nothing of it kept."""

    events: list[Event] | None = None  # where seats and shared weights write down what happens to them

    def events_beside(self, channel: str) -> list[Event] | None:
        """The same for a channel beside the run's."""
        return None

    def begin(
        self,
        strategy: Strategy,
        size: int,
        weights: Iterable[Tensor],
        seed: int,
        steps: int | None,
        unknown: Mapping[str, object],
        homes: tuple[int, ...],
    ) -> None:
        """The run begins with these weights; ``unknown`` to a Task is how else it was attached. ``homes``: the numbers
        of all workers' hosts."""

    def follow(self) -> None:
        """Another rank of this one's island keeps the record."""

    def stepped(self) -> None:
        """A step with data is over."""

    def part(self, part: Part) -> None:
        """This worker's part of a round is over, where batches are cut."""

    def spent(self, seconds: float) -> None:
        """The worker is told that its own steps took so long."""

    def averages(self, step: int, is_in_step: bool, per_node: int) -> None:
        """The worker calls for an average before this step."""

    def cannot(self, why: str) -> None:
        """Something happens that a replay does not know how to do."""

    def end(self, rank: int, weights: Iterable[Tensor]) -> None:
        """The run has ended with these weights."""


class Recorder(NoRecorder):
    """Keeps one worker's list; ``folder`` is where it is written when the run has ended well (None: nowhere)."""

    def __init__(self, folder: str | Path | None = None, task: str = "") -> None:
        self._folder, self._task = None if folder is None else Path(folder), task
        self.told = Told()
        self.events = self.told.events
        self.about: About | None = None
        self.final: tuple[float, ...] = ()

    def events_beside(self, channel: str) -> list[Event] | None:
        return self.told.events_of(channel, beside=True)

    def begin(
        self,
        strategy: Strategy,
        size: int,
        weights: Iterable[Tensor],
        seed: int,
        steps: int | None,
        unknown: Mapping[str, object],
        homes: tuple[int, ...],
    ) -> None:
        said = [f"{name}={value}" for name, value in unknown.items()]
        cannot = f"it was attached with {' and '.join(said)}, which a Task does not know" if said else ""
        begun = order.digest(weights)
        on = (len(set(homes)), homes)
        self.about = About(str(strategy), strategy.written(), size, seed, steps, begun, self._task, cannot, *on)

    def follow(self) -> None:
        self._folder = None

    def stepped(self) -> None:
        self.told.gradients += 1

    def part(self, part: Part) -> None:
        self.told.parts.append(part)

    def spent(self, seconds: float) -> None:
        self.told.spent.append(seconds)

    def averages(self, step: int, is_in_step: bool, per_node: int) -> None:
        self.told.averages.append(step)
        if is_in_step:
            self.cannot("average() was called between backward() and step()")
        if per_node > 1:
            self.cannot("average() was called in a run with per_node")

    def cannot(self, why: str) -> None:
        if self.about is not None and not self.about.cannot:
            self.about = replace(self.about, cannot=why)

    def end(self, rank: int, weights: Iterable[Tensor]) -> None:
        self.final = order.sampled(torch.cat([p.detach().reshape(-1).double().cpu() for p in weights]))
        if self._folder is not None and self.about is not None:
            order.write_one(self._folder, rank, self.about, self.told, self.final)
