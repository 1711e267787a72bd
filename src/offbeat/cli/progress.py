"""How far the work is: a bar where somebody watches, a few plain lines where nobody does. Always on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 10.0


class Meter:
    """Told how much is done; shows it now and then."""

    def __init__(self, label: str, total: int | None, bar: Progress | None, console: Console) -> None:
        self._label, self._total, self._bar, self._console = label, total, bar, console
        self._task = bar.add_task(label, total=total) if bar else None
        self._every = max((total or 1000) // 200, 1)
        self._done = 0
        self._noted = False
        self._line_s = time.monotonic()

    def add_one(self) -> None:
        """For work that is counted in small pieces: most calls only count."""
        self._done += 1
        if self._done % self._every == 0:
            self.at(self._done)

    def note(self, text: str) -> None:
        """Say what is being done beside the bar, until steps are counted."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=f"{self._label}: {text}")
            self._noted = True

    def at(self, done: int) -> None:
        if self._noted and done and self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=self._label)
            self._noted = False
        done = done if self._total is None else min(done, self._total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)
        elif time.monotonic() - self._line_s > LINE_EVERY_S:
            self._line_s = time.monotonic()
            of = f" of {self._total}" if self._total is not None else ""
            self._console.print(f"{self._label}: {done}{of}", markup=False, highlight=False, soft_wrap=True)

    def finished(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, visible=False)


class Meters:
    """Gives each run a meter, and says in a line what is about to run where there is no bar."""

    def __init__(self, bar: Progress | None, console: Console) -> None:
        self._bar, self._console = bar, console

    @contextmanager
    def meter(self, label: str, total: int | None) -> Iterator[Meter]:
        if self._bar is None:
            self._console.print(label, markup=False, highlight=False, soft_wrap=True)
        meter = Meter(label, total, self._bar, self._console)
        yield meter
        meter.finished()


@contextmanager
def meters(silent: bool = False) -> Iterator[Meters]:
    """Meters for the length of a command; ``silent`` for the members of a job that do not speak."""
    console = Console(stderr=True, quiet=silent)
    if silent or not console.is_terminal:
        yield Meters(None, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield Meters(bar, console)
