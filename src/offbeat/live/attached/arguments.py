"""What ``attach`` was told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from offbeat.live.attached.finite import Nonfinite
from offbeat.live.attached.recorder import NoRecorder
from offbeat.live.attached.stats import Log

OnError = Literal["stop", "leave"]


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``attach`` that are not the run itself; see there."""

    max_norm: float | None = None
    accumulate: int = 1
    steps: int | None = None
    seed: int = 0
    patience_s: float = 1800.0
    log: Log | None = None
    recorder: NoRecorder = field(default_factory=NoRecorder)
    mesh: DeviceMesh | None = None
    min_workers: int = 0
    on_error: OnError = "stop"
    frozen_s: float | None = None
    nonfinite: Nonfinite = "skip"
    checkpoint: Path | None = None
    every_s: float = 600.0
    resume: str | Path | None = None

    @property
    def must_be_equal(self) -> dict[str, object]:
        """Those that all ranks must have alike."""
        names = ("accumulate", "seed", "steps", "min_workers", "on_error", "frozen_s")
        return {name: getattr(self, name) for name in names}

    @property
    def unknown_to_a_task(self) -> dict[str, object]:
        """Those that change what is learned and that a Task does not tell: such a run cannot be replayed."""
        usual = {"max_norm": None, "accumulate": 1}
        return {name: value for name, usually in usual.items() if (value := getattr(self, name)) != usually}
