"""Your own measurements: a table of seconds, a file of them, or a run that was recorded."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from offbeat.delays.distribution import Distribution, refuse

COLUMNS = ("step", "rank", "seconds")


class Timeline(Protocol):
    """A run's trace, as far as it is looked at here."""

    def busy_s(self, workers: int) -> list[list[float]]:
        """For each worker, the seconds of its own in each of its steps."""


@runtime_checkable
class TimedRun(Protocol):
    """A run that says how long its workers' steps took."""

    @property
    def workers(self) -> int: ...
    @property
    def trace(self) -> Timeline: ...


@runtime_checkable
class TimedSteps(Protocol):
    """An attached optimiser: after ``finish()`` it knows how long every worker's steps took."""

    @property
    def step_times_s(self) -> Sequence[Sequence[float]]: ...


@dataclass(frozen=True)
class Table(Distribution):
    """Measured seconds, ``table[step][rank]``. Steps and ranks beyond the table begin again at its start.

    ``filled``: how many cells nobody measured; they repeat what the same rank took in other steps.
    """

    table: tuple[tuple[float, ...], ...] = field(repr=False)
    filled: int = 0

    def __post_init__(self) -> None:
        if not self.table or not all(self.table):
            raise ValueError("a trace has no seconds in at least one of its steps; give each step one number a rank")
        for step, row in enumerate(self.table):
            for rank, seconds in enumerate(row):
                if not 0 <= seconds < math.inf:
                    refuse("a trace", step, rank, seconds)

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        row = self.table[step % len(self.table)]
        return row[rank % len(row)]

    def __str__(self) -> str:
        steps, ranks = len(self.table), max(map(len, self.table))
        missing = f", of which {self.filled} repeat others of their rank" if self.filled else ""
        return f"a trace of {_many(steps, 'step')} of {_many(ranks, 'rank')}{missing}"


def trace(measured: Iterable[Iterable[float]] | TimedRun | TimedSteps | str | Path) -> Table:
    """Seconds as they were measured, wrapping round at both ends.

    ``measured`` is a table, ``table[step][rank]``; or a run that kept its timeline, or an attached optimiser after its
    ``finish()``, of which each worker's own time is taken (late or computing, not waiting); or the name of a CSV file
    with the columns step, rank and seconds.
    """
    if isinstance(measured, (str, Path)):
        return _from_file(Path(measured))
    if isinstance(measured, Iterable):
        return Table(tuple(_rows(measured)))
    if isinstance(measured, TimedRun):
        own = measured.trace.busy_s(measured.workers)
        return _from_steps(own, "run", "use one that kept its timeline: simulate(…, spans=True)")
    if isinstance(measured, TimedSteps):
        way_out = "all times are known after finish(), of runs of two steps or more"
        return _from_steps(measured.step_times_s, "attached optimiser", way_out)
    raise ValueError(
        f"a {type(measured).__name__} is no measurement; give a table of seconds, table[step][rank], a run, an "
        f"attached optimiser after its finish(), or the name of a CSV file"
    )


def _rows(table: Iterable[Iterable[float]]) -> Iterator[tuple[float, ...]]:
    for step, row in enumerate(table):
        try:
            cells = tuple(row)
        except TypeError:
            raise ValueError(
                f"step {step} of a trace is {row!r}; give a row with one number a rank: [[0.31, 0.29], [0.30, 0.35]]"
            ) from None
        for rank, seconds in enumerate(cells):
            try:
                float(seconds)
            except (TypeError, ValueError):
                refuse("a trace", step, rank, seconds)
        yield tuple(map(float, cells))


def _from_steps(own: Sequence[Sequence[float]], whose: str, way_out: str) -> Table:
    """Of each worker's own times, step by step."""
    for rank, seconds in enumerate(own or [[]]):
        if not seconds:
            raise ValueError(f"the {whose} has no times of rank {rank}; {way_out}")
    return _filled([dict(enumerate(seconds)) for seconds in own])


def _filled(own: Sequence[Mapping[int, float]]) -> Table:
    """A table from each rank's own steps; a cell that nobody measured repeats another step of its rank."""
    steps = sorted({step for cells in own for step in cells})
    known = [[cells[step] for step in sorted(cells)] for cells in own]
    rows = [
        tuple(cells.get(step, seconds[k % len(seconds)]) for cells, seconds in zip(own, known, strict=True))
        for k, step in enumerate(steps)
    ]
    return Table(tuple(rows), len(rows) * len(own) - sum(map(len, known)))


def _from_file(file: Path) -> Table:
    if file.is_dir():
        raise ValueError(f"the trace {file} is a folder; name a CSV file, or let a command read it: --compute {file}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"the trace {file} cannot be read: {reason}") from None
    rows = csv.reader(text.splitlines())
    heads = [head.strip().lower() for head in next(rows, [])]
    missing = [column for column in COLUMNS if column not in heads]
    if missing:
        raise ValueError(
            f"{file}, line 1: there is no column {missing[0]!r}; begin the file with a line {','.join(COLUMNS)}"
        )
    places = [heads.index(column) for column in COLUMNS]
    by_rank: dict[int, dict[int, float]] = {}
    for row in rows:
        if not any(cell.strip() for cell in row):
            continue
        where = f"{file}, line {rows.line_num}"
        if len(row) < len(heads):
            raise ValueError(
                f"{where}: {','.join(row)!r} has {len(row)} of {len(heads)} columns; complete or delete it"
            )
        step, rank = (_whole(where, column, row[place]) for column, place in zip(COLUMNS, places[:2], strict=False))
        cells = by_rank.setdefault(rank, {})
        if step in cells:
            raise ValueError(f"{where}: step {step} of rank {rank} is there a second time; delete one of the two")
        cells[step] = _seconds(where, row[places[2]])
    if not by_rank:
        raise ValueError(f"the trace {file} has no rows; write one for each step and rank: 0,0,0.31")
    return _filled([by_rank[rank] for rank in sorted(by_rank)])


def _whole(where: str, column: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{where}: the {column} is {text.strip()!r}; use a whole number from 0")
    return int(text)


def _seconds(where: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"{where}: {text.strip()!r} is no number of seconds; use a finite one, 0 or more, such as 0.31"
        )
    return seconds


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
