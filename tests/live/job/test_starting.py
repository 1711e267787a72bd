"""A start that cannot succeed ends in time, with a sentence that names who is missing."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, attempt, hear, say
from tests.support.nets import PATIENCE_S, net, sgd

pytestmark = pytest.mark.live

SHORT_S = 1.0
SOON_S = 3.0  # in which the others come, on a busy machine too


def attach(patience_s: float = SHORT_S) -> str:
    model = net()
    return attempt(lambda: ob.attach(sgd(model), model, patience_s=patience_s))


def never_attaches(rank: int) -> str:
    """The group is there; rank 1 does not come, and is there until the others have said so."""
    dist.init_process_group("gloo")
    if rank == 1:
        hear("given up by 0")
        hear("given up by 2")
        return ""
    said = attach(SOON_S)
    say(f"given up by {rank}")
    return said


def ends_before(rank: int) -> str:
    """Rank 1 ends between init and attach; patience would last."""
    ob.init()
    if rank == 1:
        hear("the others wait")
        os._exit(0)
    say("the others wait")
    return attach(patience_s=PATIENCE_S)


def never_starts(rank: int) -> str:
    """A job of three, of which two are started."""
    os.environ["WORLD_SIZE"] = "3"
    return attach()


def another_size(rank: int) -> str:
    os.environ["WORLD_SIZE"] = str(2 + (rank == 1))
    return attach(patience_s=PATIENCE_S)


def nobody_listens(rank: int) -> str:
    """The only process is rank 1 of 2, as on a second machine with the wrong address."""
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="False")
    return attach()


def told(outcomes: list[forge.Outcome]) -> list[str]:
    return [str(outcome.value) for outcome in outcomes if outcome.returned]


def test_a_rank_that_never_attaches_is_named_when_patience_ends() -> None:
    (outcomes,) = forge.run([Job(never_attaches, 3)])
    first, _, last = forge.values(outcomes)
    for said in (first, last):
        assert said.startswith("PeerFailed: ")
        assert "rank 1 did not attach within 3 s" in said


def test_a_rank_that_ended_before_it_attached_is_named_at_once() -> None:
    (outcomes,) = forge.run([Job(ends_before, 3)])
    said = told(outcomes)
    assert len(said) == 2
    for words in said:
        assert "the process of rank 1 ended before it called ob.attach" in words


@pytest.mark.parametrize("rank_0_hosts", [False, True])
def test_a_rank_that_is_never_started_is_named(rank_0_hosts: bool) -> None:
    (outcomes,) = forge.run([Job(never_starts, 2, rank_0_hosts=rank_0_hosts)])
    for said in forge.values(outcomes):
        assert "PeerFailed: rank 2 did not come within 1 s" in said


@pytest.mark.parametrize("rank_0_hosts", [False, True])
def test_ranks_that_were_started_with_other_sizes_are_told_both(rank_0_hosts: bool) -> None:
    (outcomes,) = forge.run([Job(another_size, 2, rank_0_hosts=rank_0_hosts)])
    for said in forge.values(outcomes):
        assert said.startswith("ConfigMismatch: ")
        assert "WORLD_SIZE=2" in said
        assert "WORLD_SIZE=3" in said


def test_a_first_rank_that_does_not_answer_is_named_with_its_address() -> None:
    (outcomes,) = forge.run([Job(nobody_listens, 1, rank_0_hosts=True)])
    (said,) = forge.values(outcomes)
    assert "nobody answers at 127.0.0.1:" in said
    assert "where rank 0 should be, for 1 s" in said


def test_patience_at_the_start_is_not_the_timeout_of_the_scripts_own_collectives() -> None:
    (outcomes,) = forge.run([Job(timeout_of_the_group, 2)])
    assert forge.values(outcomes) == [1800.0, 1800.0]


def timeout_of_the_group(rank: int) -> float:
    model = net()
    with ob.attach(sgd(model), model, patience_s=60.0):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        return float(backend.options._timeout.total_seconds())
