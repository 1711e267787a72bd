"""A trainer that is missing or too old gets a sentence, and nothing of it is imported before it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import offbeat as ob
from offbeat.integrations import needs
from tests.support.fitting import SCRIPTS

TRAINERS = ("lightning", "transformers", "accelerate", "ray")


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """The trainers that are there when all integrations have been imported, and nothing was used."""
    script = f"import sys, {', '.join(f'offbeat.integrations.{name}' for name in TRAINERS)}; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("name", TRAINERS)
def test_an_integration_imports_its_trainer_only_when_it_is_used(name: str, imported: list[str]) -> None:
    assert f"offbeat.integrations.{name}" in imported
    assert name not in imported


def test_every_trainer_has_a_script_on_the_page_and_a_loop_of_ones_own() -> None:
    assert sorted(SCRIPTS) == sorted([*TRAINERS, "torchrun"])


def test_a_missing_trainer_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from offbeat.integrations.lightning import OffbeatStrategy

    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(needs, "version", version)
    with pytest.raises(
        ImportError, match=r"needs lightning 2\.\d or newer, which is not installed; pip install 'offbe"
    ):
        OffbeatStrategy(ob.wagma(), package="lightning")


def test_a_trainer_that_is_too_old_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "version", lambda package: "1.9.5")
    with pytest.raises(
        ImportError, match=r"offbeat.integrations.lightning needs lightning 2.0 or newer, not 1.9.5; pip"
    ):
        needs.needed("lightning", "2.0", "lightning")
    monkeypatch.setattr(needs, "version", lambda package: "2.10.0.post1")
    needs.needed("lightning", "2.9", "lightning")
