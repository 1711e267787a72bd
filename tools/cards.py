"""What is written from the cards of the methods: the README's table, and a page of the documentation for each.

``python tools/cards.py`` rewrites the table between its two marks; with ``--check`` it only says whether it is up to
date. MkDocs loads this file as a hook and asks it for the pages, which are never written to disk.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.method import Card, Codec
from offbeat.method.card import first_sentence
from offbeat.strategies import METHODS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- methods: made by `make readme` from the cards -->", "<!-- methods: end -->"


def table(link: str) -> str:
    """All methods as a Markdown table. ``link`` is where a method's name leads, with ``{}`` for the name."""
    rows = [
        "| method | what travels | when | to whom | who is waited for | when it helps | paper |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, card in METHODS.items():
        paper, axes = card.paper, card.paper.axes
        helps, source = first_sentence(card.helps), f"{_first_author(card)} {paper.year}"
        cells = [axes.what, axes.when, axes.whom, axes.wait, helps, source]
        rows.append(f"| [`{name}`]({link.format(name)}) | {' | '.join(cells)} |")
    return "\n".join(rows)


def page(name: str) -> str:
    """The page of one method, as Markdown."""
    card = METHODS[name]
    paper, axes = card.paper, card.paper.axes
    settings = list(inspect.signature(card.make).parameters.values())
    call = f"ob.{name}({', '.join(f'{p.name}={_default(p)}' for p in settings)})"
    lines = [
        f"# {paper.full_name}",
        "",
        f"`{call}`" if settings else f"`{call}`, which has no settings",
        "",
        _paragraphs(card.text),
        "",
    ]
    if settings:
        lines += ["## Settings", ""]
        lines += ["| setting | default | type |", "| --- | --- | --- |"]
        for p in settings:
            lines.append(f"| `{p.name}` | `{_default(p)}` | `{p.annotation}` |")
        lines.append("")
    lines += [
        "## Its place among the methods",
        "",
        "| question | answer |",
        "| --- | --- |",
        f"| what travels | {axes.what} |",
        f"| when | {axes.when} |",
        f"| to whom | {axes.whom} |",
        f"| who is waited for | {axes.wait} |",
        f"| when the result is applied | {axes.late} |",
        f"| how it is applied | {axes.merge} |",
        "",
        "## Laws it obeys",
        "",
        *[f"- {law}" for law in paper.laws],
        "",
        "## Reference",
        "",
        *([f"How sure we are of the defaults: {paper.confidence}.", ""] if paper.confidence else []),
        "```bibtex",
        paper.bibtex(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def readme(text: str) -> str:
    """The README with the table of now."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table('src/offbeat/strategies/{}.py')}\n{END}{after}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs asks which files there are: those in docs/, and a page for each method."""
    from mkdocs.structure.files import File

    overview = f"# The methods\n\nEach name leads to the method's card.\n\n{table('{}.md')}\n"
    for path, text in {"index": overview, **{name: page(name) for name in METHODS}}.items():
        files.append(File.generated(config, f"methods/{path}.md", content=text))
    return files


def _paragraphs(text: str) -> str:
    """A docstring as Markdown: its labelled lines (*When it helps*: …) become paragraphs of their own."""
    lines = text.splitlines()
    return "\n".join(f"\n{line}" if line.startswith(("*", "Example:")) else line for line in lines).strip()


def _default(setting: inspect.Parameter) -> str:
    """A codec by its name, as on the command line."""
    return setting.default.name if isinstance(setting.default, Codec) else repr(setting.default)


def _first_author(card: Card) -> str:
    authors = card.paper.authors.split(" and ")
    return authors[0].split(",")[0] + (" et al." if len(authors) > 1 else "")


def main(arguments: list[str]) -> int:
    now = README.read_text(encoding="utf-8")
    due = readme(now)
    if "--check" in arguments:
        print("the table of README.md is up to date" if now == due else "README.md is not; run: make readme")
        return int(now != due)
    README.write_text(due, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
