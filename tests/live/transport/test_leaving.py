"""With ``min_workers`` a worker may leave, by ``leave()``, after SIGTERM or by an exception, and the others go on.

Four plain processes, whose store none of them hosts, as under ``offbeat launch``. ``make long`` has every method with
every way to leave; else each method sees two.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import offbeat as ob
from offbeat.live.attached.recorder import Recorder
from offbeat.live.transport import notice as notices
from tests.support import forge
from tests.support.forge import Job, attempt, hear, note
from tests.support.long import LONG
from tests.support.nets import batch, flat, loss, net, sgd

pytestmark = pytest.mark.live

SIZE, LAST, STEPS, WHO = 4, 4, 12, 2
METHODS = {
    "allreduce": ob.allreduce(),
    "eager": ob.eager(),
    "eager, late": ob.eager(late=1),
    "wagma": ob.wagma(),
    "wagma, correct": ob.wagma(merge="correct"),
    "self_clocked": ob.self_clocked(),
    "ad_psgd": ob.ad_psgd(),
    "nonblocking": ob.nonblocking(),
    "dpsgd": ob.dpsgd(),
    "msync": ob.msync(),
}
WAYS = ("leave", "SIGTERM before backward", "SIGTERM before step", "exception")
LINE = f"offbeat: rank {WHO} leaves after SIGTERM; what it had handed in counts"
RUN_ENDED = "OffbeatError: step() came after the run was ended; attach the optimizer again to go on"


def notice(pid: int | None = None) -> None:
    os.kill(os.getpid() if pid is None else pid, signal.SIGTERM)


def pids() -> list[int]:
    found: list[int] = [0] * SIZE
    dist.all_gather_object(found, os.getpid())
    return found


def left_behind(rank: int, method: str, way: str) -> list[float] | None:
    """One worker leaves in this way; the weights that the others end with."""
    model = net()
    on_error = "leave" if way == "exception" else "stop"
    inner = sgd(model, momentum=0.0)
    optimizer = ob.attach(inner, model, METHODS[method], min_workers=1, on_error=on_error)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*samples of this worker were never used")
        with optimizer:
            for t in range(STEPS):
                leaves = rank == WHO and t == LAST
                if leaves and way == "leave":
                    before = flat(model)
                    optimizer.leave()
                    note((attempt(optimizer.step), torch.equal(before, flat(model))))
                    return None
                if leaves and way == "exception":
                    raise ValueError("a bug")
                if leaves and way == "SIGTERM before backward":
                    notice()
                optimizer.zero_grad()
                if method == "nonblocking":
                    for x, y in optimizer.micro_batches(batch(rank, t)):
                        F.mse_loss(model(x), y).backward()
                else:
                    loss(model, rank, t).backward()
                if leaves and way == "SIGTERM before step":
                    notice()
                optimizer.step()
    return flat(model).tolist()


Case = tuple[str, str]
CASES: list[Case] = [
    (method, way)
    for k, method in enumerate(METHODS)
    for way in (WAYS if LONG else (WAYS[k % 4], WAYS[(k + 1 + k // 4) % 4]))
]


def test_every_method_is_left_in_two_ways_and_every_way_is_taken() -> None:
    assert all(len({way for one, way in CASES if one == method}) > 1 for method in METHODS)
    assert {way for _, way in CASES} == set(WAYS)


@pytest.fixture(scope="module")
def ended() -> dict[Case, list[forge.Outcome]]:
    jobs = [Job(left_behind, SIZE, case, timeout_s=120) for case in CASES]
    return dict(zip(CASES, forge.run(jobs, at_once=3), strict=True))


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_the_others_take_all_their_steps_and_end_equal(ended: Any, case: Case) -> None:
    others = forge.values([outcome for rank, outcome in enumerate(ended[case]) if rank != WHO])
    assert torch.tensor(others[0]).isfinite().all()
    assert others[0] == others[1] == others[2]


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_who_leaves_ends_as_it_has_asked_for(ended: Any, case: Case) -> None:
    one = ended[case][WHO]
    if case[1] == "leave":
        assert forge.values([one]) == [None]
        assert one.noted == [(RUN_ENDED, True)]
    elif case[1] == "exception":
        assert one.exit_code == 1
        assert one.error.endswith("ValueError: a bug")
    else:
        assert (one.exit_code, one.stderr.splitlines()) == (0, [LINE])


# What counts.

COUNTED = {
    "allreduce": ob.allreduce(),
    "eager": ob.eager(),
    "eager, late": ob.eager(late=1),
    "eager, all wait": ob.eager(wait="everyone"),
}


class Ticks(nn.Module):
    """With SGD at rate −1, number r of the weights is the sum of what rank r's gradients have counted."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))


