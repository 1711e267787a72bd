"""The documentation is true: its code runs, commands print what it shows, its table is the cards', its links lead."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import offbeat as ob
from offbeat.cli import main
from tests.support import forge
from tests.support.forge import Job

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LIVE = ("train", "demo", "reproduce", "launch")
JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
TITLED = r'^```python title="(\w+\.py)"\n(.*?)^```$'
Ran = Callable[[str], Path]


# Weights & Biases and MLflow bring some forty packages each. These stand in for them: the calls that the documentation
# makes, with the names of their arguments and the rules for them, as the real ones have them.
STAND_INS = {
    "wandb": """
        import contextlib, json

        steps = None

        @contextlib.contextmanager
        def init(*, project):
            global steps
            steps = [0]
            yield

        def log(data, step=None, commit=None):
            if steps is None:
                raise RuntimeError("You must call wandb.init() before wandb.log()")
            if step is None or step < steps[-1]:
                raise RuntimeError(f"a value of step {step} is lost after one of step {steps[-1]}")
            steps.append(step)
            with open("wandb.heard", "a") as file:
                file.writelines(json.dumps([tag, value, step]) + "\\n" for tag, value in data.items())
        """,
    "mlflow": """
        import contextlib, json

        @contextlib.contextmanager
        def start_run(*, run_name=None):
            yield

        def log_metric(key, value, step=None, synchronous=None, timestamp=None, run_id=None):
            with open("mlflow.heard", "a") as file:
                file.write(json.dumps([key, float(value), step]) + "\\n")
        """,
}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


def _blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; a fence may be indented, as inside a list or a tab, and its lines with it."""
    found: list[Block] = []
    fence = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        match = re.match(r"\s*```(.*)$", line)
        if fence is None and match:
            fence = (number, (match[1].split() or [""])[0], list[str]())
        elif fence is not None and match:
            text = textwrap.dedent("\n".join(fence[2]) + "\n")
            found.append(Block(str(page.relative_to(ROOT)), fence[0], fence[1], text))
            fence = None
        elif fence is not None:
            fence[2].append(line)
    assert fence is None, f"{page} ends inside a block"
    return found


BLOCKS = [block for page in PAGES for block in _blocks(page)]
PYTHON = {page: [b for b in BLOCKS if b.language == "python" and b.page == page] for page in {b.page for b in BLOCKS}}


class Shown(NamedTuple):
    """A command of a console block, and the lines that stand under it."""

    where: str
    words: list[str]
    output: list[str]


def _commands() -> list[Shown]:
    found: list[Shown] = []
    for block in BLOCKS:
        if block.language == "console":
            for line in block.text.splitlines():
                if line.startswith("$ "):
                    found.append(Shown(f"{block.page}:{block.line}", shlex.split(line[2:]), []))
                else:
                    found[-1].output.append(line)
    return found


OURS = [shown for shown in _commands() if shown.words[0] == "offbeat"]
STARTING = sorted({s.where for s in OURS if s.words[1] in LIVE or "--live" in s.words})  # blocks
QUICK = [s for s in OURS if s.where not in STARTING]


def _are_scripts(page: str) -> bool:
    """Whether each block of a page has a name: scripts, which tests/integrations/ and test_recipes.py run as jobs."""
    fences = re.findall(r"^\s*```python(.*)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return all("title=" in fence for fence in fences)


SCRIPTS = {page for page, blocks in PYTHON.items() if blocks and _are_scripts(page)}


@pytest.mark.parametrize("page", sorted(page for page, blocks in PYTHON.items() if blocks and page not in SCRIPTS))
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str, ran: Ran) -> None:
    ran(page)


