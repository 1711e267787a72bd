"""Checkpoints, and data that do not last equally long on all ranks."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, attempt
from tests.support.in_step import IN_STEP
from tests.support.nets import PATIENCE_S, distance, flat, loss, net, serial, sgd
from tests.support.scenarios import Call, Told, Turns, in_turn, scenario

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


def resumed(rank: int, name: str) -> list[tuple[Tensor, Tensor, bool]]:
    """Without a break, with one after 5 or 7 steps, and whether an exchange was under way then."""
    strategy, out = IN_STEP[name], []
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
        out.append((whole, flat(second), in_flight))
    return out


@pytest.fixture(scope="module")
def stops() -> Turns[str]:
    return in_turn({name: Call(resumed, (name,)) for name in IN_STEP}, 2, init=False)


@pytest.mark.parametrize("name", IN_STEP)
def test_a_resumed_run_ends_with_the_bits_of_one_without_a_break(stops: Turns[str], name: str) -> None:
    for out in stops[name]:
        for whole, parts, _ in out:
            assert torch.equal(whole, parts), distance(whole, parts)


@pytest.mark.parametrize("method", ["dasgd", "diloco"])
def test_some_of_the_resumed_runs_were_stopped_with_an_exchange_under_way(stops: Turns[str], method: str) -> None:
    mine = [name for name in IN_STEP if IN_STEP[name].name == method]
    for rank in (0, 1):
        assert any(in_flight for name in mine for _, _, in_flight in stops[name][rank])


class Recorder:
    """A log that keeps the numbers of the steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if tag == "offbeat/step_s":
            self.steps.append(step)


LOGGED = {s.name: s for s in (ob.allreduce(), ob.local_sgd(period=2), ob.eager(), ob.ad_psgd())}


def logged(rank: int, method: str) -> list[list[int]]:
    """The numbers of the steps that a log hears of: before a break, after it, and of a run that was never saved."""
    model, logs, saved = net(), [Recorder(), Recorder(), Recorder()], None
    for log, steps in zip(logs, (3, 2, 1), strict=True):
        optimizer = ob.attach(sgd(model), model, LOGGED[method], patience_s=PATIENCE_S, log=log)
        if saved is not None:
            optimizer.load_state_dict(saved)
        _steps(rank, model, optimizer, _scheduled(optimizer.inner), 0, steps)
        optimizer.average()
        (saved,) = _round_trip(optimizer.state_dict()) if log is logs[0] else (None,)
        optimizer.finish()
    return [log.steps for log in logs]


@pytest.fixture(scope="module")
def logs() -> Turns[str]:
    return in_turn({method: Call(logged, (method,)) for method in LOGGED}, 2, init=False)


@pytest.mark.parametrize("method", LOGGED)
def test_a_log_counts_on_from_the_step_where_a_state_was_saved(logs: Turns[str], method: str) -> None:
    assert logs[method] == [[[0, 1, 2], [3, 4], [0]]] * 2


@scenario(2)
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


def test_a_state_of_another_strategy_is_refused_and_a_plain_one_is_loaded(told: Told) -> None:
    for said, same_momentum in told(foreign_states):
        assert "saved with period=4, but local_sgd is attached with period=8" in said
        assert same_momentum


UNEVEN = {**IN_STEP, "averaged": ob.local_sgd(period=3)}


def uneven(rank: int, name: str) -> tuple[Tensor, int]:
    """On ranks with 10, 7, 0 and 13 batches; in one case with an average while some train and others are done."""
    model = net()
    with ob.attach(sgd(model, lr=0.05), model, UNEVEN[name], patience_s=PATIENCE_S) as optimizer:
        for t in range(BATCHES[rank]):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
            if name == "averaged" and t == 8:  # ranks 0 and 3; 1 and 2 are done
                optimizer.average()
    return flat(model), optimizer.me.t


@pytest.fixture(scope="module")
def ends() -> Turns[str]:
    return in_turn({name: Call(uneven, (name,)) for name in UNEVEN}, 4, init=False)


@pytest.mark.parametrize("name", UNEVEN)
def test_with_uneven_data_nobody_hangs_and_all_end_equal(ends: Turns[str], name: str) -> None:
    outs = ends[name]
    assert all(torch.equal(weights, outs[0][0]) for weights, _ in outs)
    assert [steps for _, steps in outs] == [13] * 4


def test_allreduce_divides_by_those_who_still_have_data(ends: Turns[str]) -> None:
    reference = serial(lambda model: sgd(model, lr=0.05), 13, ranks=lambda t: [r for r in range(4) if t < BATCHES[r]])
    for weights, _ in ends["allreduce()"]:
        assert distance(weights, reference) < 1e-13


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


@pytest.mark.parametrize("rank_0_hosts", [False, True], ids=["one_by_one", "one_by_one_hosted"])
def test_the_default_group_that_init_made_ends_with_the_last_optimizer(rank_0_hosts: bool) -> None:
    (outcomes,) = forge.run([Job(one_by_one, 2, rank_0_hosts=rank_0_hosts)])
    assert forge.values(outcomes) == [[True, False] * 3] * 2
