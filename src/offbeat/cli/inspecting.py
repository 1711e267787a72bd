"""``offbeat inspect``: which checkpoints a folder holds, and whether each is whole."""

from __future__ import annotations

import json as json_
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from offbeat.basics.units import format_bytes
from offbeat.live.host import checkpoint

WIDE = 160  # columns, where nobody watches


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that attach has as checkpoint=.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List the checkpoints in a folder: step, run, and whether each is whole.

    It reads all of each and compares the digests. The exit code is 1 if one is damaged, or if there is none.

    `offbeat inspect checkpoints`
    """
    found = checkpoint.every(folder)
    if as_json:
        rows = [{"place": str(one.place), "damage": one.damage, **one.manifest} for one in found]
        print(json_.dumps(rows, indent=1))
    elif not found:
        print(f"there is no checkpoint in {folder}")
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("checkpoint", "step", "saved", "method", "workers", "parameters", "size", "whole"):
            table.add_column(
                name, justify="left" if name in ("checkpoint", "method", "whole") else "right", overflow="fold"
            )
        for one in found:
            table.add_row(one.place.name, *_cells(one), "no" if one.damage else "yes")
        console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
        console.print(table)
        for one in found:
            if one.damage:
                console.print(one.damage, soft_wrap=True)
    raise typer.Exit(0 if found and not any(one.damage for one in found) else 1)


def _cells(one: checkpoint.Saved) -> list[str]:
    about = one.manifest
    if not about:
        return [""] * 6
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["saved_unix_s"]))
    size = format_bytes(sum(file["bytes"] for file in about["files"].values()))
    return [
        str(one.step),
        saved,
        str(about["method"]).partition("(")[0],
        str(about["workers"]),
        f"{about['parameters']:,}",
        size,
    ]
