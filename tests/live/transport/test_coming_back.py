"""A worker that is started again takes its dead predecessor's place, as the twin of a member between two steps.

Under ``offbeat launch --restarts`` it is another process with the same rank. Here a rank's process forks its first life,
which is killed, and then lives on as the second.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.live.transport.test_going_on import METHODS, Ticks
from tests.support import forge
from tests.support.forge import Job
from tests.support.nets import backward, flat, loss, net, sgd

pytestmark = pytest.mark.live

SIZE, LAST, MORE = 4, 4, 6
WHO = (0, 3, 1)


def lives_twice(first: Callable[[], None]) -> None:
    """This process's first life is killed in ``first``; what follows is the second."""
    if (child := os.fork()) == 0:
        first()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    os.environ["OFFBEAT_RETURNS"] = "1"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def steps_until_it_is_back(most: int = 4000) -> Any:
    """Of one that stays: as long as the other is away, and some more."""
    seen: int | None = None
    for t in range(most):
        if seen is None and forge.said("back"):
            seen = t
        if seen is not None and t == seen + MORE:
            return
        time.sleep(0.001)
        yield t
    raise TimeoutError("nobody has come back")


def comes_back(rank: int, method: str, who: int) -> tuple[list[float], tuple[int, ...], list[str]]:
    def attached() -> tuple[Any, Any]:
        model = net()
        return model, ob.attach(sgd(model, momentum=0.5), model, METHODS[method], min_workers=1)

    def first() -> None:
        model, optimizer = attached()
        for t in range(LAST + 1):
            backward(optimizer, model, rank, t)
            if t == LAST:
                die()
            optimizer.step()

    if rank == who:
        lives_twice(first)
    model, optimizer = attached()
    if rank == who:
        assert optimizer.begun_at > 0
        forge.say("back")
    for t in steps_until_it_is_back():
        backward(optimizer, model, rank, t)
        optimizer.step()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*samples of this worker were never used")
        optimizer.finish()
    return flat(model).tolist(), optimizer.members, [s for s in optimizer.summary().sentences if "back" in s]


CASES = [(method, WHO[k % len(WHO)]) for k, method in enumerate(METHODS)]


@pytest.fixture(scope="module")
def ended() -> dict[Any, list[forge.Outcome]]:
    jobs = [Job(comes_back, SIZE, case, timeout_s=60) for case in CASES]
    return dict(zip(CASES, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1]}")
def test_one_that_comes_back_trains_with_the_others_and_all_end_equal(ended: Any, case: Any) -> None:
    found = forge.values(ended[case])
    assert all(torch.tensor(weights).isfinite().all() for weights, _, _ in found)
    assert len({tuple(weights) for weights, _, _ in found}) == 1
    assert all(members == tuple(range(SIZE)) for _, members, _ in found)
    for rank, (_, _, sentences) in enumerate(found):
        assert len(sentences) == (rank != case[1])
