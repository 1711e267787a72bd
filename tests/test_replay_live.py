"""A live run can be replayed: the order that decided it, followed in virtual time, ends with its weights."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import forge
import pytest
import torch
from forge import Job

import offbeat as ob

pytestmark = pytest.mark.live

STEPS = 10
NODES = {"eager, in nodes", "wagma, in nodes"}
CASES: dict[str, ob.Strategy] = {
    "eager": ob.eager(),
    "eager, majority": ob.eager("majority", sync_every=5),
    "eager, quorum and bound": ob.eager(0.5, sync="bounded", staleness=3),
    "eager, late": ob.eager(late=1),
    "eager, late and bounded": ob.eager(late=1, sync="bounded", staleness=4),
    "eager, drop": ob.eager(stale="drop"),
    "eager, fade": ob.eager(stale="fade"),
    "eager, latest": ob.eager(apply="latest"),
    "eager, every step": ob.eager(catch_up="every_step"),
    "eager, everyone": ob.eager("everyone"),
    "eager, coded": ob.eager(codec=ob.codec.qsgd(8)),
    "eager, in nodes": ob.eager(per_node=2),
    "wagma": ob.wagma(),
    "wagma, tau 3": ob.wagma(tau=3),
    "wagma, correct": ob.wagma(merge="correct"),
    "wagma, late": ob.wagma(late=1),
    "wagma, every step": ob.wagma(catch_up="every_step"),
    "wagma, bounded": ob.wagma(sync="bounded", staleness=3),
    "wagma, coded": ob.wagma(codec=ob.codec.qsgd(8)),
    "wagma, in nodes": ob.wagma(per_node=2),
    "ad_psgd": ob.ad_psgd(),
    "ad_psgd, ring": ob.ad_psgd("ring"),
    "nonblocking": ob.nonblocking(4),
    "nonblocking, auto": ob.nonblocking("auto", stop="auto"),
    "nonblocking, server": ob.nonblocking(4, over="server"),
    "nonblocking, ring": ob.nonblocking(4, over="ring"),
    "nonblocking, matcha": ob.nonblocking(4, over="matcha"),
    "nonblocking, coded": ob.nonblocking(4, codec=ob.codec.qsgd(8)),
    "allreduce": ob.allreduce(),
    "qsgd": ob.qsgd(),
    "sgp": ob.sgp(),
    "dpsgd": ob.dpsgd(),
    "matcha": ob.matcha(),
    "noloco": ob.noloco(3),
    "local_sgd": ob.local_sgd(3),
    "adaptive": ob.adaptive(2, sampling=4),
    "dasgd": ob.dasgd(3, delay=2),
    "diloco": ob.diloco(4, fragments=2, overlap=1),
}
# How many batches each worker has, how long it takes for some of its steps, and whether all average in the middle.
RUNS: dict[str, tuple[tuple[int, ...], bool, bool]] = {
    "two": ((STEPS, STEPS), False, False),
    "two, late": ((STEPS, STEPS), True, False),
    "three, uneven": ((4, STEPS, 0), False, False),
    "four, late": ((STEPS,) * 4, True, False),
    "four, late and averaged": ((STEPS,) * 4, True, True),
    "four, late and uneven": ((STEPS, 3, STEPS, 7), True, True),
    "five, late and uneven": ((STEPS, 2, 9, STEPS, 5), True, False),
}


def task() -> ob.Task:
    return ob.tasks.digits(batch=8, hidden=12, momentum=0.9, lr=0.05, dtype=torch.float64)


def fits(name: str, run: str) -> bool:
    batches, _, averages = RUNS[run]
    return name not in NODES or (len(batches) % 2 == 0 and not averages)


def train(rank: int, names: list[str], run: str, folder: str) -> dict[str, torch.Tensor]:
    ob.init()
    held = ob.attach(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), torch.nn.Linear(1, 1), ob.allreduce())
    (batches, late, averages), out = RUNS[run], {}
    for name in names:
        work, strategy = task(), CASES[name]
        model = work.build(0)
        inner = work.optimizer(list(model.parameters()))
        record = Path(folder, run, name)
        optimizer = ob.attach(inner, model, strategy, steps=STEPS, patience_s=120, record=record)
        own = [work.take(rank, t) for t in range(batches[rank])]
        cut = strategy.name == "nonblocking"
        for step, batch in enumerate(optimizer.batches(own) if cut else own):
            if averages and step in (2, 5):
                optimizer.average()
            if late and (rank * 7 + step * 5) % 4 == 0:
                time.sleep(0.004)
            optimizer.zero_grad()
            if cut:
                for piece in optimizer.micro_batches(batch):
                    if late and rank == 1:
                        time.sleep(0.002)
                    work.value(model, piece).backward()
            else:
                work.value(model, batch).backward()
            optimizer.step()
        optimizer.finish()
        out[name] = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    held.finish()
    return out


@pytest.fixture(scope="module")
def live() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job(__name__, "train", len(RUNS[run][0]), ([n for n in CASES if fits(n, run)], run, folder)) for run in RUNS
        ]
        yield Path(folder), {run: forge.values(one) for run, one in zip(RUNS, forge.run(jobs), strict=True)}


def test_every_method_is_in_the_table() -> None:
    assert {strategy.name for strategy in CASES.values()} == set(ob.STRATEGIES)


@pytest.mark.parametrize(("name", "run"), [(n, r) for r in RUNS for n in CASES if fits(n, r)])
def test_a_replayed_run_ends_with_the_weights_of_the_live_one(live: Any, name: str, run: str) -> None:
    folder, ended = live
    replayed = ob.replay(folder / run / name, task())
    assert (replayed.final - ended[run][0][name]).abs().max() < 1e-9
