"""The guide answers first: kinds of pages, their lengths, the way to ten answers, plain words, formats as written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]

import offbeat as ob
from offbeat.cli import main

ROOT = Path(ob.__file__).parents[2]
DOCS = ROOT / "docs"
LONGEST = {"Home": 1200, "Tutorials": 1200, "How-to": 800, "Explanation": 1200}  # words; the reference is looked up in


def _pages(menu: Any) -> Iterator[str]:
    """The pages below a part of the menu."""
    if isinstance(menu, str):
        yield menu
    for part in menu if isinstance(menu, list) else menu.values() if isinstance(menu, dict) else ():
        yield from _pages(part)


CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
MENU = {kind: [*_pages(pages)] for entry in CONFIG["nav"] for kind, pages in entry.items()}
WRITTEN = {page: kind for kind, pages in MENU.items() for page in pages if (DOCS / page).exists()}


def _text(page: str) -> str:
    """A page without its code."""
    return re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_every_page_is_of_one_kind() -> None:
    assert {str(path.relative_to(DOCS)) for path in DOCS.glob("*.md")} == set(WRITTEN) - {"methods/index.md"}
    assert set(MENU) == {*LONGEST, "Reference"}


@pytest.mark.parametrize("page", [page for page, kind in WRITTEN.items() if kind in LONGEST])
def test_a_page_is_read_in_minutes(page: str) -> None:
    words = len(re.findall(r"\S*\w\S*", _text(f"docs/{page}")))  # signs of a table are none
    assert words <= LONGEST[WRITTEN[page]], f"{words} words; begin a page of its own for another question"


@pytest.mark.parametrize("page", WRITTEN)
def test_a_page_begins_with_its_answer(page: str) -> None:
    """What stands under the title is a sentence or a table, and in a how-to short."""
    title, first, *_ = (DOCS / page).read_text(encoding="utf-8").split("\n\n")
    assert title.startswith("# "), "one title"
    assert not first.startswith(("#", "```", "!", ">")), "say the answer first"
    if WRITTEN[page] == "How-to":
        assert len(first.split()) <= 60


def test_the_readme_is_a_screen_and_a_half() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    assert len(_text("README.md").split()) <= 600
    assert text.count("![") == 1


def test_the_design_is_read_in_an_hour() -> None:
    assert (ROOT / "DESIGN.md").stat().st_size <= 25 * 1024


# Ten questions, the links that a stranger follows from the README, and words of the answer that stand at the end.
PATHS = {
    "which method": (("docs/choosing.md",), "you do not know"),
    "eight GPUs on two nodes under SLURM": (("docs/launch.md#several-hosts",), "#SBATCH --nodes=2"),
    "my worker was killed": (("docs/keep-going.md",), "offbeat launch -n 4 --restarts 3 train.py"),
    "resume with fewer workers": (("docs/checkpoint.md",), "offbeat launch -n 3 --resume checkpoints train.py"),
    "loss worse than DDP": (("docs/troubleshoot.md", "#the-loss-is-worse-than-with-ddp"), "Compare at equal samples"),
    "how do I log a mean loss": (("docs/evaluate.md",), "optimizer.mean("),
    "FSDP": (("docs/sharded.md",), "fully_shard"),
    "what was tested on GPUs": (("#tested-on",), "one NVIDIA H200"),
    "how slow compared with NCCL DDP": (("docs/benchmarks.md",), "compared with DDP over NCCL?"),
    "how to cite": (("#cite",), "offbeat cite"),
}


@pytest.mark.parametrize("question", PATHS)
def test_a_stranger_finds_the_answer_from_the_readme(question: str) -> None:
    links, answer = PATHS[question]
    page, landing = ROOT / "README.md", "README.md"
    for link in links:
        text = page.read_text(encoding="utf-8")
        assert f"]({link})" in text or link.startswith("#"), f"{page.name} has no link to {link}"
        path, _, anchor = link.partition("#")
        page = (page.parent / path).resolve() if path else page
        landing = page.read_text(encoding="utf-8")
        if anchor:
            heading = anchor.replace("-", "[ -]")
            begin = re.search(rf"^#+ {heading}$", landing, flags=re.MULTILINE | re.IGNORECASE)
            assert begin is not None, link
            landing = landing[begin.start() :]
    assert answer in landing, question
    assert len(landing[: landing.index(answer)].split()) <= 300, "half a minute of reading"


def test_the_first_questions_of_the_faq_are_these_ten() -> None:
    asked = re.findall(r"^\*\*(.+?)\*\*", (DOCS / "faq.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(asked[:10]) == len(PATHS)
    assert asked[0] == "Which method?"


def test_a_page_that_is_read_fetches_nothing() -> None:
    assert CONFIG["theme"]["font"] is False
    (shim,) = CONFIG["extra"]["polyfills"]
    assert "iframe-worker" in shim, "else the plugin offline names one in the network, and searches from a folder fail"
    assert (DOCS / shim).exists()


# Words.

STRANGE = {
    r"\bbe it\b|, be the\b": "name both cases",
    r"\bboth is\b": "both are",
    r"\bhundredths? (longer|of)\b": "percent",
    r"\bin the open\b": "not hidden behind computation",
    r"\bto the letter\b": "unchanged",
    r"\bwho came when\b": "the order in which workers arrive",
    r"\b(is|are|was) told of (every|each|all)\b": "is given",
    r"\bmessages? of half a step\b": "an exchange that takes half a step",
    r"\b[Ww]rapped is\b|\b[Cc]ompared are\b|\b[Cc]laimed is\b|^Not noticed\b": "begin with the subject",
    r"\bhub\b|\bports? of a worker\b": "slot, host process",
    r"\bprobe[sd]?\b.*\bcarrier\b": "say what is tried",
    r"\bfor all I know\b|\bsimply\b|\bjust\b(?! (read|ending))|\bobviously\b|\bof course\b": "leave it out",
    r"\b(TODO|FIXME|XXX)\b": "do it",
}


def _sentences(text: str) -> Iterator[str]:
    """Sentences of the running text: no code, no rows of tables, no headings."""
    text = re.sub(r"^\|.*$|^#+ .*$|^===.*$|^<.*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "x", text))
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.MULTILINE):
        yield from (s for s in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split())) if s)


PROSE = ["README.md", *(f"docs/{page}" for page in WRITTEN)]


@pytest.mark.parametrize("page", PROSE)
def test_sentences_are_short(page: str) -> None:
    long = [s for s in _sentences(_text(page)) if len(s.split()) > 40]
    assert long == []


@pytest.mark.parametrize("page", PROSE)
def test_words_are_those_of_the_field(page: str) -> None:
    found = [(m[0], mend) for word, mend in STRANGE.items() for m in re.finditer(word, _text(page), flags=re.MULTILINE)]
    assert found == []


@pytest.mark.parametrize("name", ob.STRATEGIES)
def test_a_card_has_short_sentences_and_words_of_the_field(name: str) -> None:
    text = ob.STRATEGIES[name].text.replace("``", "`")
    assert [s for s in _sentences(text) if len(s.split()) > 40] == []
    assert [word for word in STRANGE if re.search(word, text, flags=re.MULTILINE)] == []


def test_a_strange_word_and_a_long_sentence_are_found() -> None:
    assert list(_sentences("# A title\n\nOne clause. Another:\n\n- a [link](x.md) to `code`\n| a | row |")) == [
        "One clause.", "Another:", "a link to x",
    ]  # fmt: skip
    assert any(re.search(word, "the dead one, be it rank 0") for word in STRANGE)


# Formats.


def test_the_page_of_formats_names_what_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task, steps = ["--task", "regression", "--workers", "2"], ["--steps", "3"]
    assert main(["simulate", "eager", *task, *steps, "--json", "run.json", "--report", "folder"]) == 0
    ob.simulate("eager", ob.tasks.regression(), 2, 3, record="order")
    model = torch.nn.Linear(2, 1)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, checkpoint="saved", every_s=0.001) as optimizer:
        while not list(Path("saved").glob("checkpoint-*")):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    checkpoint = sorted(Path("saved").glob("checkpoint-*"))[-1]
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    results = json.loads(Path("run.json").read_text())
    story = json.loads(Path("folder/run.json").read_text())
    order = json.loads(Path("order/order-0.json").read_text())
    trace = [json.loads(line) for line in Path("folder", *story["traces"]).read_text().splitlines()]
    names = {*results, *results["runs"][0], *story, *trace[0], *order, *order["run"], *manifest}
    names |= {*torch.load(checkpoint / "state.pt", weights_only=True), *(path.name for path in checkpoint.iterdir())}
    page = (DOCS / "formats.md").read_text(encoding="utf-8")
    assert {name for name in names if f"`{name}`" not in page} == set()
    assert {line[0] for line in trace[1:]} <= set(re.findall(r'^\| `\["(\w+)"', page, flags=re.MULTILINE))
    for name, number in (("run.json", story), ("order-RANK.json", order), ("manifest.json", manifest)):
        assert re.search(rf"`{re.escape(name)}`[^|\n]*(?:\|[^|\n]*)?`format` \({number['format']}\)", page), name
