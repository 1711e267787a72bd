"""The line between public and private: what users can meet is in ``offbeat``, and ``offbeat`` is in the reference."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import offbeat as ob
import offbeat.method

SRC = Path(ob.__file__).parent
ROOT = SRC.parent.parent


def _exceptions() -> Iterator[type[BaseException]]:
    """Every exception and warning that a file of ours defines, private ones apart."""
    for file in sorted(SRC.rglob("*.py")):
        names = [
            node.name
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ClassDef)
        ]
        if not names or file.name == "__main__.py":
            continue
        parts = file.relative_to(SRC.parent).with_suffix("").parts
        module = importlib.import_module(".".join(p for p in parts if p != "__init__"))
        for name in names:
            thing = getattr(module, name, None)
            if isinstance(thing, type) and issubclass(thing, BaseException) and not name.startswith("_"):
                yield thing


EXCEPTIONS = list(_exceptions())


def test_there_are_exceptions_to_look_at() -> None:
    assert {"OffbeatError", "PeerFailed", "ConfigMismatch", "Deadlock"} <= {error.__name__ for error in EXCEPTIONS}


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda e: e.__name__)
def test_every_exception_can_be_caught_by_a_public_name(error: type[BaseException]) -> None:
    assert error.__name__ in ob.__all__
    assert getattr(ob, error.__name__) is error


def test_an_attached_optimizer_says_which_worker_it_is() -> None:
    model = torch.nn.Linear(2, 1)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.allreduce()) as optimizer:
        assert (optimizer.rank, optimizer.size) == (0, 1)
    assert (optimizer.rank, optimizer.size) == (0, 1), "also when the run is over"
    assert isinstance(optimizer.summary(), ob.Summary)


def test_a_simulated_run_says_who_was_slow_if_it_kept_its_timeline() -> None:
    late = ob.delays.chronic(rank=2, seconds=0.3)
    run = ob.simulate(ob.allreduce(), None, workers=3, steps=20, delays=late, spans=True)
    assert "rank 2" in run.summary().lower()
    with pytest.raises(ValueError, match="simulate with spans=True"):
        ob.simulate(ob.allreduce(), None, workers=3, steps=20, delays=late).summary()


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ob.__all__)
def test_every_public_name_stands_on_a_page_of_the_reference(name: str, reference: ModuleType) -> None:
    assert f"ob.{name}" in reference.index()
    pages = {page.file: reference.page(page) for page in reference.PAGES}
    if name != "__version__":
        assert f"ob.{name}" in pages[reference.documented()[name]]


def test_a_name_without_a_page_stops_the_build(reference: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ob, "__all__", [*ob.__all__, "surprise"])
    with pytest.raises(ValueError, match="offbeat exports surprise; name a page for it"):
        reference.index()


def test_every_page_of_the_reference_is_in_the_menu(reference: ModuleType) -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.file for page in reference.PAGES if f"reference/{page.file}.md" not in menu] == []


def test_the_page_for_those_who_write_methods_follows_what_offbeat_method_exports(
    reference: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (page,) = (page for page in reference.PAGES if page.file == "method")
    monkeypatch.setattr(offbeat.method, "__all__", ["Grad", "whole"])
    text = reference.page(page)
    assert "::: offbeat.method.Grad" in text
    assert "heading: offbeat.method.whole" in text


def test_a_module_that_lists_no_exports_has_those_it_defines(reference: ModuleType) -> None:
    names = set(reference.public(ob.delays))
    assert {"random", "total", "parse", "Seconds", "Distribution"} <= names
    assert not {"math", "draw", "dataclass", "Callable"} & names
