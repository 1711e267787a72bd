"""Learning-rate schedules of simulated runs that end by what all have done: they go by the steps of the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import offbeat as ob

STEPS = 20
SLOW = ob.delays.chronic(1, 0.5)


def of_so_many_steps(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule that raises an error when it is stepped more often."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS, cycle_momentum=False)


TASK = replace(ob.tasks.regression(), scheduler=of_so_many_steps)


@pytest.mark.parametrize("method", [ob.self_clocked(), ob.eager(), ob.ad_psgd()], ids=str)
def test_a_worker_that_takes_more_steps_than_the_schedule_has_follows_the_job(method: ob.Method) -> None:
    run = ob.simulate(method, TASK, 2, samples=2 * STEPS, delays=SLOW)
    assert run.gradients[0] > STEPS > run.gradients[1]
    assert sum(run.gradients) == 2 * STEPS


def test_in_step_the_schedule_of_the_job_is_each_workers_own() -> None:
    shared = ob.simulate(ob.allreduce(), TASK, 3, delays=SLOW, samples=30)
    assert shared.hash == ob.simulate(ob.allreduce(), TASK, 3, delays=SLOW, steps=10).hash


def test_a_run_whose_schedule_follows_the_others_cannot_be_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ends by samples=40, and a replay does not know them; give steps="):
        ob.simulate(ob.eager(), TASK, 2, samples=40, record=tmp_path)
