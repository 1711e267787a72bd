"""What the reference says of errors, environment variables and commands is read from the source."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def from_code() -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_code", ROOT / "tools" / "from_code.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["from_code"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def test_an_error_stands_there_with_its_cause_and_its_way_out(from_code: ModuleType) -> None:
    page = from_code.errors_page()
    assert (
        "| rank … was started with WORLD\\_SIZE=…, rank … with WORLD\\_SIZE=… | start all processes of a job with the "
        "same one | `ConfigMismatch` |"
    ) in page
    assert (
        "| the host process has ended, and with it the memory of this host's workers | begin again from a checkpoint | "
        "`PeerFailed` |"
    ) in page
    assert "| … is …, | must be" not in page
    assert "| must be a whole number of at least … | `ValueError` |" in page


def test_an_exception_has_a_way_out_for_sentences_without_one(from_code: ModuleType) -> None:
    assert from_code.KINDS.keys() == from_code.OURS | from_code.USUAL
    assert all(way_out for _, way_out in from_code.KINDS.values())


def test_an_error_that_is_added_to_the_source_is_on_the_page(from_code: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "sim"
    folder.mkdir()
    text = 'FEW = "too few"\n\ndef f(n):\n    raise ValueError(f"{n} wheels are {FEW} " + f"for {n}; use four")\n'
    (folder / "cars.py").write_text(text, encoding="utf-8")
    (one,) = from_code.errors(tmp_path)
    assert (one.kind, one.cause, one.way_out) == ("ValueError", "… wheels are too few for …", "use four")
    assert "| … wheels are too few for … | use four | `ValueError` |" in from_code.errors_page(tmp_path)


def test_an_error_of_a_new_room_stops_the_build(from_code: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "attic.py").write_text('raise OffbeatError("nobody lives up here; go down")\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"attic\.py: name a section for its errors"):
        from_code.errors_page(tmp_path)


def test_every_variable_that_the_source_reads_is_described_and_no_other(from_code: ModuleType) -> None:
    assert from_code.variables() == from_code.VARIABLES.keys()


def test_a_variable_without_a_description_stops_the_build(from_code: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text('import os\n\nos.environ.get("OFFBEAT_NEW", "")\n', encoding="utf-8")
    with pytest.raises(ValueError, match="the source reads OFFBEAT_NEW; describe it"):
        from_code.environment_page(tmp_path)


def test_the_command_line_has_every_command_and_its_options(from_code: ModuleType) -> None:
    page = from_code.command_line_page()
    for words in ("## offbeat launch", "`--min-workers N`", "## offbeat status", "`--stack RANK`", "`SCRIPT`"):
        assert words in page


@pytest.mark.parametrize("name", ["errors", "environment", "command-line"])
def test_each_of_the_pages_is_in_the_menu(name: str) -> None:
    assert f"reference/{name}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