def counted(rank: int, method: str, by_notice: bool) -> list[float]:
    model = Ticks()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, COUNTED[method], min_workers=1)
    for t in range(STEPS):
        if rank == WHO and t == LAST:
            if not by_notice:
                optimizer.leave()
                break
            notice()
        optimizer.zero_grad()
        (-model.w[rank]).backward()
        optimizer.step()
    optimizer.finish()  # nothing, for who has left
    return model.w.detach().tolist()


COUNTS = [*((method, False) for method in COUNTED), ("allreduce", True), ("eager, late", True)]


@pytest.fixture(scope="module")
def counts() -> dict[Any, list[forge.Outcome]]:
    jobs = [Job(counted, SIZE, case, timeout_s=120) for case in COUNTS]
    return dict(zip(COUNTS, forge.run(jobs, at_once=3), strict=True))


@pytest.mark.parametrize("case", COUNTS, ids=lambda case: f"{case[0]}, {'SIGTERM' if case[1] else 'leave'}")
def test_everything_that_was_handed_in_counts_once_and_later_means_are_of_three(counts: Any, case: Any) -> None:
    assert counts[case][WHO].exit_code == 0, counts[case][WHO].stderr[-3000:]
    ends = forge.values([outcome for rank, outcome in enumerate(counts[case]) if rank != WHO])
    assert ends[0] == ends[1] == ends[2]
    for rank, end in enumerate(ends[0]):
        if rank == WHO:
            assert end == pytest.approx(LAST / SIZE, abs=1e-12)
        elif case[0] == "allreduce":
            assert end == pytest.approx(LAST / SIZE + (STEPS - LAST) / (SIZE - 1))
        else:
            assert STEPS / SIZE - 1e-9 <= end <= STEPS / (SIZE - 1) + 1e-9


# Too few, and all.


def too_few(rank: int) -> None:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=3)
    for t in range(100_000):
        if (rank == 1 and t == 3) or (rank == 2 and 1 not in optimizer.members):
            optimizer.leave()
            return
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()


def too_few_after_a_bug(rank: int) -> None:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=3, on_error="leave")
    for t in range(100_000):
        if (rank == 1 and t == 3) or (rank == 2 and 1 not in optimizer.members):
            raise ValueError("a bug")
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()


def all_at_once(rank: int, method: str, least: int) -> None:
    """Rank 0 gives all notice, itself last."""
    model = net()
    optimizer = ob.attach(sgd(model), model, METHODS[method], min_workers=least)
    everyone = pids()
    with optimizer:
        for t in range(100_000):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            if rank == 0 and t == 20:
                for pid in reversed(everyone):
                    notice(pid)
            optimizer.step()


def all_in_finish(rank: int) -> None:
    """All but rank 0 are in finish(), which waits for it."""
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce(), min_workers=3)
    everyone = pids()
    loss(model, rank, 0).backward()
    optimizer.step()
    if rank == 0:
        until_waiting(optimizer, {1, 2, 3})
        for pid in everyone:
            notice(pid)
    optimizer.finish()


def all_one_after_the_other(rank: int) -> None:
    """Rank 3 hears that too few are left before its own notice comes."""
    notices.SOON_S = 60.0
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce(), min_workers=3)
    everyone = pids()
    if rank == 0:
        until_waiting(optimizer, {1, 2, 3})
        for pid in everyone[1:3]:
            notice(pid)
        while {one.rank for one in optimizer.status().workers if one.state != "ended"} != {0, 3}:
            pass
        notice(everyone[3])
        notice(everyone[0])
    loss(model, rank, 0).backward()
    optimizer.step()


def failing_meanwhile(rank: int) -> None:
    """The notice has come, and the line has gone before anybody looked."""
    notices.heed("a run", WHO, lambda: note("left"))

    @notices.heeding
    def call() -> None:
        notice()
        raise ob.PeerFailed("the host process has ended")

    call()


