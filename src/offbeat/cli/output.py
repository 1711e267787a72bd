"""Results on their way out: the table on stdout, files written whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.text import Text

from offbeat.basics.version import __version__
from offbeat.cli.options import check_file, check_json, check_report
from offbeat.report import charts, folder, page, perfetto
from offbeat.report.folder import Recording, Story
from offbeat.report.table import Record, runs_table

COMMAND: ContextVar[str] = ContextVar("COMMAND", default="offbeat")


@dataclass(frozen=True)
class Outputs:
    """Where a command's results go besides the screen."""

    json: Path | None = None
    report: Path | None = None
    trace: Path | None = None

    def check(self) -> None:
        """Say before the work that its results could not be written."""
        check_json(self.json)
        check_report(self.report)
        check_file("--trace", self.trace)

    @property
    def wants_spans(self) -> bool:
        return self.report is not None or self.trace is not None

    def write(self, recordings: Sequence[Recording], heading: str) -> None:
        if self.json is not None:
            records = [recording.record.json() for recording in recordings]
            write_json(self.json, {"offbeat": __version__, "runs": records})
        if self.trace is not None:
            perfetto.write(self.trace, recordings)
            print(f"wrote {self.trace}: open it at https://ui.perfetto.dev", file=sys.stderr)
        if self.report is not None:
            made = time.strftime("%Y-%m-%d %H:%M:%S %z")
            story = Story(heading, COMMAND.get(), made, versions(), recordings)
            folder.write(self.report, story)
            if charts.drawable():
                page.write(self.report / "report.html", story)
                print(f"wrote {self.report / 'report.html'}", file=sys.stderr)
            else:
                later = f"{charts.INSTALL}, then offbeat report {self.report}"
                print(f"wrote {self.report}; its page needs Plotly, which is not installed: {later}", file=sys.stderr)


def show(records: Sequence[Record], heading: str) -> None:
    """Print the table of these runs."""
    Console().print(runs_table(records, heading))


def show_slow(recordings: Sequence[Recording]) -> None:
    """Say which worker was slow, for each run that knows it."""
    console = Console()
    for recording in recordings:
        if said := page.words(recording):
            label = f"{recording.record.label}: " if len(recordings) > 1 else ""
            console.print(Text.assemble((label, "bold"), " ".join(said)))


def versions() -> dict[str, str]:
    """What the numbers depend on."""
    found = {"offbeat": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "plotly"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"}


def write_json(path: Path, value: object, indent: int | None = 2) -> None:
    """Write to a file beside it and rename: a reader never sees half of it, and a failure leaves the old one."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.absolute().parent, delete=False) as file:
        try:
            file.write(text + "\n")
            file.close()
            # A temporary file is its owner's alone; this one is as readable as any file the user makes.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(file.name, 0o666 & ~mask)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    print(f"wrote {path}", file=sys.stderr)
