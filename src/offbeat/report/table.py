"""A run in plain numbers, and the table that several of them make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offbeat.basics.units import format_bytes
from offbeat.runs.absences import Absence
from offbeat.runs.foreign import ForeignWait
from offbeat.runs.talking import Talking

__all__ = ["Record", "cells", "header", "runs_table"]

LEFT_OUT = ("label", "carriers", "foreign", "talking", "absences")  # in JSON, where there is none


@dataclass(frozen=True)
class Record:
    """One run, simulated or live: what ``--json`` writes, and what a row of the table shows.

    ``loss`` and ``accuracy`` are those of the final model on held-out data, None where the task does not tell;
    ``label`` is the method with the settings that differ from its defaults.
    """

    method: str
    label: str
    mode: str
    task: str | None
    workers: int
    steps: int
    seconds: float
    wait_fraction: float
    wire_bytes: int
    loss: float | None
    accuracy: float | None
    train_loss: float | None
    seed: int
    delay: str
    settings: Mapping[str, object] = field(default_factory=dict)
    carriers: tuple[str, ...] = ()  # the ways the vectors of a live run went
    foreign: tuple[ForeignWait, ...] = ()  # waiting in collectives of others, over all workers
    talking: tuple[Talking, ...] = ()  # of each worker, where it decides by itself when to talk
    absences: tuple[Absence, ...] = ()  # of workers that died

    def json(self) -> dict[str, object]:
        """As JSON takes it: a loss that is not a number any more becomes null, and ``diverged`` says why."""
        plain = {name: value for name, value in vars(self).items() if name not in LEFT_OUT}
        numbers = ("seconds", "wait_fraction", "loss", "accuracy", "train_loss")
        return {
            **plain,
            **{name: _finite(plain[name]) for name in numbers},
            "settings": dict(self.settings),
            **({"carriers": list(self.carriers)} if self.carriers else {}),
            **({"foreign": [asdict(one) for one in self.foreign]} if self.foreign else {}),
            **({"talking": [asdict(one) for one in self.talking]} if self.talking else {}),
            **({"absences": [one._asdict() for one in self.absences]} if self.absences else {}),
            "diverged": any(plain[n] is not None and _finite(plain[n]) is None for n in ("loss", "train_loss")),
        }


def header(records: Sequence[Record]) -> list[str]:
    """The names of the columns; a speed-up only where there is something to compare."""
    several = ["speed-up"] if len(records) > 1 else []
    return ["method", "time", *several, "waiting", "bytes sent", "loss", "accuracy"]


def cells(records: Sequence[Record]) -> list[list[str]]:
    """A row of texts for each run. Times are compared with the first run's."""
    times = _times([record.seconds for record in records])
    return [
        [
            record.label,
            time,
            *([_speed_up(records[0].seconds, record.seconds)] if len(records) > 1 else []),
            f"{record.wait_fraction:.1%}",
            format_bytes(record.wire_bytes),
            _number(record.loss, "{:#.4g}").rstrip("."),
            _number(record.accuracy, "{:.1%}"),
        ]
        for record, time in zip(records, times, strict=True)
    ]


def runs_table(records: Sequence[Record], heading: str = "") -> RenderableType:
    """A table of runs under lines that say what they have in common."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    first, *others = header(records)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    for row in cells(records):
        table.add_row(*map(Text, row))
    return Group(Text(heading, style="dim"), table) if heading else table


def _times(seconds: Sequence[float]) -> list[str]:
    """All in the unit that suits the longest: 84.1 s beside 1.3 min would have to be converted to be compared."""
    longest = max(seconds, default=0.0)
    units = (("h", 3600.0, 7200.0), ("min", 60.0, 600.0), ("s", 1.0, 1.0), ("ms", 1e-3, 1e-3), ("µs", 1e-6, 0.0))
    name, unit = next((name, unit) for name, unit, least in units if longest >= least)
    return [f"{value / unit:.3g} {name}" for value in seconds]


def _speed_up(first_s: float, seconds: float) -> str:
    return f"{first_s / seconds:.2f}×" if seconds > 0 else "–"


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return form.format(value) if math.isfinite(value) else "diverged"


def _finite(value: object) -> object:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
