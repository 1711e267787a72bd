"""Settings for all tests: one thread each, and the same examples at every run in CI."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

import pytest
import torch
from hypothesis import settings

from tests.support.scenarios import Told, told_of

torch.set_num_threads(1)
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Told:
    """What the scenarios of a module returned, rank by rank."""
    return told_of(request.module)
