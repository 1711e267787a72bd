"""Time in collectives that are not Offbeat's is measured, and the line that called them is named."""

from __future__ import annotations

import inspect
import json
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import all_reduce  # as scripts do, long before attach

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, attempt, hear, say
from tests.support.nets import loss, net, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

FILE = "tests/live/attached/test_foreign_waits.py"
HELD_S = 2.0
METHODS = (ob.allreduce(), ob.local_sgd(period=2), ob.eager(), ob.wagma(), ob.ad_psgd(), ob.diloco(period=2))


def here() -> int:
    """The line it is called from."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def step(model: torch.nn.Module, optimizer: ob.Attached, rank: int, t: int) -> None:
    optimizer.zero_grad()
    loss(model, rank, t).backward()
    optimizer.step()


def held(rank: int) -> float:
    """Rank 1 comes later than the others; how much."""
    dist.barrier()
    start = time.perf_counter()
    time.sleep(HELD_S if rank == 1 else 0.0)
    return time.perf_counter() - start


@scenario(2)
def a_barrier(rank: int) -> tuple[float, int, ob.Summary]:
    model = net()
    with ob.attach(sgd(model), model, ob.local_sgd(period=2)) as optimizer:
        step(model, optimizer, rank, 0)
        late_s = held(rank)
        line = here() + 1
        dist.barrier()
        step(model, optimizer, rank, 1)
    return late_s, line, optimizer.summary()


def test_a_planted_barrier_is_named_with_its_line_and_its_seconds(told: Told) -> None:
    (_, line, summary), (late_s, _, _) = told(a_barrier)
    first = summary.foreign[0]
    assert (first.where, first.op, first.calls, first.steps) == (f"{FILE}:{line}", "barrier", 1, 1)
    assert first.seconds == pytest.approx(late_s, rel=0.05)
    assert f"went into tests/…/test_foreign_waits.py:{line} (barrier, once)" in str(summary)


def test_all_workers_tell_of_the_same_waits_and_a_summary_is_plain_data(told: Told) -> None:
    (_, _, first), (_, _, second) = told(a_barrier)
    assert first.sentences == second.sentences
    plain = json.loads(json.dumps(first.json()))
    assert plain["foreign"][0]["op"] == "barrier"


@scenario(2)
def a_name_imported_before(rank: int) -> tuple[float, ob.Summary]:
    model = net()
    with ob.attach(sgd(model), model, ob.local_sgd(period=2)) as optimizer:
        late_s = held(rank)
        all_reduce(torch.zeros(1))
    return late_s, optimizer.summary()


def test_a_function_that_was_imported_before_attach_is_seen(told: Told) -> None:
    (_, summary), (late_s, _) = told(a_name_imported_before)
    assert summary.foreign[0].op == "all_reduce"
    assert summary.foreign[0].seconds == pytest.approx(late_s, rel=0.05)


@scenario(2)
def several_kinds(rank: int) -> tuple[float, dict[str, tuple[int, float]]]:
    model, both = net(), [None, None]
    with ob.attach(sgd(model), model, ob.local_sgd(period=2)) as optimizer:
        late_s = held(rank)
        dist.all_gather_object(both, {"rank": rank})
        for _ in range(3):
            dist.all_gather_object(both, {"rank": rank})
        work: Any = dist.all_reduce(torch.zeros(1), async_op=True)
        work.wait()
        dist.broadcast(torch.zeros(1), src=0)
        dist.send(torch.zeros(1), 1) if rank == 0 else dist.recv(torch.zeros(1), 0)
        dist.monitored_barrier()
    waits = optimizer.summary().foreign
    return late_s, {op: (sum(w.calls for w in waits if w.op == op), sum(w.seconds for w in waits if w.op == op))
                    for op in {w.op for w in waits}}  # fmt: skip


def test_a_call_that_is_made_of_several_counts_once(told: Told) -> None:
    (_, waits), (late_s, _) = told(several_kinds)
    calls, seconds = waits["all_gather_object"]
    assert calls == 4
    assert seconds == pytest.approx(late_s, rel=0.3), "counted with its parts it would be twice as much"
    assert "all_gather" not in waits


def test_every_kind_of_collective_is_noted_under_its_own_name(told: Told) -> None:
    (_, first), (_, second) = told(several_kinds)
    names = {"all_gather_object", "all_reduce", "broadcast", "monitored_barrier", "barrier"}
    assert set(first) - {"wait"} == {*names, "send"}, "a wait for what is there already is none"
    assert set(second) - {"wait"} == {*names, "recv"}
    assert all(calls == 1 for op, (calls, _) in first.items() if op != "all_gather_object")


@scenario(2)
def an_asynchronous_one(rank: int) -> tuple[float, int, ob.Summary]:
    model = net()
    with ob.attach(sgd(model), model, ob.local_sgd(period=2)) as optimizer:
        late_s = held(rank)
        work: Any = dist.all_reduce(torch.zeros(1), async_op=True)
        line = here() + 1
        work.wait()
    return late_s, line, optimizer.summary()


def test_a_wait_for_an_asynchronous_collective_is_named_where_it_waits(told: Told) -> None:
    (_, line, summary), (late_s, _, _) = told(an_asynchronous_one)
    assert (summary.foreign[0].where, summary.foreign[0].op) == (f"{FILE}:{line}", "wait")
    assert summary.foreign[0].seconds == pytest.approx(late_s, rel=0.05)


@scenario(2)
def our_own(rank: int) -> list[tuple[str, tuple[Any, ...]]]:
    seen = []
    for strategy in METHODS:
        model = net()
        with ob.attach(sgd(model), model, strategy) as optimizer:
            for t in range(4):
                step(model, optimizer, rank, t)
            optimizer.average()
        seen.append((str(strategy), optimizer.summary().foreign))
    return seen


def test_what_offbeat_does_itself_is_not_foreign(told: Told) -> None:
    for rank in told(our_own):
        assert rank == [(str(strategy), ()) for strategy in METHODS]


@scenario(2)
def every_step(rank: int) -> tuple[ob.Summary, float]:
    model = net()
    with ob.attach(sgd(model), model, ob.local_sgd(period=100)) as optimizer:
        start = time.perf_counter()
        for t in range(12):
            time.sleep(0.1 if rank == 1 else 0.0)
            dist.barrier()
            step(model, optimizer, rank, t)
        took_s = time.perf_counter() - start
    return optimizer.summary(), took_s


def test_who_waits_in_somebody_elses_collective_is_not_called_slow(told: Told) -> None:
    (summary, took_s), _ = told(every_step)
    assert "(barrier, every step)" in str(summary)
    assert "Rank 1 is chronically slow" in str(summary)
    assert summary.busy_s < took_s / 2
    assert summary.wait_s < took_s / 2, "wait_s is Offbeat's own waiting"


@scenario(2)
def two_at_once(rank: int) -> tuple[list[str], list[str], list[bool]]:
    wrapped = []

    def is_wrapped() -> bool:
        return hasattr(ProcessGroup.allreduce, "__wrapped__") or hasattr(Work.wait, "__wrapped__")

    first, second = net(), net()
    wrapped.append(is_wrapped())
    outer = ob.attach(sgd(first), first, ob.local_sgd(period=2))
    inner = ob.attach(sgd(second), second, ob.local_sgd(period=2))
    dist.barrier()
    inner.finish()
    wrapped.append(is_wrapped())
    dist.broadcast(torch.zeros(1), src=0)
    outer.finish()
    wrapped.append(is_wrapped())
    all_reduce(torch.zeros(1))
    return [w.op for w in outer.summary().foreign], [w.op for w in inner.summary().foreign], wrapped


def test_each_optimiser_notes_from_its_attach_to_its_end_and_the_last_one_unwraps(told: Told) -> None:
    for outer, inner, wrapped in told(two_at_once):
        assert (sorted(outer), inner) == (["barrier", "broadcast"], ["barrier"])
        assert wrapped == [False, True, False]


def fails(rank: int) -> tuple[str, bool, str]:
    dist.init_process_group("gloo")
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    dist.barrier()

    def goes_on() -> None:
        with optimizer:
            step(model, optimizer, rank, 0)
            if rank == 1:
                raise ValueError("no such file")
            step(model, optimizer, rank, 1)

    error = attempt(goes_on)
    say(f"{rank} is over")
    hear(f"{1 - rank} is over")
    return error, hasattr(ProcessGroup.allreduce, "__wrapped__"), str(optimizer.summary().foreign[0].op)


def test_after_a_failure_torch_is_as_it_was_and_the_summary_still_answers() -> None:
    (outcomes,) = forge.run([Job(fails, 2)])
    for error, wrapped, op in forge.values(outcomes):
        assert "no such file" in error
        assert not wrapped
        assert op == "barrier"
