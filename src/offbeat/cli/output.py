"""Results on their way out: the table on stdout, the JSON file written whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from offbeat.report.table import Record, runs_table
from offbeat.version import __version__


def show(records: Sequence[Record], heading: str, path: Path | None) -> None:
    """Print the table of these runs, and write them to ``path`` if there is one."""
    Console().print(runs_table(records, heading))
    if path is not None:
        write_json(path, {"offbeat": __version__, "runs": [record.json() for record in records]})


def write_json(path: Path, value: object) -> None:
    """Write to a file beside it and rename: a reader never sees half of it, and a failure leaves the old one."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
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
