"""How long the rounds of non-blocking SGD take, who is stopped in them, and that they end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat as ob
from tests.support.micro_witness import AT_ONCE, FORMS, LATE, TASK, close, column, witnessed


def test_a_round_lasts_one_batch_of_the_quick_and_one_micro_batch_of_the_slow_at_most() -> None:
    run = ob.simulate(
        ob.nonblocking(8), None, workers=4, steps=20, network=AT_ONCE, parameters=1,
        compute_s=lambda t, k: 0.45 if k == 2 else 0.1,
    )  # fmt: skip
    assert run.seconds <= 20 * (0.1 + 0.45 / 8) + 1e-9
    assert run.seconds >= 20 * 0.1


def test_delays_come_before_the_first_micro_batch_of_their_round() -> None:
    run = ob.simulate(
        ob.nonblocking(4), None, workers=2, steps=3, network=AT_ONCE, spans=True,
        delays=lambda t, k: 0.5 if (t, k) == (1, 0) else 0.0,
    )  # fmt: skip
    mine = [s for s in run.trace.spans if (s.rank, s.step) == (0, 1) and s.doing in ("delay", "compute")]
    assert [s.doing for s in mine] == ["delay", "compute"]
    assert mine[1].start_s == pytest.approx(mine[0].end_s) == pytest.approx(mine[0].start_s + 0.5)
    # Late by five batches, it does one micro-batch; the three others come first in the next round.
    others = [s for s in run.trace.spans if (s.rank, s.step, s.doing) == (1, 1, "compute")]
    assert len(others) == 4


def test_without_at_least_a_worker_that_slept_through_the_round_does_nothing_in_it() -> None:
    strategy, seen = witnessed(ob.nonblocking(4, at_least=0))
    late = lambda t, k: 0.5 if (t, k) == (1, 0) else 0.0  # noqa: E731
    ob.simulate(strategy, TASK, workers=3, steps=3, network=AT_ONCE, delays=late)
    assert [d.pieces for _, d, _ in seen.rounds[0]] == [4, 0, 4]
    assert [d.pieces for _, d, _ in seen.rounds[1]] == [4, 4, 4]


@pytest.mark.parametrize("task", [TASK, None], ids=["task", "time alone"])
def test_micro_auto_settles_where_the_slow_worker_does_16_and_the_others_keep_to_8(task: ob.Task) -> None:
    strategy, seen = witnessed(ob.nonblocking("auto")) if task else (ob.nonblocking("auto"), None)
    wide = dataclasses.replace(TASK, batch=lambda k, t: (torch.ones(64, 7).double(), torch.ones(64, 1).double()))
    run = ob.simulate(
        strategy, wide if task else None, workers=4, steps=60, network=AT_ONCE, spans=True, parameters=1,
        compute_s=lambda t, k: 0.4 if k == 0 else 0.1,
    )  # fmt: skip
    last = [s for s in run.trace.spans if s.step == 59 and s.doing == "compute"]
    if seen is not None:
        assert [effect.micro for _, _, effect in column(seen, 59)] == [64, 8, 8, 8]
    assert 16 <= sum(s.rank == 0 for s in last) <= 17 or task is None
    assert run.seconds < 60 * (0.1 + 0.4 / 16)


def test_a_learned_deadline_cuts_off_the_slow_and_follows_when_all_become_slower() -> None:
    def compute_s(t: int, k: int) -> float:
        return (0.4 if k == 0 else 0.1) * (1 if t < 20 else 3)

    strategy, seen = witnessed(ob.nonblocking(8, stop="auto"))
    ob.simulate(strategy, TASK, workers=4, steps=80, network=AT_ONCE, compute_s=compute_s)
    done = {r: [d.pieces for _, d, _ in column(seen, r)] for r in range(80)}
    assert done[0] == [8, 8, 8, 8]
    assert done[10] == [3, 8, 8, 8]
    assert done[79][1:] == [8, 8, 8], "all are three times slower by now, and the deadline should know"


@pytest.mark.parametrize("over", FORMS)
@pytest.mark.parametrize("ending", [{"steps": 7}, {"samples": 31}, {"seconds": 1.0}], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 5, 8])
def test_every_form_ends_whatever_ends_the_run(over: str, ending: dict[str, Any], workers: int) -> None:
    run = ob.simulate(ob.nonblocking(4, over), TASK, workers=workers, **ending, delays=ob.delays.Pareto(0.02, 1.2))
    assert torch.isfinite(run.final).all()
    if "steps" in ending:
        assert run.gradients == (7,) * workers
    if "samples" in ending:
        assert sum(run.gradients) == 31


@pytest.mark.parametrize("over", ["allreduce", "server", "ring", "matcha"])
def test_codecs_compose_and_still_learn(over: str) -> None:
    run = ob.simulate(ob.nonblocking(4, over, codec=ob.codec.qsgd(8)), TASK, workers=4, steps=60, delays=LATE)
    plain = ob.simulate(ob.nonblocking(4, over), TASK, workers=4, steps=60, delays=LATE)
    assert run.losses[-5:].mean() < 0.5 * run.losses[0]
    assert run.wire_bytes != plain.wire_bytes


def test_batch_norm_moves_on_with_every_micro_batch() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(8, 3, generator=generator).double(), torch.randn(8, 1, generator=generator).double()

    task = ob.Task(net, nn.functional.mse_loss, batch, lambda p: torch.optim.SGD(p, lr=0.1))
    run = ob.simulate(ob.nonblocking(4), task, workers=1, steps=3)
    model = task.build(0)
    optimizer = task.optimizer(list(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        for x, y in zip(*(part.split(2) for part in batch(0, step)), strict=True):
            (nn.functional.mse_loss(model(x), y) / 4).backward()
        optimizer.step()
    assert run.model is not None
    mine, theirs = dict(run.model.named_buffers()), dict(model.named_buffers())
    assert int(mine["1.num_batches_tracked"]) == 12
    close(mine["1.running_mean"], theirs["1.running_mean"])
    close(run.final, nn.utils.parameters_to_vector(model.parameters()).detach())


def test_a_bell_that_arrives_late_stops_neither_its_own_round_nor_the_next() -> None:
    strategy, seen = witnessed(ob.nonblocking(4))
    far = ob.Network(latency_s=0.5)  # the news of a round comes when everybody is through it
    ob.simulate(strategy, TASK, workers=2, steps=10, network=far, compute_s=lambda t, k: 0.1 + 0.1 * k)
    assert [d.pieces for rank in (0, 1) for _, d, _ in seen.rounds[rank]] == [4] * 20


def test_a_short_batch_behind_leftovers_may_end_a_round_early() -> None:
    """Rank 1 is stopped after three of four samples; the one that is left, and a batch of one, do not make four."""

    def batch(rank: int, step: int) -> tuple[Tensor, ...]:
        rows = 1 if (rank, step) == (1, 1) else 4
        return tuple(part[:rows] for part in TASK.batch(rank, step))

    seconds = {(0, 0): 0.1, (0, 1): 0.14, (1, 0): 5.0}
    how: dict[str, Any] = {"compute_s": lambda step, rank: seconds.get((step, rank), 0.1), "network": AT_ONCE}
    run = ob.simulate(ob.nonblocking(8), dataclasses.replace(TASK, batch=batch), 2, 2, **how)
    assert torch.isfinite(run.final).all()
    assert run.seconds < 5.0, "rank 1 is through, and rings"
