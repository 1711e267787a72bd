"""Pictures that are made from runs are what the runs give now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
assert SPEC is not None
assert SPEC.loader is not None
pictures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pictures)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_its_run_gives(name: str) -> None:
    there = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
    assert there == pictures.PICTURES[name](), "run: make readme"
