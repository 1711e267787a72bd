"""What ``attach`` was told."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.live.attached.recorder import Recorder
from offbeat.live.attached.stats import Log


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``attach`` that are not the run itself; see there."""

    max_norm: float | None = None
    accumulate: int = 1
    steps: int | None = None
    seed: int = 0
    patience_s: float = 1800.0
    log: Log | None = None
    recorder: Recorder | None = None

    @property
    def must_be_equal(self) -> dict[str, object]:
        """Those that all ranks must have alike."""
        return {"accumulate": self.accumulate, "seed": self.seed, "steps": self.steps}
