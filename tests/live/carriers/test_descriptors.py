"""A rank that may open no more files: everybody hears so, and what to do."""

from __future__ import annotations

import os
import resource
from datetime import timedelta

import pytest

import offbeat as ob
from offbeat.live.carriers import group
from offbeat.live.carriers.group import Group
from tests.support.forge import attempt
from tests.support.nets import PATIENCE_S, net, sgd
from tests.support.scenarios import Told, over, scenario

pytestmark = pytest.mark.live

SIZE, BAD = 3, 1


@scenario(SIZE)
def at_the_limit(rank: int) -> tuple[str, int]:
    """A group is made when one rank has two descriptors left; answers the error, and the limit."""
    return over(rank, "gloo", meet)


def meet(rank: int) -> tuple[str, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = soft

    def run() -> None:
        nonlocal limit
        model = net()
        with ob.attach(sgd(model), model, ob.allreduce(), patience_s=PATIENCE_S) as optimizer:
            transport = optimizer._run.transport
            if rank == BAD:
                limit = max(map(int, os.listdir("/proc/self/fd"))) + 2
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            Group("late", tuple(range(SIZE)), transport._board, transport.waiter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "CONNECT", timedelta(seconds=2))  # the others do not hear it before
        try:
            return attempt(run), limit
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_where_a_rank_may_open_no_more_files_all_hear_so_and_the_way_out(told: Told) -> None:
    outs = told(at_the_limit)
    words, limit = outs[BAD]
    assert words.startswith("PeerFailed: ranks 0, 1, 2 could not be met (")
    assert f"Too many open files): this process may have {limit} files and sockets open" in words
    assert words.endswith("let it have more (ulimit -n)")
    assert all(said == f"PeerFailed: rank {BAD} failed: {words}" for rank, (said, _) in enumerate(outs) if rank != BAD)
