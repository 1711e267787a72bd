"""Launches whose workers are forked from a process that has imported torch before, instead of importing it anew."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributed.launcher.api import LaunchConfig

from offbeat.live.job import launch


@contextmanager
def quick_launches() -> Iterator[None]:
    """For claims of what launched workers do, not of how they are started, or interrupted while they are."""
    multiprocessing.set_forkserver_preload(["torch", "offbeat", "offbeat.live.job.worker", "tests.support.imported"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "LaunchConfig", lambda **how: LaunchConfig(**how | {"start_method": "forkserver"}))
        yield