def until_waiting(optimizer: ob.Attached, ranks: set[int]) -> None:
    while not ranks <= {one.rank for one in optimizer.status().workers if one.state == "waits"}:
        pass


# While it waits.


def waiting(rank: int, method: str) -> list[float]:
    """Rank 0 takes no step before the process of another one, which waits for it in a step, has ended."""
    model = net()
    optimizer = ob.attach(sgd(model), model, METHODS[method], min_workers=1)
    everyone = pids()
    for t in range(STEPS):
        if rank == 0 and t == LAST:
            until_waiting(optimizer, {WHO})
            end = os.pidfd_open(everyone[WHO])
            notice(everyone[WHO])
            note(bool(select.select([end], [], [], 30.0)[0]))
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()
    return flat(model).tolist()


# Handlers.


def own_handler(rank: int) -> bool:
    heard = list[int]()

    def own(number: int, _frame: object) -> None:
        heard.append(number)

    signal.signal(signal.SIGTERM, own)
    model = net()
    with ob.attach(sgd(model), model, ob.eager(), min_workers=1) as optimizer:
        notice()
        loss(model, rank, 0).backward()
        optimizer.step()
    return heard == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is own


def handlers(rank: int) -> list[bool]:
    """Whether SIGTERM does what it did before: without min_workers, after a run, after leaving, in a child."""

    def is_default() -> bool:
        return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    found = [is_default()]
    for least in (None, 1, 1):
        model = net()
        optimizer = ob.attach(sgd(model), model, ob.allreduce(), min_workers=least)
        found.append(is_default() == (least is None))
        if least is not None:
            child = multiprocessing.get_context("fork").Process(target=hear, args=("never",))
            child.start()
            child.terminate()
            child.join(30)
            found.append(child.exitcode == -signal.SIGTERM)
        optimizer.finish()
        found.append(is_default())
    return found


def twice(rank: int) -> None:
    """The second one comes while it computes."""
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=1)
    for t in range(LAST):
        loss(model, rank, t).backward()
        if rank == WHO and t == 1:
            notice()
            note("computes on")
            notice()
            note("never")
        optimizer.step()
    optimizer.finish()


class Noticed(Recorder):
    """Is told at the very end of a run, when all have been waited for."""

    def end(self, rank: int, weights: Any) -> None:
        if rank == WHO:
            notice()


def in_the_last_moment(rank: int) -> None:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce(), min_workers=1, record=Noticed())
    loss(model, rank, 0).backward()
    optimizer.step()
    optimizer.finish()
    note("goes on")


def failing_after_it(rank: int, in_with: bool) -> list[float]:
    """A loader's child, ended by the same notice, lets the loop fail."""
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=1)

    def train() -> None:
        for t in range(STEPS):
            if rank == WHO and t == LAST:
                notice()
                raise RuntimeError("a child was killed")
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()

    if in_with:
        with optimizer:
            train()
    else:
        train()
        optimizer.finish()
    return flat(model).tolist()


# What is refused.


def refused(rank: int) -> list[str]:
    model, found = net(), list[str]()
    attach: Callable[..., Any] = ob.attach
    found.append(attempt(lambda: attach(sgd(model), model, ob.eager(), on_error="leave")))
    found.append(attempt(lambda: attach(sgd(model), model, ob.eager(), on_error="go", min_workers=1)))
    for least in (None, SIZE):
        optimizer = ob.attach(sgd(model), model, ob.eager(), min_workers=least)
        found.append(attempt(optimizer.leave))
        optimizer.finish()
    different = "leave" if rank == 1 else "stop"
    found.append(attempt(lambda: attach(sgd(model), model, ob.eager(), min_workers=1, on_error=different)))
    return found


SCRIPTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "too few": (too_few, ()),
    "too few after a bug": (too_few_after_a_bug, ()),
    **{
        f"all at once: {method}, {least}": (all_at_once, (method, least))
        for method, least in (("allreduce", 3), ("eager", 2), ("ad_psgd", 1))
    },
    "all in finish": (all_in_finish, ()),
    "all one after the other": (all_one_after_the_other, ()),
    "failing meanwhile": (failing_meanwhile, ()),
    **{f"waiting: {method}": (waiting, (method,)) for method in ("allreduce", "dpsgd")},
    "own handler": (own_handler, ()),
    "handlers": (handlers, ()),
    "twice": (twice, ()),
    "in the last moment": (in_the_last_moment, ()),
    "failing after it, in a with block": (failing_after_it, (True,)),
    "failing after it": (failing_after_it, (False,)),
    "refused": (refused, ()),
}


