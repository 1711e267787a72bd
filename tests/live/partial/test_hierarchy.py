"""Nodes between real processes: in step inside, without waiting between them."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from tests.live.partial.hierarchy_jobs import PAIRS
from tests.live.partial.partial_jobs import AT_MOST, Seen
from tests.support import forge
from tests.support.forge import Job

pytestmark = pytest.mark.live

EVEN, UNEVEN = (8, 8, 8, 8), (10, 7, 0, 13)
EMPTY = (6, 7, 0, 0, 3, 9)  # a node without any data
AVERAGED = [(7, 7, 7, 0), (7, 7, 0, 0)]  # a rank that has finished in a node that has not, and a node that has
FAILS = [("first", "raised", 1), ("first", "raised", 2), ("wagma", "killed", 3)]
PLAN: dict[Any, Job] = {
    **{
        b: Job("tests.live.partial.hierarchy_jobs", "all_pairs", len(b), (len(b), b, ()), timeout_s=300)
        for b in (EVEN, UNEVEN, EMPTY)
    },
    **{b: Job("tests.live.partial.hierarchy_jobs", "all_pairs", 4, (4, b, (2, 5)), timeout_s=300) for b in AVERAGED},
    "lockstep": Job("tests.live.partial.hierarchy_jobs", "in_lockstep", 4, (), timeout_s=300),
    "contributors": Job("tests.live.partial.hierarchy_jobs", "contributors", 4, (), timeout_s=300),
    "allreduce": Job("tests.live.partial.hierarchy_jobs", "beside_allreduce", 4, (4,), timeout_s=300),
    **{fails: Job("tests.live.partial.hierarchy_jobs", "failing", 4, fails, timeout_s=120) for fails in FAILS},
}


@pytest.fixture(scope="module")
def told() -> dict[Any, list[forge.Outcome]]:
    return dict(zip(PLAN, forge.run(list(PLAN.values())), strict=True))


def seen(told: Any, key: Any, name: str) -> list[Seen]:
    return [out[name] for out in forge.values(told[key])]


def applied(batches: tuple[int, ...]) -> torch.Tensor:
    """What the slots hold, times P: a node's mean is over those of it who had data in that step."""
    slots = torch.zeros(len(batches), AT_MOST, dtype=torch.float64)
    for rank, count in enumerate(batches):
        first = rank - rank % 2
        for step in range(count):
            slots[rank, step] = 2.0 / sum(step < other for other in batches[first : first + 2])
    return slots.reshape(-1)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("batches", [EVEN, UNEVEN, EMPTY], ids=["even", "uneven", "an empty node"])
def test_a_run_of_nodes_ends_with_equal_replicas_and_leaves_nothing_behind(
    told: Any, batches: tuple[int, ...], name: str
) -> None:
    everyone = seen(told, batches, name)
    assert all(torch.equal(one.final, everyone[0].final) for one in everyone)
    assert [(one.threads, one.sockets) for one in everyone] == [([], 0)] * len(batches)


@pytest.mark.parametrize("name", [n for n in PAIRS if n not in ("wagma", "wagma, coded")])
@pytest.mark.parametrize("batches", [EVEN, UNEVEN, EMPTY], ids=["even", "uneven", "an empty node"])
def test_every_sample_of_every_node_is_applied_once(told: Any, batches: tuple[int, ...], name: str) -> None:
    assert torch.allclose(seen(told, batches, name)[0].final * len(batches), applied(batches), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("batches", AVERAGED, ids=["a rank has finished", "a node has finished"])
def test_an_average_in_the_middle_makes_all_nodes_equal(told: Any, batches: tuple[int, ...], name: str) -> None:
    outs = seen(told, batches, name)
    training = [out for out, count in zip(outs, batches, strict=True) if count]
    assert [len(out.averages) for out in outs] == [2 if count else 0 for count in batches]
    for number in (0, 1):
        assert all(torch.equal(out.averages[number], outs[0].averages[number]) for out in training)
    assert all(torch.equal(out.final, outs[0].final) for out in outs)
    if name not in ("wagma", "wagma, coded"):
        assert torch.allclose(outs[0].final * 4, applied(batches), rtol=0, atol=1e-9)


def test_the_ranks_of_a_node_have_the_same_bits_after_every_step(told: Any) -> None:
    a, b, c, d = forge.values(told["lockstep"])
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(c, d, strict=True))


def test_nodes_that_wait_for_one_another_are_allreduce(told: Any) -> None:
    for allreduce, one_node, two_nodes in forge.values(told["allreduce"]):
        assert torch.equal(one_node, allreduce)
        torch.testing.assert_close(two_nodes, allreduce)


def test_every_result_says_to_all_of_a_node_who_contributed_and_how_stale(told: Any) -> None:
    outs = forge.values(told["contributors"])
    rounds = {r.version: r for r in outs[0][1]}
    assert len(rounds) >= 30
    for said, _ in outs:
        assert said == {version: r.staleness for version, r in rounds.items()}


@pytest.mark.parametrize("name", ["first", "bounded", "wagma"])
def test_rounds_are_told_by_leaders_and_name_whole_nodes(told: Any, name: str) -> None:
    outs = seen(told, EVEN, name)
    assert [bool(out.rounds) for out in outs] == [True, False, True, False]
    for out in outs:
        for r in out.rounds:
            assert all((rank ^ 1) in r.fresh for rank in r.fresh)
            assert all(r.staleness[rank ^ 1] == old for rank, old in r.staleness.items())
            assert set(r.fresh) <= set(r.staleness)
            assert min(r.staleness.values(), default=0) >= 0


@pytest.mark.parametrize(("name", "how", "who"), FAILS)
def test_when_one_rank_of_a_node_fails_all_nodes_end_and_say_who(told: Any, name: str, how: str, who: int) -> None:
    outcomes = told[name, how, who]
    reason = f"rank {who} failed: ValueError: the disk is full" if how == "raised" else f"rank {who} gives no sign of"
    assert outcomes[who].exit_code == (1 if how == "raised" else -signal.SIGKILL)
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert (outcome.exit_code, outcome.hung) == (1, False), outcome.stderr
            assert reason in outcome.error
