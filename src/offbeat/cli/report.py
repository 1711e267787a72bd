"""``offbeat report``: a folder of a run as a page, in words, and as a timeline for specialists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.options import TraceFile, check_file
from offbeat.cli.output import show, show_slow
from offbeat.report import folder, page, perfetto


def report(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that --report made.")],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="The page.  [default: DIR/report.html]")
    ] = None,
    trace: TraceFile = None,
) -> None:
    """Show a run: the table, which worker is slow, and an HTML page with its timeline.

    The page is one file that needs no network. It says what is missing or damaged in the folder, and shows the rest.

    `offbeat report runs/demo`

    `offbeat report runs/demo --trace timeline.json`
    """
    check_file("--output", output)
    check_file("--trace", trace)
    story = folder.read(run)
    show([recording.record for recording in story.recordings], story.heading)
    show_slow(story.recordings)
    for note in story.notes:
        print(f"note: {note}", file=sys.stderr)
    if trace is not None:
        perfetto.write(trace, story.recordings)
        print(f"wrote {trace}: open it at https://ui.perfetto.dev", file=sys.stderr)
    place = output or run / "report.html"
    page.write(place, story)
    print(f"wrote {place}", file=sys.stderr)
