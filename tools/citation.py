"""Writes CITATION.cff: Offbeat itself, and the five papers it began with, from their cards.

With ``--check`` it only says whether the file is up to date. The version is left out: it has one place of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from offbeat.method.card import Card
from offbeat.strategies import METHODS

FILE = Path(__file__).parent.parent / "CITATION.cff"
FIVE = ("eager", "wagma", "dasgd", "adaptive", "nonblocking")
HEAD = """\
# Made by `make readme` from the cards of the methods.
cff-version: 1.2.0
message: If you use Offbeat, please cite it, and the paper of the method you used (`offbeat cite NAME`).
type: software
title: Offbeat
abstract: Train PyTorch models on many workers without marching in step.
authors:
  - name: The Offbeat authors
license: Apache-2.0
references:
"""


def citation() -> str:
    """The file as it should be."""
    return HEAD + "".join(_reference(METHODS[name]) for name in FIVE)


def _reference(card: Card) -> str:
    paper = card.paper
    venue = json.dumps(paper.venue)
    if paper.venue.startswith("arXiv"):
        kind, where = "article", ["journal: arXiv"]
    elif "Symposium" in paper.venue or "Conference" in paper.venue:
        kind, where = "conference-paper", [f"collection-title: {venue}", "conference:", f"  name: {venue}"]
    else:
        kind, where = "article", [f"journal: {venue}"]
    lines = [f"title: {json.dumps(paper.title)}", "authors:"]
    for author in paper.authors.split(" and "):
        family, given = author.split(", ")
        lines += [f"  - family-names: {family}", f"    given-names: {given}"]
    lines += [f"year: {paper.year}", *where]
    if paper.arxiv:
        lines += ["identifiers:", "  - type: other", f"    value: arXiv:{paper.arxiv}"]
    return f"  - type: {kind}\n" + "".join(f"    {line}\n" for line in lines)


def main(arguments: list[str]) -> int:
    due = citation()
    if "--check" in arguments:
        same = FILE.exists() and FILE.read_text(encoding="utf-8") == due
        print("CITATION.cff is up to date" if same else "CITATION.cff is not; run: make readme")
        return int(not same)
    FILE.write_text(due, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
