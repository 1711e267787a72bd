"""What an attached optimiser tells about its run: to a log while it goes, in times and words at its end."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.live.attached import stats
from tests.support import forge
from tests.support.forge import Job

LATE_S = 0.25  # far more than a busy machine makes anybody late


class Recorder:
    def __init__(self) -> None:
        self.heard: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.heard.append((tag, value, step))


def train(rank: int, strategy: ob.Strategy, steps: int, late_rank: int, log: Any = None) -> ob.live.Summary:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = ob.attach(inner, model, strategy, steps=steps, log=log)
    for _ in range(steps):
        time.sleep(LATE_S if rank == late_rank else LATE_S / 10)  # else one may have ended before the other begins
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    optimizer.finish()
    return optimizer.summary()


def train_and_log(rank: int) -> tuple[list[tuple[str, float, int]], ob.live.Summary]:
    log = Recorder()
    summary = train(rank, ob.adaptive(period=2), 6, late_rank=0, log=log)
    return log.heard, summary


@pytest.mark.live
def test_after_finish_every_worker_knows_who_was_slow() -> None:
    (outcomes,) = forge.run([Job(train, 2, (ob.allreduce(), 12, 1))])
    summaries = forge.values(outcomes)
    assert (summaries[0].sentences, summaries[0].ranks) == (summaries[1].sentences, summaries[1].ranks)
    assert summaries[0].verdict.startswith("Rank 1 is chronically slow (late in 11 of 11 steps")
    assert summaries[0].wait_s > summaries[1].wait_s
    assert (summaries[1].rank, summaries[1].workers, summaries[1].steps) == (1, 2, 12)
    assert summaries[1].busy_s > 12 * LATE_S  # what it slept
    quick, slow = summaries[0].ranks
    assert (slow.rank, slow.steps, slow.wire_bytes) == (1, 12, summaries[1].wire_bytes)
    assert (slow.late_steps, slow.compared_steps, quick.late_steps, quick.waited_for_s) == (11, 11, 0, 0.0)
    assert slow.busy_s > 11 * LATE_S
    assert slow.late_by_s is not None
    assert slow.late_by_s > LATE_S / 2
    assert slow.waited_for_s == pytest.approx(quick.wait_s, rel=0.2)


@pytest.mark.live
def test_after_finish_every_worker_knows_how_self_clocked_talked_and_whom_it_did_not_wait_for() -> None:
    (outcomes,) = forge.run([Job(train, 2, (ob.self_clocked(period=2), 12, 1))])
    first, second = forge.values(outcomes)
    assert first.sentences == second.sentences
    talked = re.search(r"They talked (\d+) times, once in ([\d.]+) steps", str(first))
    assert talked is not None, str(first)
    assert 2 <= int(talked[1]) <= 12  # six times each, if every exchange was through
    assert re.search(r"took what was [\d.]+ rounds old on average, \d+ at most", str(first))
    assert re.search(r"step by step they would have waited .* 100% of it for rank 1", str(first))


def train_long(rank: int, strategy: ob.Strategy) -> ob.live.Summary:
    stats.KEPT = 4
    return train(rank, strategy, 24, late_rank=1)


@pytest.mark.live
def test_of_a_long_run_the_steps_and_the_waiting_that_are_told_of_are_the_same_last_ones() -> None:
    in_step, clocked = forge.run([Job(train_long, 2, (s,)) for s in (ob.allreduce(), ob.self_clocked(period=2))])
    talked = re.search(r"once in ([\d.]+) steps", str(forge.values(clocked)[0]))
    assert talked is not None
    assert float(talked[1]) >= 2, "how often they talked is told of all steps"
    summary = forge.values(in_step)[0]
    told = re.search(r"who was late, is about steps (\d+) to 23 alone", str(summary))
    assert told is not None, str(summary)
    compared = 24 - int(told[1])
    assert 4 <= compared < 8
    assert re.match(rf"Rank 1 is chronically slow \(late in {compared} of {compared} steps, by", summary.verdict)
    share = re.search(r"the others waited .* for it, (\d+)% of the time", summary.verdict)
    assert share is not None, summary.verdict
    assert 0 < int(share[1]) <= 50  # one of two computes at any time
    assert summary.ranks[1].busy_s > 23 * LATE_S, "rows are about all steps"


def trained_then_traced(rank: int) -> ob.delays.Table:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.01), model, ob.local_sgd(2))
    for _ in range(5):
        time.sleep(LATE_S if rank == 1 else LATE_S / 10)
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    with pytest.raises(ValueError, match=r"optimiser has no times of rank 0; all times are known after finish\(\)"):
        ob.delays.trace(optimizer)
    optimizer.finish()
    return ob.delays.trace(optimizer)


@pytest.mark.live
def test_after_finish_the_steps_of_all_can_be_simulated_again() -> None:
    (outcomes,) = forge.run([Job(trained_then_traced, 2)])
    first, second = forge.values(outcomes)
    assert first == second
    assert str(first) == "a trace of 4 steps of 2 ranks"  # the first step holds what was done before the loop
    assert all(row[1] > LATE_S for row in first.table)
    run = ob.simulate(ob.allreduce(), None, workers=2, steps=4, compute_s=first)
    assert run.seconds >= 4 * LATE_S


def test_one_worker_alone_knows_its_times_at_once() -> None:
    model = nn.Linear(2, 1)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.allreduce()) as optimizer:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert len(ob.delays.trace(optimizer).table) == 2


@pytest.mark.live
def test_a_log_hears_of_every_step() -> None:
    (outcomes,) = forge.run([Job(train_and_log, 2)])
    (heard, summary), _ = forge.values(outcomes)
    seen: dict[str, list[float]] = {}
    for tag, value, step in heard:
        assert step == len(seen.setdefault(tag, []))
        seen[tag].append(value)
    assert sorted(seen) == ["offbeat/period", "offbeat/sent_bytes", "offbeat/step_s", "offbeat/wait_s"]
    assert seen["offbeat/period"][:2] == [2, 2]
    assert [sent > 0 for sent in seen["offbeat/sent_bytes"]] == [False, True, False, True, False, True]
    assert sum(seen["offbeat/sent_bytes"]) == summary.wire_bytes
    assert sum(seen["offbeat/step_s"]) == pytest.approx(summary.busy_s + sum(seen["offbeat/wait_s"]))


def test_one_worker_alone_has_a_summary_and_logs_to_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        summary = train(0, ob.local_sgd(), 3, late_rank=1, log=writer)
    assert summary.verdict == "One worker alone waits for nobody."
    assert [row.steps for row in summary.ranks] == [3]
    assert summary.steps == 3
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("offbeat/step_s")] == [0, 1, 2]


def test_something_that_cannot_be_logged_to_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="log is a PosixPath, which has no add_scalar; use a SummaryWriter"):
        ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.allreduce(), log=Path())  # type: ignore[arg-type]


def test_before_finish_the_summary_is_the_workers_own() -> None:
    model = nn.Linear(2, 1)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.allreduce()) as optimizer:
        assert optimizer.summary().steps == 0
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert optimizer.summary().steps == 1
