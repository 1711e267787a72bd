"""A worker that is killed, leaves or freezes is noticed in every state in which the others can wait for it.

Three plain processes, as under srun or mpirun: nobody kills the others, and the job's store goes with rank 0. The
others end, their processes too, each with a sentence that names the rank. ``make long`` runs every method in
every state with every end of every rank, over every carrier; else each method sees two states and two ends, one over
each carrier, which take turns.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job
from tests.support.long import LONG
from tests.support.methods import EVERY_KIND
from tests.support.nets import backward, flat, loss, net, sgd
from tests.support.scenarios import CARRIERS, over

pytestmark = pytest.mark.live

SIZE, LAST = 3, 4
LATE_S = 30.0  # a machine with much else to do; without the news it would be the half hour of patience
METHODS = EVERY_KIND
STATES = ("after attach", "before a step", "while the others finish", "while the others average")
ENDS = tuple(itertools.product(("killed", "left", "stopped"), range(SIZE)))


def end(how: str) -> None:
    if how == "left":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def mourned(rank: int, method: str, state: str, how: str, who: int, way: str) -> None:
    """One rank dies in this state of the others. ``way``: their vectors', who else would share memory."""
    over(rank, way, dying, method, state, how, who)


def dying(rank: int, method: str, state: str, how: str, who: int) -> None:
    model = net()
    patience_s = 3.0 if how == "stopped" else 1800.0
    optimizer = ob.attach(sgd(model), model, METHODS[method], patience_s=patience_s)
    ends = rank == who
    if ends and state == "after attach":
        end(how)
    for t in range(300):  # who needs nobody finds out at the end
        if ends and t == (LAST - 1 if state == "while the others average" else LAST):
            end(how)
        if not ends and t == LAST - 1 and state == "while the others finish":
            optimizer.finish()
        if not ends and t == LAST - 1 and state == "while the others average":
            optimizer.average()
        backward(optimizer, model, rank, t)
        optimizer.step()
    optimizer.finish()


Case = tuple[str, str, str, int, str]


def cases() -> list[Case]:
    if LONG:
        return [(m, s, *end, way) for m in METHODS for s in STATES for end in ENDS for way in CARRIERS]
    return [
        (method, STATES[(m + 2 * k) % 4], *ENDS[(3 * m + k + m // 9) % 9], CARRIERS[(m // 9 + k + m) % len(CARRIERS)])
        for m, method in enumerate(METHODS)
        for k in range(2)
    ]


CASES = cases()


def test_every_method_is_in_the_table_over_every_carrier_and_every_end_in_every_state() -> None:
    assert {strategy.name for strategy in METHODS.values()} == set(ob.STRATEGIES)
    assert {(m, way) for m, *_, way in CASES} == set(itertools.product(METHODS, CARRIERS))
    assert {(s, how, who) for _, s, how, who, _ in CASES} == {(s, *end) for s in STATES for end in ENDS}
    assert {(*end, way) for _, _, *end, way in CASES} == {(*end, way) for end in ENDS for way in CARRIERS}


# Those in which the survivors' interpreters are taken down, too: one of each state and kind of end.
WHOLE = set(CASES) if LONG else set({case[1:3]: case for case in CASES}.values())


@pytest.fixture(scope="module")
def ended() -> dict[Any, list[forge.Outcome]]:
    jobs = [
        Job(
            mourned, SIZE, case, timeout_s=120, rank_0_hosts=True, whole_end=case in WHOLE,
            left_behind=case[3] if case[2] == "stopped" else None,
        )
        for case in CASES
    ]  # fmt: skip
    return dict(zip(CASES, forge.run(jobs, at_once=4), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: rank {case[3]} {case[2]} {case[1]}, {case[4]}")
def test_the_others_end_and_name_the_rank_that_is_gone(ended: Any, case: Case) -> None:
    _, _, how, who, _ = case
    outcomes = ended[case]
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != who]
    words = f"rank {who} does not answer" if how == "stopped" else f"rank {who} gives no sign of life: the process has"
    for outcome in others:
        assert not outcome.hung, outcome.stderr[-2000:]
        assert outcome.exit_code == 1, outcome.stderr[-2000:]
        assert words in outcome.error, outcome.stderr[-2000:]
    if how != "stopped":
        assert max(outcome.ended_s for outcome in others) - outcomes[who].ended_s < LATE_S


def crashing_with_finish_in_finally(rank: int) -> None:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.local_sgd(period=3))
    try:
        for t in range(20):
            if rank == 1 and t == LAST:
                raise ValueError("the disk is full")
            loss(model, rank, t).backward()
            optimizer.step()
    finally:
        optimizer.finish()


def finishing_inside_an_except_clause(rank: int) -> float:
    """A script may run as a whole in an except clause, and an iterator may end in one: that is no failure."""
    try:
        raise ImportError("no such thing")
    except ImportError:
        model = net()
        optimizer = ob.attach(sgd(model), model, ob.local_sgd(period=3))
        batches = iter(range(4))
        while True:
            try:
                t = next(batches)
            except StopIteration:
                optimizer.finish()
                break
            loss(model, rank, t).backward()
            optimizer.step()
    return float(flat(model).sum())


Endings = dict[Callable[[int], Any], list[forge.Outcome]]


@pytest.fixture(scope="module")
def endings() -> Endings:
    scripts = (crashing_with_finish_in_finally, finishing_inside_an_except_clause)
    jobs = [Job(script, SIZE, timeout_s=120, rank_0_hosts=True, whole_end=True) for script in scripts]
    return dict(zip(scripts, forge.run(jobs, at_once=2), strict=True))


def test_finish_in_a_finally_clause_does_not_hide_a_crash_from_the_others(endings: Endings) -> None:
    outcomes = endings[crashing_with_finish_in_finally]
    assert "ValueError: the disk is full" in outcomes[1].error
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.exit_code == 1, outcome.stderr
        assert "rank 1 failed: ValueError: the disk is full" in outcome.error


def test_finish_in_an_except_clause_that_is_no_failure_ends_well(endings: Endings) -> None:
    sums = forge.values(endings[finishing_inside_an_except_clause])
    assert len(set(sums)) == 1
