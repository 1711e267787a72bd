"""The card of a method: where it comes from, and its place among the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """A method's answers to the questions that span the field (see DESIGN.md)."""

    what: str
    when: str
    whom: str
    wait: str = "everyone"
    late: str = "at once"
    merge: str = "replace"


@dataclass(frozen=True)
class Paper:
    """One method. The README's table, ``offbeat list`` and ``offbeat cite`` are made from these."""

    name: str
    full_name: str
    summary: str
    title: str
    authors: str
    year: int
    venue: str
    axes: Axes
    helps: str
    hurts: str
    laws: tuple[str, ...]
    departures: str = "none"
    arxiv: str | None = None
    confidence: str = ""

    @property
    def key(self) -> str:
        """The BibTeX key: first author's family name, year, method."""
        first = self.authors.split(" and ")[0]
        family = first.split(",")[0] if "," in first else first.split()[-1]
        return f"{family.lower()}{self.year}{self.name.replace('_', '')}"

    def bibtex(self) -> str:
        """The reference as BibTeX."""
        kind = "article" if self.venue.startswith("arXiv") else "inproceedings"
        where = "journal" if kind == "article" else "booktitle"
        rows = [
            ("title", "{" + self.title + "}"),
            ("author", self.authors),
            (where, self.venue),
            ("year", str(self.year)),
        ]
        if self.arxiv:
            rows += [("eprint", self.arxiv), ("archivePrefix", "arXiv")]
        body = ",\n".join(f"  {name} = {{{value}}}" for name, value in rows)
        return f"@{kind}{{{self.key},\n{body}\n}}"
