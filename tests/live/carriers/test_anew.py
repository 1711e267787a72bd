"""What ranks share can be given up in the middle, and made anew under the same name: by them, or by others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.live.carriers.commons import LAID
from offbeat.live.carriers.group import Group
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

EVERYONE, SOME = (0, 1, 2), (0, 2)
TURNS = (EVERYONE, SOME, EVERYONE, SOME, EVERYONE)


def attached() -> ob.Attached:
    model = nn.Linear(2, 1)
    return ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.local_sgd(), patience_s=60.0)


@scenario(3)
def groups_again(rank: int) -> list[float]:
    """The last of each group leaves with a sum under way that the others never join."""
    optimizer, sums = attached(), list[float]()
    run = optimizer._run
    for ranks in TURNS:
        if rank in ranks:
            group, one = Group("again", ranks, run._board, run.transport.waiter), torch.ones(1)
            run.transport.waiter.wait([group.all_reduce(one)], "a sum")
            sums.append(one.item())
            if rank == ranks[-1]:
                group.all_reduce(torch.ones(100_000))
            group.park()
    optimizer.finish()
    return sums


@scenario(3)
def memory_again(rank: int) -> list[list[float]]:
    optimizer, seen = attached(), list[list[float]]()
    transport = optimizer._run.transport
    for turn, ranks in enumerate(TURNS):
        if rank in ranks:
            x = torch.full((3,), turn + rank / 10)
            commons = transport.commons(ranks, [x])
            assert commons is not None, "memory can be shared again"
            laid = commons.lay([x])
            transport.waiter.wait([laid.have(LAID, commons.others)], "the others")
            seen.append([round(theirs[0][0].item(), 1) for theirs in laid.views.everyones()])
            commons.close(together=False)
            transport._commons.clear()
    optimizer.finish()
    return seen


def test_groups_are_made_anew_after_they_were_left(told: Told) -> None:
    everyone, fewer = [3.0, 2.0, 3.0, 2.0, 3.0], [3.0, 3.0, 3.0]
    assert told(groups_again) == [everyone, fewer, everyone]


def test_memory_is_shared_anew_after_it_was_left(told: Told) -> None:
    expected = [[turn + r / 10 for r in ranks] for turn, ranks in enumerate(TURNS)]
    assert told(memory_again) == [expected, expected[::2], expected]
