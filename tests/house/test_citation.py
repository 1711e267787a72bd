"""CITATION.cff: Offbeat, and the papers it began with, as their cards have them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import yaml  # type: ignore[import-untyped]

import offbeat as ob

ROOT = Path(ob.__file__).parents[2]


def test_the_citation_is_made_from_the_cards() -> None:
    spec = importlib.util.spec_from_file_location("citation", ROOT / "tools" / "citation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "CITATION.cff").read_text(encoding="utf-8") == module.citation(), "run: make readme"


def test_the_citation_names_the_five_papers() -> None:
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert told["cff-version"] == "1.2.0"
    assert {"title", "authors", "message"} <= set(told)
    assert "version" not in told, "the version has one place, and this is not it"
    papers = {paper["title"]: paper for paper in told["references"]}
    for name in ("eager", "wagma", "dasgd", "adaptive", "nonblocking"):
        card = ob.STRATEGIES[name].paper
        names = " and ".join(f"{a['family-names']}, {a['given-names']}" for a in papers[card.title]["authors"])
        assert (names, papers[card.title]["year"]) == (card.authors, card.year)
        assert papers[card.title]["identifiers"][0]["value"] == f"arXiv:{card.arxiv}"
    assert len(papers) == 5
