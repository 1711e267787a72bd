"""``offbeat status``: what the jobs of this user on this host are doing, live, once, or as JSON; and stacks."""

from __future__ import annotations

import json as json_
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offbeat.basics.units import parse_seconds
from offbeat.basics.version import __version__
from offbeat.live import JobStatus, OffbeatError
from offbeat.live.host import looking, status
from offbeat.live.host.looking import RunningJob
from offbeat.live.worker.stacks import stacks_of

STYLES = {"busy": "bright_blue", "waits": "yellow", "elsewhere": "magenta", "stopped": "red", "ended": "red"}
NOBODY = (
    "no job of yours runs on this host; start one with torchrun, or look at the host where it runs, and inside its "
    "container if it has one"
)
WIDE = 110  # columns, in which everything has room
LEAST_S = 0.2  # a host process tells nothing newer more often


@dataclass(frozen=True)
class Looked:
    """One job: what its host process says, or why it says nothing."""

    number: int
    job: RunningJob
    status: JobStatus | None
    error: str = ""


def show_status(
    job: Annotated[
        str | None, typer.Option(metavar="N", help="One of several jobs: its number, or the pid of its host process.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once, also in a terminal.")] = False,
    every: Annotated[str, typer.Option(metavar="TIME", help="How often the screen refreshes.")] = "500ms",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    stack: Annotated[
        str | None, typer.Option(metavar="RANK", help="The Python stacks of this worker, also of one that hangs.")
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="The Python stacks of all workers of this host.")] = False,
) -> None:
    """Show the jobs on this host: each worker, who is late and who waits, rounds, memory, other hosts.

    In a terminal the screen refreshes until Ctrl-C. The answers come from the host process, which asks no worker: so it
    also works while workers hang, and it delays nobody. Stacks come from the workers themselves, by a signal (SIGURG).

    `offbeat status`

    `offbeat status --stack 2`
    """
    every_s = parse_seconds(every)
    if every_s < LEAST_S:
        raise ValueError(f"--every {every} is more often than a host process tells anything new; use 200ms or more")
    if stack is not None or stacks:
        _show_stacks(job, stack)
    elif as_json:
        print(json_.dumps({"offbeat": __version__, "jobs": [_plain(one) for one in _look(job, whole=True)]}, indent=2))
    elif once or not Console().is_terminal:
        seen = _look(job, whole=True)
        if Console().is_terminal:
            Console().print(_page(seen))
        else:  # for a file or a program, lines are as long as they are
            print("\n\n".join(f"{_number(one, seen)}{one.status or one.error}" for one in seen))
        if all(one.status is None for one in seen):
            raise OffbeatError(seen[0].error)
    else:
        _watch(job, every_s)


def _watch(job: str | None, every_s: float) -> None:
    """A screen that is made anew until Ctrl-C, or until no job is left."""
    console = Console()
    seen = _look(job)
    with Live(_page(seen, live=True), console=console, auto_refresh=False, transient=True) as live:
        try:
            while True:
                time.sleep(every_s)
                try:
                    seen = _look(job)
                except (OffbeatError, ValueError):
                    seen = []
                    break
                live.update(_page(seen, live=True), refresh=True)
        except KeyboardInterrupt:
            pass
    console.print(_page(seen) if seen else Text("the job has ended"))


# Which jobs.


def _look(job: str | None, whole: bool = False) -> list[Looked]:
    """The jobs of this user, or the one that was asked for. Raises a sentence where there is none."""
    found = list(enumerate(looking.jobs(), 1))
    if not found:
        raise OffbeatError(NOBODY)
    chosen = [(number, one) for number, one in found if job is None or job in (str(number), str(one.pid))]
    if not chosen:
        known = ", ".join(f"{number} (host process {one.pid})" for number, one in found)
        raise ValueError(f"--job {job} is no job of yours on this host; yours: {known}")
    return [_seen(number, one, whole) for number, one in chosen]


def _seen(number: int, job: RunningJob, whole: bool) -> Looked:
    try:
        return Looked(number, job, job.look(whole))
    except OffbeatError as error:
        return Looked(number, job, None, str(error))


def _plain(seen: Looked) -> dict[str, object]:
    if seen.status is None:
        return {"job": seen.number, "pid": seen.job.pid, "error": seen.error}
    return {"job": seen.number, **seen.status.json()}


# Stacks.


def _show_stacks(job: str | None, stack: str | None) -> None:
    """Each worker by itself: one whose stacks cannot be had keeps nobody's from being shown."""
    seen = _look(job)
    wanted = [(one, worker) for one in seen if one.status for worker in one.status.workers]
    if not wanted:
        raise OffbeatError(seen[0].error or "the job has no workers on this host")
    if stack is not None:
        ranks = ", ".join(str(worker.rank) for _, worker in wanted)
        wanted = [(one, worker) for one, worker in wanted if str(worker.rank) == stack]
        if not wanted:
            raise ValueError(f"--stack {stack} is no rank of this host; its ranks are {ranks}")
        if len(wanted) > 1:
            raise ValueError(f"--stack {stack} is a rank of {len(wanted)} jobs; say which with --job")
    failed = []
    for one, worker in wanted:
        job_ = f"job {one.number}, " if len(seen) > 1 else ""
        print(f"{job_}rank {worker.rank}, process {worker.pid}, {worker.doing}")
        try:
            print(f"\n{stacks_of(worker.pid)}")
        except OffbeatError as error:
            failed.append(str(error))
            print(f"no stacks: {error}\n")
    if len(failed) == len(wanted):
        raise OffbeatError(failed[0])


# The page.


def _page(seen: Sequence[Looked], live: bool = False) -> RenderableType:
    parts: list[RenderableType] = []
    for one in seen:
        if parts:
            parts.append(Text())
        number = _number(one, seen)
        if one.status is None:
            parts.append(Text(f"{number}{one.error}", style="red"))
        else:
            parts += _of_job(number, one.status, Console().width < WIDE)
    if live:
        parts += [Text(), Text("Ctrl-C leaves; the job goes on", style="dim")]
    return Group(*parts)


def _number(one: Looked, among: Sequence[Looked]) -> str:
    """Before a job's name, where there are several."""
    return f"{one.number}  " if len(among) > 1 else ""


def _of_job(number: str, job: JobStatus, narrow: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(f"{number}{status.heading(job)}", style="bold"), Text()]
    styles = {str(one.rank): "red" if one.waited_for_by else STYLES[one.state] for one in job.everybody}
    rows = status.worker_cells(job, narrow)
    parts.append(_table(rows, {"doing": [styles[row[0]] for row in rows[1:]]}))
    if job.channels:
        parts += [Text(), _table(status.channel_cells(job), {})]
    if job.other_hosts:
        links = ["" if other.answers else "red" for other in job.other_hosts]
        parts += [Text(), _table(status.host_cells(job), {"link": links})]
    parts += [Text(), Text(status.resources(job), style="dim")]
    if job.sentences:
        parts += [Text(), *(Text(sentence) for sentence in job.sentences)]
    return parts


def _table(rows: Sequence[Sequence[str]], styles: dict[str, list[str]]) -> Table:
    header, *cells = rows
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column, name in enumerate(header):
        right = status.is_number_column(rows, column)
        wraps = name in ("doing", "link")
        table.add_column(name, justify="right" if right else "left", no_wrap=not wraps, overflow="fold")
    for number, row in enumerate(cells):
        colours = [
            styles[name][number] if name in styles and cell != "-" else ""
            for name, cell in zip(header, row, strict=True)
        ]
        table.add_row(*(Text(cell, style=colour) for cell, colour in zip(row, colours, strict=True)))
    return table
