"""What the workers of a live job do at this moment: a screen where somebody watches, a few lines where nobody does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offbeat.live.job.steplog import Status
from offbeat.report.table import Record, runs_table
from offbeat.runs.trace import Doing

SHOWN: dict[Doing, tuple[str, str]] = {
    "compute": ("computing", "bright_blue"),
    "delay": ("late", "red"),
    "wait": ("waiting, communicating", "yellow"),
    "communicate": ("communicating", "cyan"),
}


class Watcher:
    """Told from another thread where the workers stand and which runs are done.

    Each of the two is put in its place whole, and read once for a screen: no lock is needed.
    """

    def __init__(self, labels: Sequence[str], workers: int, steps: int, console: Console) -> None:
        self._labels, self._workers, self._steps, self._console = labels, workers, steps, console
        self._records: list[Record] = []
        self._statuses: Sequence[Status] = ()
        self._said = -1

    def watch(self, statuses: Sequence[Status]) -> None:
        self._statuses = statuses
        job = min(status.job for status in statuses)
        if not self._console.is_terminal and job > self._said:
            self._said = job
            self._line(f"{job + 1}/{len(self._labels)} {self._labels[job]}")

    def done(self, record: Record) -> None:
        self._records.append(record)
        if not self._console.is_terminal:
            accuracy = "" if record.accuracy is None else f", accuracy {record.accuracy:.1%}"
            self._line(f"    {record.seconds:.1f} s, {record.wait_fraction:.0%} of it waiting{accuracy}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __rich__(self) -> RenderableType:
        statuses, records = self._statuses, list(self._records)
        parts: list[RenderableType] = []
        if records:
            parts += [runs_table(records), Text()]
        job = min((status.job for status in statuses), default=-1)
        if job < 0:
            parts.append(Text(f"starting {self._workers} processes …", style="dim"))
        elif len(records) < len(self._labels):
            parts += [Text(f"{job + 1}/{len(self._labels)}  {self._labels[job]}", style="bold"), self._rows(statuses)]
            losses = [status.loss for status in statuses if status.job == job and math.isfinite(status.loss)]
            if losses:
                parts.append(Text(f"training loss so far: {sum(losses) / len(losses):.3f}"))
        return Group(*parts)

    def _rows(self, statuses: Sequence[Status]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for name in ("worker", "step", "", "doing", "stale"):
            table.add_column(name, justify="right" if name in ("step", "stale") else "left", no_wrap=True)
        for rank, status in enumerate(statuses):
            doing, style = SHOWN[status.doing]
            total = max(self._steps, status.step)
            table.add_row(
                f"rank {rank}",
                str(status.step),
                ProgressBar(total=total, completed=status.step, width=24),
                Text(f"{doing:<22}", style=style),
                "–" if status.stale < 0 else str(status.stale),
            )
        return table


@contextmanager
def screen(labels: Sequence[str], workers: int, steps: int) -> Iterator[Watcher]:
    """A watcher for the length of a job. The screen is taken away at the end, since a table follows."""
    console = Console(stderr=True)
    watcher = Watcher(labels, workers, steps, console)
    if not console.is_terminal:
        yield watcher
        return
    with Live(watcher, console=console, refresh_per_second=8, transient=True):
        yield watcher
