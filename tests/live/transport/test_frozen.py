"""A worker whose process is stopped for longer than ``frozen_s`` is killed, and the others go on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, attempt
from tests.support.going_on import METHODS, SIZE
from tests.support.nets import backward, end, flat, net, sgd

pytestmark = pytest.mark.live

WHO, LIMIT_S, AT, MORE = 2, 0.3, 4, 6
SOME = [name for name in METHODS if name.partition("(")[0] in ("allreduce", "dpsgd", "diloco", "ad_psgd", "msync")]
SOME += ["self_clocked, moments", "nonblocking by a ring"]


def is_stopped(rank: int, method: str) -> tuple[list[float], tuple[int, ...]]:
    model = net()
    optimizer = ob.attach(sgd(model), model, METHODS[method], min_workers=1, frozen_s=LIMIT_S)
    left, t = MORE, 0
    while left:
        backward(optimizer, model, rank, t)
        if rank == WHO and t == AT:
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.step()
        time.sleep(0.002)
        t += 1
        left -= WHO not in optimizer.members
    end(optimizer)
    return flat(model).tolist(), optimizer.members


@pytest.fixture(scope="module")
def ended() -> dict[str, Any]:
    jobs = [Job(is_stopped, SIZE, (method,), timeout_s=90) for method in SOME]
    return dict(zip(SOME, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("method", SOME)
def test_it_is_killed_and_the_others_go_on_without_it(ended: dict[str, Any], method: str) -> None:
    assert ended[method][WHO].exit_code == -signal.SIGKILL
    others = forge.values([one for rank, one in enumerate(ended[method]) if rank != WHO])
    assert all(one == others[0] for one in others)
    assert others[0][1] == tuple(rank for rank in range(SIZE) if rank != WHO)
    told = "".join(one.stderr for one in ended[method])
    assert f"offbeat: rank {WHO} was stopped for 300 ms: killed" in told


def refused(rank: int) -> list[str]:
    model = net()
    return [
        attempt(lambda: ob.attach(sgd(model), model, frozen_s=0.0, min_workers=1)),
        attempt(lambda: ob.attach(sgd(model), model, frozen_s=5.0)),
    ]


def test_a_limit_that_makes_no_sense_is_refused() -> None:
    for none, needs_all in forge.values(forge.run([Job(refused, 2)])[0]):
        assert none == "ValueError: attach: frozen_s is 0.0; use a number of seconds, or None"
        assert needs_all.endswith("this run needs all; add min_workers=1")
