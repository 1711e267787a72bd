"""What ``optimizer.summary()`` returns: a row for each rank, and sentences; as text, in Rich, in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import TYPE_CHECKING

from offbeat.basics.units import format_bytes, format_seconds
from offbeat.runs.foreign import ForeignWait
from offbeat.runs.slowness import Judged

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = 16  # ranks; of more, those with the most to tell


@dataclass(frozen=True)
class RankSummary:
    """One worker's row. Times are those of all its steps but the first, which holds what came before the loop.

    ``busy_s``: of its own. ``wait_s``: waiting, also in collectives that are not Offbeat's. ``wire_bytes``: sent.
    ``ended_s``: when it had no more data, in seconds from attach on. After ``finish()``: ``waited_for_s``, how long the
    others together waited for it; it was late in ``late_steps`` of the ``compared_steps`` steps, by ``late_by_s``
    usually. None before.
    """

    rank: int
    steps: int
    busy_s: float
    wait_s: float
    wire_bytes: int
    ended_s: float | None = None
    waited_for_s: float | None = None
    late_steps: int | None = None
    compared_steps: int | None = None
    late_by_s: float | None = None


@dataclass(frozen=True)
class Summary:
    """What ``optimizer.summary()`` returns. Printing it gives a table of the ranks, and the sentences below it.

    ``steps``, ``busy_s``, ``wait_s``, ``wire_bytes`` and ``carriers`` are this worker's own, from attach on. ``ranks``:
    a row for each worker, after ``finish()``; this worker's alone before. ``sentences``: the ``verdict``, which worker
    is slow and whether the others waited for it, and what else there is to say. ``foreign``: this worker's waiting in
    collectives that are not Offbeat's, the longest first; it is neither in ``busy_s`` nor in ``wait_s``.
    """

    rank: int
    workers: int
    steps: int
    busy_s: float
    wait_s: float
    wire_bytes: int
    sentences: tuple[str, ...]
    carriers: tuple[str, ...] = ()
    foreign: tuple[ForeignWait, ...] = ()
    ranks: tuple[RankSummary, ...] = ()

    @property
    def verdict(self) -> str:
        """Which worker is slow, and whether the others waited for it, in one sentence."""
        return self.sentences[0]

    def json(self) -> dict[str, object]:
        """As ``json.dumps`` takes it."""
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        header, *rows = _cells(self.ranks)
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        table = ["  ".join(map(str.rjust, row, widths)) for row in (header, *rows)]
        return "\n".join([*table, *self._below])

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        header, *rows = _cells(self.ranks)
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in header:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        return Group(table, *map(Text, self._below))

    def _repr_html_(self) -> str:
        header, *rows = _cells(self.ranks)
        head = "".join(f"<th>{escape(name)}</th>" for name in header)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        below = "".join(f"<p>{escape(line)}</p>" for line in self._below)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"

    @property
    def _below(self) -> list[str]:
        if len(self.ranks) <= SHOWN:
            return [*self.sentences]
        left_out = f"{len(self.ranks) - SHOWN} more ranks have less to tell; summary().ranks has them all."
        return [left_out, *self.sentences]


def compared(rows: Sequence[RankSummary], judged: Judged) -> tuple[RankSummary, ...]:
    """The rows with what comes of comparing them."""
    late = {one.rank: one for one in judged.late}
    return tuple(
        replace(
            row,
            waited_for_s=late[row.rank].waited_for_s if row.rank in late else 0.0,
            late_steps=late[row.rank].times if row.rank in late else 0,
            compared_steps=judged.steps,
            late_by_s=late[row.rank].by_s if row.rank in late else 0.0,
        )
        for row in rows
    )


def _cells(ranks: Sequence[RankSummary]) -> list[list[str]]:
    """The header and the rows, as texts."""
    shown = sorted(sorted(ranks, key=_most_to_tell)[:SHOWN], key=lambda row: row.rank)
    known = any(row.compared_steps for row in ranks)
    header = ["rank", "steps", "own time", "waiting", *(["waited for", "late in steps"] if known else []), "sent"]
    return [header] + [
        [
            str(row.rank),
            str(row.steps),
            format_seconds(row.busy_s),
            _waiting(row),
            *([_waited_for(row), _late(row)] if known else []),
            format_bytes(row.wire_bytes),
        ]
        for row in shown
    ]


def _most_to_tell(row: RankSummary) -> tuple[float, float, float]:
    return -(row.waited_for_s or 0.0), -(row.late_steps or 0) * (row.late_by_s or 0.0), -row.wait_s


def _waiting(row: RankSummary) -> str:
    share = row.wait_s / (row.busy_s + row.wait_s) if row.wait_s else 0.0
    return f"{format_seconds(row.wait_s)} ({share:.0%})"


def _waited_for(row: RankSummary) -> str:
    return format_seconds(row.waited_for_s) if row.waited_for_s else "-"


def _late(row: RankSummary) -> str:
    return (
        f"{row.late_steps} of {row.compared_steps}, by {format_seconds(row.late_by_s or 0.0)}"
        if row.late_steps
        else "-"
    )
