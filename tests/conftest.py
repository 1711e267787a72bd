"""Settings for all tests: one thread each, and the same examples at every run in CI."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

import pytest
import torch
from hypothesis import settings

from tests.support.long import LONG, unless_long
from tests.support.scenarios import Told, told_of

# Files that take longest begin first: side by side, one that begins last is waited for by all.
LONGEST = [
    "test_ray.py", "test_demo.py", "test_replay_live.py", "test_recipes.py", "test_deaths.py", "test_twins.py",
    "test_resume_rounds.py", "test_launch.py", "test_installed.py", "test_failures.py", "test_rounds.py",
    "test_stopped.py", "test_left_behind.py",
]  # fmt: skip

torch.set_num_threads(1)
settings.register_profile("here", deadline=None, max_examples=unless_long(50, 500))
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") and not LONG else "here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not LONG and item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Told:
    """What the scenarios of a module returned, rank by rank."""
    return told_of(request.module)