@pytest.mark.parametrize("package", STAND_INS)
def test_the_logs_that_the_documentation_shows_tell_of_every_step(package: str, ran: Ran) -> None:
    heard = [json.loads(line) for line in (ran("docs/monitor.md") / f"{package}.heard").read_text().splitlines()]
    for tag in ("offbeat/step_s", "offbeat/wait_s", "offbeat/sent_bytes", "offbeat/period"):
        assert [step for name, _, step in heard if name == tag] == list(range(20))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs the code of a page, once; the folder in which it ran."""

    @functools.cache
    def ran(page: str) -> Path:
        folder = tmp_path_factory.mktemp("page")
        for name, text in STAND_INS.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        # Each block starts at its own line, so that an error names the line of the page.
        padded = ["\n" * block.line + block.text for block in PYTHON[page]]
        source = "".join(f"exec(compile({text!r}, {page!r}, 'exec'))\n" for text in padded)
        (folder / "page.py").write_text(source, encoding="utf-8")
        (outcomes,) = forge.run([Job(_as_a_script, 1, (str(folder),))])
        forge.values(outcomes)
        return folder

    return ran


def _as_a_script(rank: int, folder: str) -> None:
    """As a user would, but in a process that has imported torch before; warnings are errors there."""
    for name in JOB:
        os.environ.pop(name, None)
    os.chdir(folder)
    sys.path.insert(0, folder)
    runpy.run_path("page.py", run_name="__main__")


@pytest.mark.parametrize("where", sorted({shown.where for shown in QUICK}))
def test_the_commands_of_a_block_print_what_it_shows(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for shown in QUICK:
        if shown.where != where:
            continue
        assert main(shown.words[1:]) == 0
        printed = capsys.readouterr().out.splitlines()
        if shown.output:
            for there, here in zip(shown.output, printed, strict=True):
                assert _alike(there, here), f"{where} shows\n{there}\nand now it is\n{here}"


def test_numbers_are_alike_within_a_percent_and_words_if_they_are_equal() -> None:
    assert _alike("eager 15.4 s 2.61× 91.9%", "eager  15.41 s  2.60×  92.2%")
    assert not _alike("eager 15.4 s", "eager 15.9 s")
    assert not _alike("eager 15.4 s", "wagma 15.4 s")
    assert not _alike("eager 15.4 s", "eager 15.4 s –")


def _alike(there: str, here: str) -> bool:
    """The last digits of a loss may differ from one processor to another."""
    number = re.compile(r"\d+(?:\.\d+)?")
    if number.sub("#", there).split() != number.sub("#", here).split():
        return False
    pairs = zip(number.findall(there), number.findall(here), strict=True)
    return all(float(a) == pytest.approx(float(b), rel=0.01) for a, b in pairs)


@pytest.mark.live
@pytest.mark.parametrize("where", STARTING)
def test_the_commands_of_a_block_that_starts_processes_run(where: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PYTHON["docs/first-job.md"][0].text, encoding="utf-8")
    page = where.partition(":")[0]
    for name, text in re.findall(TITLED, (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for shown in OURS:
        if shown.where == where:
            _run([sys.executable, "-m", *shown.words], tmp_path)


@pytest.mark.live
def test_the_first_job_runs_with_two_processes(tmp_path: Path) -> None:
    first = PYTHON["docs/first-job.md"][0]
    (tmp_path / "train.py").write_text(first.text, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = _run([*torchrun, "train.py"], tmp_path)
    # Two processes may print into one line.
    assert sorted(re.findall(r"rank \d of 2", told)) == ["rank 0 of 2", "rank 1 of 2"]


def _run(command: list[str], folder: Path) -> str:
    """As a user would: not as a member of whatever job runs the tests."""
    env = {name: value for name, value in os.environ.items() if name not in JOB}
    done = subprocess.run(
        command, cwd=folder, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def cards() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cards", ROOT / "tools" / "cards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_methods_is_made_from_the_cards(cards: ModuleType) -> None:
    text = cards.OVERVIEW.read_text(encoding="utf-8")
    assert text == cards.overview(text), "the cards have changed; run: make readme"


def test_a_changed_card_changes_the_table_of_methods(cards: ModuleType) -> None:
    text = cards.OVERVIEW.read_text(encoding="utf-8")
    card = ob.STRATEGIES["wagma"]
    assert card.helps in text
    assert text != text.replace(card.helps, "nothing")
    assert cards.overview(text.replace(card.helps, "nothing")) == text


@pytest.mark.parametrize("name", ob.STRATEGIES)
def test_every_method_has_a_page_with_its_settings_and_laws(name: str, cards: ModuleType) -> None:
    page, paper, card = cards.page(name), ob.STRATEGIES[name].paper, ob.STRATEGIES[name]
    one_line = " ".join(page.split())
    assert all(part in one_line for part in (card.summary, card.helps, card.hurts, card.suggested))
    assert all(law in page for law in paper.laws)
    assert paper.bibtex() in page
    assert all(f"`{setting}`" in page for setting in ob.STRATEGIES[name].make().settings)
    assert f"methods/{name}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        # Made from the cards, the docstrings and the source when MkDocs builds, which checks these links itself.
        if page.is_relative_to(ROOT / "docs") and "reference/" in path:
            continue
        if page.parent == ROOT / "docs" and path.startswith("methods/") and path != "methods/index.md":
            assert Path(path).stem in ob.STRATEGIES, target
            continue
        assert file.exists(), f"{page.name} leads to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}, target
