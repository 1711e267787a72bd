"""What is written from the cards of the methods: the table of all methods, and a page of the documentation for each.

``python tools/cards.py`` rewrites the table of ``docs/methods/index.md`` between its two marks; with ``--check`` it
only says whether it is up to date. MkDocs loads this file as a hook and asks it for the page of each method, which is
never written to disk; in the built site the names of the table lead to these pages.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.method import Card, Codec
from offbeat.method.card import first_sentence
from offbeat.strategies import METHODS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

OVERVIEW = Path(__file__).parent.parent / "docs" / "methods" / "index.md"
BEGIN, END = "<!-- methods: made by `make readme` from the cards -->", "<!-- methods: end -->"


def table() -> str:
    """All methods as a Markdown table."""
    rows = [
        "| method | what travels | when | to whom | who is waited for | when it helps | paper |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, card in METHODS.items():
        paper, axes = card.paper, card.paper.axes
        helps, source = first_sentence(card.helps), f"{_first_author(card)} {paper.year}"
        cells = [axes.what, axes.when, axes.whom, axes.wait, helps, source]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
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


def overview(text: str) -> str:
    """The page of all methods with the table of now."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs asks which files there are: those in docs/, and a page for each method."""
    from mkdocs.structure.files import File

    for name in METHODS:
        files.append(File.generated(config, f"methods/{name}.md", content=page(name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """In a built site each name in the table leads to its page, and a card to the pages that it names."""
    if not page.file.src_uri.startswith("methods/"):
        return markdown
    if page.file.src_uri == "methods/index.md":
        return re.sub(r"^\| `(\w+)` \|", r"| [`\1`](\1.md) |", markdown, flags=re.MULTILINE)
    return re.sub(r"\(docs/([\w-]+\.md)\)", r"([figures](../\1))", markdown)


def _paragraphs(text: str) -> str:
    """A docstring as Markdown: its labelled lines (*When it helps*: …) become paragraphs, its settings a list."""
    lines = text.splitlines()
    text = "\n".join(f"\n{line}" if line.startswith(("*", "Example:")) else line for line in lines).strip()
    return re.sub(r"(?:(?<=[.:])[ \n]|(?<=\n\n))(?=``\w+(?:=[^`]*)?``(?::| replaces| hides) )", "\n- ", text)


def _default(setting: inspect.Parameter) -> str:
    """A codec by its name, as on the command line."""
    return setting.default.name if isinstance(setting.default, Codec) else repr(setting.default)


def _first_author(card: Card) -> str:
    authors = card.paper.authors.split(" and ")
    return authors[0].split(",")[0] + (" et al." if len(authors) > 1 else "")


def main(arguments: list[str]) -> int:
    now = OVERVIEW.read_text(encoding="utf-8")
    due = overview(now)
    if "--check" in arguments:
        print("the table of methods is up to date" if now == due else "docs/methods/index.md is not; run: make readme")
        return int(now != due)
    OVERVIEW.write_text(due, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
