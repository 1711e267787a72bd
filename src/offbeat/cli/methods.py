"""``offbeat list`` and ``offbeat cite``: the methods and their papers, made from the cards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.cli.options import Json, check_json
from offbeat.cli.output import write_json
from offbeat.cli.settings import defaults, plain, shown
from offbeat.method import Paper
from offbeat.strategies import METHODS, named


def list_methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The name of one method.")] = None,
    json: Json = None,
) -> None:
    """List the methods: what travels, when, to whom, and who is waited for. With NAME: the card of one method.

    Examples: `offbeat list`, `offbeat list local_sgd`
    """
    check_json(json)
    if name is None:
        _table(list(METHODS))
    else:
        named(name)  # raises the sentence that names those there are
        _card(name)
    if json is not None:
        _write(json, list(METHODS) if name is None else [name])


def cite(name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a method, see offbeat list.")]) -> None:
    """Print the reference of a method as BibTeX.

    Example: `offbeat cite dasgd >> references.bib`
    """
    print(named(name).paper.bibtex())


def _table(names: list[str]) -> None:
    console = Console()
    gap = 2 if console.width >= 110 else 1
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    table.add_column("name", no_wrap=True, style="bold")
    for column in ("what", "when", "whom", "waits for"):
        table.add_column(column, min_width=12 if column == "what" else None)
    table.add_column("paper", min_width=11)
    table.add_column("year", no_wrap=True, min_width=4)
    for name in names:
        paper = METHODS[name].paper
        axes = paper.axes
        source = paper.title if console.width >= 150 else _first_author(paper, et_al=console.width >= 110)
        table.add_row(name, axes.what, axes.when, axes.whom, axes.wait, source, str(paper.year))
    console.print(table)
    console.print(Text("\noffbeat list NAME shows a method in full, offbeat cite NAME its reference.", style="dim"))


def _card(name: str) -> None:
    card = METHODS[name]
    paper, axes = card.paper, card.paper.axes
    settings = ", ".join(f"{key}={shown(value)}" for key, value in defaults(name).items())
    rows = [
        ("in short", card.summary),
        ("settings", settings or "none"),
        ("what", axes.what),
        ("when", axes.when),
        ("whom", axes.whom),
        ("waits for", axes.wait),
        ("applied", f"{axes.late}, {axes.merge}"),
        ("helps", card.helps),
        ("hurts", card.hurts),
        ("suggested", card.suggested),
        ("laws", "\n".join(paper.laws)),
        ("departures", card.departures),
        *([("how sure", paper.confidence)] if paper.confidence else []),
        ("paper", f"{paper.title}. {paper.authors}. {paper.venue}, {paper.year}"),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for key, text in rows:
        grid.add_row(key, Text(text.replace("``", "")))
    console = Console()
    console.print(Text.assemble((name, "bold"), f"  {paper.full_name}"))
    console.print(grid)


def _first_author(paper: Paper, et_al: bool) -> str:
    authors = paper.authors.split(" and ")
    family = authors[0].split(",")[0]
    return f"{family} et al." if et_al and len(authors) > 1 else family


def _write(path: Path, names: list[str]) -> None:
    methods = []
    for name in names:
        card = METHODS[name]
        told = {key: getattr(card, key) for key in ("summary", "helps", "hurts", "suggested", "departures")}
        settings = {key: plain(value) for key, value in defaults(name).items()}
        methods.append({**dataclasses.asdict(card.paper), **told, "settings": settings})
    write_json(path, {"methods": methods})