@pytest.fixture(scope="module")
def scripts() -> dict[str, list[forge.Outcome]]:
    sizes = {failing_meanwhile: 1}
    jobs = [Job(script, sizes.get(script, SIZE), args, timeout_s=120) for script, args in SCRIPTS.values()]
    return dict(zip(SCRIPTS, forge.run(jobs, at_once=4), strict=True))


def test_a_run_that_has_become_too_small_ends_and_says_so(scripts: Any) -> None:
    for rank in (0, 3):
        assert scripts["too few"][rank].error.endswith(
            "PeerFailed: rank 2 has left; 2 would be left, and min_workers is 3"
        )
        assert scripts["too few after a bug"][rank].error.endswith(
            "PeerFailed: rank 2 failed: ValueError: a bug; 2 would be left, and min_workers is 3"
        )


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.startswith("all ")])
def test_where_all_get_sigterm_all_end_well_within_seconds_and_nobody_complains(scripts: Any, name: str) -> None:
    for rank, outcome in enumerate(scripts[name]):
        line = f"offbeat: rank {rank} leaves after SIGTERM; what it had handed in counts"
        assert (outcome.exit_code, outcome.stderr.splitlines()) == (0, [line])
    ends_s = [outcome.ended_s for outcome in scripts[name]]
    assert max(ends_s) - min(ends_s) < 5.0


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.startswith("waiting")])
def test_who_waits_for_another_leaves_at_once(scripts: Any, name: str) -> None:
    assert scripts[name][0].noted == [True], "it has ended while rank 0 took no step"
    assert (scripts[name][WHO].exit_code, scripts[name][WHO].stderr.splitlines()) == (0, [LINE])
    others = forge.values([outcome for rank, outcome in enumerate(scripts[name]) if rank != WHO])
    assert others[0] == others[1] == others[2]


def test_a_handler_of_the_scripts_own_stays(scripts: Any) -> None:
    assert forge.values(scripts["own handler"]) == [True] * SIZE


def test_sigterm_does_what_it_did_before_when_the_run_is_over_and_in_children_at_any_time(scripts: Any) -> None:
    assert all(map(all, forge.values(scripts["handlers"])))


def test_a_second_sigterm_ends_the_process_at_once(scripts: Any) -> None:
    one = scripts["twice"][WHO]
    assert (one.exit_code, one.noted) == (-signal.SIGTERM, ["computes on"])
    forge.values([outcome for rank, outcome in enumerate(scripts["twice"]) if rank != WHO])


def test_a_notice_in_the_last_moment_of_a_run_is_not_lost(scripts: Any) -> None:
    for rank, outcome in enumerate(scripts["in the last moment"]):
        assert (outcome.exit_code, outcome.noted) == (0, [] if rank == WHO else ["goes on"])
    assert scripts["in the last moment"][WHO].error == f"offbeat: rank {WHO} ends after SIGTERM; its run was over"


def test_an_error_after_sigterm_ends_no_other(scripts: Any) -> None:
    for name, code in (("failing after it, in a with block", 0), ("failing after it", -signal.SIGTERM)):
        assert scripts[name][WHO].exit_code == code
        others = forge.values([outcome for rank, outcome in enumerate(scripts[name]) if rank != WHO])
        assert others[0] == others[1] == others[2]
    assert scripts["failing after it, in a with block"][WHO].stderr.splitlines() == [LINE]
    for outcome in scripts["failing meanwhile"]:
        assert (outcome.exit_code, outcome.noted, outcome.error) == (0, ["left"], LINE)


def test_what_cannot_be_is_refused_in_a_sentence(scripts: Any) -> None:
    for alone, unknown, left, left_too, different in forge.values(scripts["refused"]):
        assert "needs all its 4 workers; say with how many it may go on: min_workers=1" in alone
        assert 'on_error is \'go\'; use "stop" or "leave"' in unknown
        assert left == left_too
        assert "end it with finish(), or let the others go on: ob.attach(…, min_workers=1)" in left
        assert "the ranks differ in their on_error: rank 0 has stop, rank 1 has leave" in different
