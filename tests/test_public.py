"""The line between public and private: what users can meet is in ``offbeat``, and ``offbeat`` is in the reference."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import offbeat as ob

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
