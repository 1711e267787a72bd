"""Checkpoints, and data that do not last equally long on all ranks."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.live.attached.attach_jobs import PATIENCE_S, distance, flat, loss, net, serial, sgd
from tests.support import forge
from tests.support.forge import Job, attempt
from tests.worlds.test_twins import CASES

pytestmark = pytest.mark.live

STEPS = 12
BATCHES = (10, 7, 0, 13)


def _scheduled(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(inner, 3, 0.8)


def _steps(rank: int, model: Any, optimizer: Any, scheduler: Any, begin: int, end: int) -> None:
    for t in range(begin, end):
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()
        scheduler.step()


def _round_trip(*objects: Any) -> list[Any]:
    file = io.BytesIO()
    torch.save(list(objects), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(rank: int) -> dict[tuple[str, int], tuple[Any, Any, bool]]:
    """Every strategy: without a break, and with one after ``stop`` steps."""
    ob.init()
    keep = ob.attach(sgd(other := net()), other, ob.allreduce())
    out = {}
    for name, strategy in CASES.items():
        model = net()
        inner = sgd(model)
        scheduler = _scheduled(inner)
        with ob.attach(inner, model, strategy, steps=STEPS, patience_s=PATIENCE_S) as optimizer:
            _steps(rank, model, optimizer, scheduler, 0, STEPS)
        whole = flat(model)
        for stop in (5, 7):
            first = net()
            inner = sgd(first)
            scheduler = _scheduled(inner)
            with ob.attach(inner, first, strategy, steps=STEPS, patience_s=PATIENCE_S) as optimizer:
                _steps(rank, first, optimizer, scheduler, 0, stop)
                saved = _round_trip(first.state_dict(), optimizer.state_dict(), scheduler.state_dict())
            second = net(seed=99)
            inner = sgd(second)
            scheduler = _scheduled(inner)
            with ob.attach(inner, second, strategy, steps=STEPS, patience_s=PATIENCE_S) as optimizer:
                second.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                scheduler.load_state_dict(saved[2])
                _steps(rank, second, optimizer, scheduler, stop, STEPS)
            in_flight = saved[1]["offbeat"]["memory"].get("sent") is not None
            out[name, stop] = whole, flat(second), in_flight
    keep.finish()
    return out


class Recorder:
    """A log that keeps the numbers of the steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if tag == "offbeat/step_s":
            self.steps.append(step)


def logged(rank: int) -> dict[str, list[list[int]]]:
    """The numbers of the steps that a log hears of: before a break, after it, and of a run that was never saved."""
    ob.init()
    keep = ob.attach(sgd(other := net()), other, ob.allreduce())
    out = {}
    for strategy in (ob.allreduce(), ob.local_sgd(period=2), ob.eager(), ob.ad_psgd()):
        model, logs, saved = net(), [Recorder(), Recorder(), Recorder()], None
        for log, steps in zip(logs, (3, 2, 1), strict=True):
            optimizer = ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S, log=log)
            if saved is not None:
                optimizer.load_state_dict(saved)
            _steps(rank, model, optimizer, _scheduled(optimizer.inner), 0, steps)
            optimizer.average()
            (saved,) = _round_trip(optimizer.state_dict()) if log is logs[0] else (None,)
            optimizer.finish()
        out[strategy.name] = [log.steps for log in logs]
    keep.finish()
    return out


