"""``offbeat reproduce``: the papers' experiments, their claims beside what comes out here."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from offbeat.cli.options import check_count
from offbeat.cli.output import COMMAND, versions, write_json
from offbeat.cli.settings import plain_settings
from offbeat.experiments import EXPERIMENTS, Bench, Case, Experiment, Found, carry_out, experiment
from offbeat.experiments.telling import SMALL, Telling
from offbeat.report import charts, page
from offbeat.report.folder import Recording, Story
from offbeat.report.table import Record
from offbeat.runs.trace import Point, Trace
from offbeat.strategies import METHODS, named

DATA = "OFFBEAT_DATA"
TABLE, RESULTS, CURVES, COMMAND_FILE = "table.md", "results.json", "curves.json", "command.txt"
OUTCOMES = "outcomes.jsonl"


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The name of an experiment; without it all are listed.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The small version, in a minute or two; its figures are no result.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help=f"The folder of data that are not in the package.  [or {DATA}]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder of the results.  [default: runs/NAME]")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N", help="The number of seeds.  [default: the experiment's]")
    ] = None,
    length: Annotated[
        str | None, typer.Option(metavar="N", help="Steps of each worker.  [default: the experiment's]")
    ] = None,
    jobs: Annotated[
        str, typer.Option(metavar="N", help="How many runs are made at a time, each in a process of its own.")
    ] = "1",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped: what is in its folder is kept.")
    ] = False,
) -> None:
    """Reproduce a paper's experiment, in virtual time with real gradients: its rivals and ours, tuned alike.

    The table has the paper's claim, what was scaled or injected here, the result, and whether it meets the claim.
    A folder keeps the table, all figures, the losses as a page, and the command.

    `offbeat reproduce`

    `offbeat reproduce eager-hyperplane --quick`

    `offbeat reproduce eager-hyperplane --jobs 8`
    """
    if name is None:
        _list()
        return
    about = experiment(name)
    folder = out or Path("runs") / name
    _check(folder)
    size = about.quick if quick else about.full
    if seeds is not None:
        count = check_count("--seeds", seeds, 1)
        size = replace(size, seeds=count, timed_seeds=count)
    if length is not None:
        steps = check_count("--length", length, 4)
        size = replace(size, steps=steps, timed_steps=steps)
    cases = [case for case in about.cases if case.quick or not quick]
    place = data if data is not None else Path(os.environ[DATA]) if os.environ.get(DATA) else None
    if quick:
        print(SMALL, file=sys.stderr)
    outcomes = folder / OUTCOMES
    if not resume:
        outcomes.unlink(missing_ok=True)
    made_by = f"{name}, {size.steps} and {size.timed_steps} steps, batches of {size.batch}, {quick=}, {versions()}"
    with Bench(check_count("--jobs", jobs, 1), outcomes, made_by, _told) as bench:
        found = carry_out(about, size, cases, place, bench)
    made = time.strftime("%Y-%m-%d %H:%M:%S %z")
    _write(folder, Telling(about, size, cases, found, quick, COMMAND.get(), made, versions(), place))


def _told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _list() -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 1, 0))
    table.add_column("experiment", no_wrap=True)
    for heading in ("paper", "claim", "needs"):
        table.add_column(heading, overflow="fold")
    for about in EXPERIMENTS.values():
        paper = METHODS[about.papers[0]].paper
        family = paper.authors.split(",")[0]
        table.add_row(*map(Text, (about.name, f"{family} et al. ({paper.year})", f"{about.claim}.", about.needs)))
    Console().print(table)


def _check(folder: Path) -> None:
    """The folder is to be new, empty, or that of an earlier run, which it then replaces."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not any((folder / file).exists() for file in (RESULTS, OUTCOMES)):
        raise ValueError(f"--out {folder} holds other things; name a new folder")


def _write(folder: Path, told: Telling) -> None:
    text, console = told.text(), Console()
    if console.is_terminal:
        console.print(Markdown(text))  # as wide as the screen is
    else:
        print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TABLE).write_text(text, encoding="utf-8")
    (folder / COMMAND_FILE).write_text(told.command + "\n", encoding="utf-8")
    learning = told.with_losses
    if not charts.drawable():
        print(f"no plots: they need Plotly, which is not installed; {charts.INSTALL}", file=sys.stderr)
    elif learning:
        for number, case in enumerate(learning, 1):
            page.write(folder / f"losses-{number}.html", _story(told, case))
    write_json(folder / CURVES, told.curves(), indent=None)
    write_json(folder / RESULTS, told.json())


def _story(told: Telling, case: Case) -> Story:
    """The losses of the first seed, for the page that runs have."""
    recordings = [_recording(told.experiment, case, label, of) for label, of in told.found[case.name].items()]
    heading = f"{told.experiment.name}: {case.title}{f'{chr(10)}{SMALL}' if told.quick else ''}"
    return Story(heading, told.command, told.made, told.versions, recordings)


def _recording(about: Experiment, case: Case, label: str, found: Found) -> Recording:
    run, method = found.figures[0], named(about.methods[label])
    pace = run.gradients / run.seconds
    points: Sequence[Point] = [Point(at_s, round(pace * at_s), loss) for at_s, loss in run.curve]
    record = Record(
        method=method.name,
        label=label,
        mode="simulated",
        task=about.name,
        workers=case.workers,
        steps=run.gradients // case.workers,
        seconds=run.seconds,
        wait_fraction=run.waiting,
        wire_bytes=run.sent,
        loss=run.loss,
        accuracy=run.accuracy,
        train_loss=run.training_loss,
        seed=run.seed,
        delay=f"injected: {case.injected}" if case.injected else "nothing injected",
        settings=plain_settings(method.settings),
    )
    return Recording(record, Trace(series={"loss": list(points)}), (), ())
