"""WAGMA with a tray that follows the rounds: whoever is late, no step is lost from the mean."""

from __future__ import annotations

import pytest
import torch

import offbeat as ob


def _pull(rank: int, step: int) -> torch.Tensor:
    return torch.randn(1, 3, generator=torch.Generator().manual_seed(97 * rank + step), dtype=torch.float64)


TASK = ob.Task(
    model=lambda: torch.nn.Linear(3, 1, bias=False, dtype=torch.float64),
    loss=lambda output, _: -output.sum(),  # the gradient is −x, whatever the weights are
    batch=lambda rank, step: (_pull(rank, step), torch.zeros(1, 1)),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
)


def _lost(merge: str, late: int, seed: int) -> float:
    """How far the mean of all weights ends from the beginning plus the mean of all steps."""
    strategy = ob.wagma(merge=merge, late=late, tau=None)  # type: ignore[arg-type]
    delays = ob.delays.stalls(0.3, 0.35)
    run = ob.simulate(strategy, TASK, workers=6, steps=12, seed=seed, delays=delays)
    start = torch.nn.utils.parameters_to_vector(TASK.build(seed).parameters()).detach()
    steps = sum(_pull(rank, step) for rank in range(6) for step in range(12))
    assert isinstance(steps, torch.Tensor)
    return float((run.final - start - 0.1 * steps.flatten() / 6).abs().max())


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_mean_keeps_every_step_whoever_is_late(late: int, seed: int) -> None:
    assert _lost("correct", late, seed) < 1e-12


def test_the_papers_merge_loses_some_of_the_steps_of_late_workers() -> None:
    assert _lost("paper", 0, 0) > 1e-3