def foreign_states(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.local_sgd(period=4))
    _steps(rank, model, optimizer, _scheduled(optimizer.inner), 0, 2)
    saved, plain = _round_trip(optimizer.state_dict(), optimizer.inner.state_dict())
    optimizer.finish()
    other = ob.attach(sgd(model), model, ob.local_sgd(period=8))
    said = attempt(lambda: other.load_state_dict(saved))
    untouched = not other.state
    known = [plain["state"][k]["momentum_buffer"].clone() for k in range(4)]
    other.load_state_dict(plain)
    momentum = [other.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    _steps(rank, model, other, _scheduled(other.inner), 0, 1)
    other.finish()
    return said, untouched and all(torch.equal(a, b) for a, b in zip(momentum, known, strict=True))


def uneven(rank: int) -> dict[str, tuple[Any, int]]:
    """Every strategy on ranks with 10, 7, 0 and 13 batches; two averages while some train and others are done."""
    ob.init()
    keep = ob.attach(sgd(other := net()), other, ob.allreduce())
    out = {}
    for name, strategy in {**CASES, "averaged": ob.local_sgd(period=3)}.items():
        model = net()
        with ob.attach(sgd(model, lr=0.05), model, strategy, patience_s=PATIENCE_S) as optimizer:
            for t in range(BATCHES[rank]):
                optimizer.zero_grad()
                loss(model, rank, t).backward()
                optimizer.step()
                if name == "averaged" and t == 8:  # ranks 0 and 3; 1 and 2 are done
                    optimizer.average()
        out[name] = flat(model), optimizer.me.t
    keep.finish()
    return out


def one_by_one(rank: int) -> list[bool]:
    """``ob.init`` made the default group: it ends with the last optimiser, and can be made again."""
    seen = []
    for _ in range(3):
        ob.init()
        model, other = net(), net(1)
        first, second = (ob.attach(sgd(m), m, ob.dpsgd()) for m in (model, other))
        _steps(rank, model, first, _scheduled(first.inner), 0, 2)
        first.finish()
        seen.append(torch.distributed.is_initialized())
        _steps(rank, other, second, _scheduled(second.inner), 0, 2)
        second.finish()
        seen.append(torch.distributed.is_initialized())
    return seen


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    plan = [
        Job(__name__, "resumed", 2),
        Job(__name__, "logged", 2),
        Job(__name__, "foreign_states", 2),
        Job(__name__, "uneven", 4),
        Job(__name__, "one_by_one", 2),
        Job(__name__, "one_by_one", 2, rank_0_hosts=True),
    ]
    names = ("resumed", "logged", "foreign_states", "uneven", "one_by_one", "one_by_one_hosted")
    return dict(zip(names, forge.run(plan), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_ends_with_the_bits_of_one_without_a_break(told: Any, name: str) -> None:
    for out in forge.values(told["resumed"]):
        for stop in (5, 7):
            whole, parts, _ = out[name, stop]
            assert torch.equal(whole, parts), f"stopped after {stop} steps: {distance(whole, parts)}"


@pytest.mark.parametrize("method", ["dasgd", "diloco"])
def test_some_of_the_resumed_runs_were_stopped_with_an_exchange_under_way(told: Any, method: str) -> None:
    for out in forge.values(told["resumed"]):
        assert any(in_flight for (name, _), (_, _, in_flight) in out.items() if CASES[name].name == method)


@pytest.mark.parametrize("method", ["allreduce", "local_sgd", "eager", "ad_psgd"])
def test_a_log_counts_on_from_the_step_where_a_state_was_saved(told: Any, method: str) -> None:
    for out in forge.values(told["logged"]):
        assert out[method] == [[0, 1, 2], [3, 4], [0]]


def test_a_state_of_another_strategy_is_refused_and_a_plain_one_is_loaded(told: Any) -> None:
    for said, same_momentum in forge.values(told["foreign_states"]):
        assert "local_sgd(period=4" in said
        assert "local_sgd(period=8" in said
        assert same_momentum


@pytest.mark.parametrize("name", [*CASES, "averaged"])
def test_with_uneven_data_nobody_hangs_and_all_end_equal(told: Any, name: str) -> None:
    outs = [out[name] for out in forge.values(told["uneven"])]
    assert all(torch.equal(weights, outs[0][0]) for weights, _ in outs)
    assert [steps for _, steps in outs] == [13] * 4


def test_allreduce_divides_by_those_who_still_have_data(told: Any) -> None:
    make: Callable[[Any], Any] = lambda model: sgd(model, lr=0.05)  # noqa: E731
    reference = serial(make, 13, ranks=lambda t: [r for r in range(4) if t < BATCHES[r]])
    for out in forge.values(told["uneven"]):
        assert distance(out["allreduce()"][0], reference) < 1e-13


@pytest.mark.parametrize("host", ["one_by_one", "one_by_one_hosted"])
def test_the_default_group_that_init_made_ends_with_the_last_optimizer(told: Any, host: str) -> None:
    assert forge.values(told[host]) == [[True, False] * 3] * 2
