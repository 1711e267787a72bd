"""The card of a method: where it comes from, its place among the others, and when to use it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.method.words import given_twice, kinds_of, read_settings

if TYPE_CHECKING:
    from offbeat.method.strategy import Method


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
    """Where a method comes from, its place among the others, and the laws it obeys."""

    name: str
    full_name: str
    title: str
    authors: str
    year: int
    venue: str
    axes: Axes
    laws: tuple[str, ...]
    arxiv: str | None = None
    confidence: str = ""

    @property
    def key(self) -> str:
        """The BibTeX key: first author's family name, year, method."""
        first = self.authors.split(" and ")[0]
        family = first.split(",")[0] if "," in first else first.split()[-1]
        return f"{family.lower()}{self.year}{self.name.replace('_', '')}"

    @property
    def _kind(self) -> tuple[str, str]:
        """The kind of entry, and its field for the venue, by what the venue calls itself."""
        if any(word in self.venue for word in ("Conference", "Symposium", "Workshop", "Advances in ")):
            return "inproceedings", "booktitle"
        if any(word in self.venue for word in ("arXiv", "Journal", "Transactions", "Proceedings of the ")):
            return "article", "journal"
        return "misc", "howpublished"

    def bibtex(self) -> str:
        """The reference as BibTeX."""
        kind, where = self._kind
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


@dataclass(frozen=True)
class Card:
    """One method: its paper, and what the docstring of ``make`` says.

    The docstring's first line is the summary; passages that begin with ``*When it helps*:``, ``*When it hurts*:``,
    ``*Suggested settings*:`` and ``*Departures*:`` are what these properties give. The table of methods, the pages of
    the documentation and ``offbeat list`` are made from cards.
    """

    paper: Paper
    make: Callable[..., Method]

    @property
    def text(self) -> str:
        """The docstring."""
        return inspect.getdoc(self.make) or ""

    @property
    def summary(self) -> str:
        """The method in a line."""
        return self.text.partition("\n")[0].removesuffix(".")

    @property
    def helps(self) -> str:
        """When it helps."""
        return self._passage("When it helps")

    @property
    def hurts(self) -> str:
        """When it hurts."""
        return self._passage("When it hurts")

    @property
    def suggested(self) -> str:
        """The settings to begin with."""
        return self._passage("Suggested settings")

    @property
    def departures(self) -> str:
        """Where it departs from the paper."""
        return self._passage("Departures") or "none"

    def read(self, words: Iterable[str], **settings: object) -> Method:
        """The method with settings in words, such as ``period=4``, and others as they are."""
        read = read_settings(self.paper.name, kinds_of(self.make), words)
        for key in read.keys() & settings.keys():
            raise ValueError(given_twice(key, read[key], settings[key]))
        return self.make(**read, **settings)

    def _passage(self, label: str) -> str:
        """From its label to the next one or an empty line, in one line, without the last full stop."""
        found = re.search(rf"^\*{label}\*: (.*?)(?=\n\*|\n\n|\Z)", self.text, re.DOTALL | re.MULTILINE)
        return " ".join(found[1].split()).removesuffix(".") if found else ""


def first_sentence(text: str) -> str:
    """For a cell of a table."""
    return text.partition(". ")[0]
