"""The tests' own tools: a scenario that fails is told of by itself, and a port that is held is nobody else's."""

from __future__ import annotations

import os
import signal
import socket

import pytest
import torch
import torch.distributed as dist

from tests.support import forge
from tests.support.forge import Job
from tests.support.ports import hold_port
from tests.support.scenarios import Call, Told, Turns, in_turn, scenario

SIZE = 2


def sum_of_ranks(rank: int) -> tuple[float, int]:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item(), os.getppid()


def raises_on(rank: int, who: int) -> None:
    if rank == who:
        raise ValueError("the disk is full")


def is_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def never_ends(rank: int) -> None:
    if rank == 1:
        signal.pause()


@pytest.mark.live
def test_one_that_hangs_is_told_of_and_the_next_one_runs() -> None:
    calls = {"first": Call(sum_of_ranks), "hangs": Call(never_ends), "second": Call(sum_of_ranks)}
    turns = in_turn(calls, SIZE, timeout_s=10.0)
    assert [total for total, _ in turns["second"]] == [1.0, 1.0]
    with pytest.raises(AssertionError, match=r"scenario hangs: [\s\S]*rank 1, hung \(-9\)"):
        turns["hangs"]


@pytest.fixture(scope="module")
def turns() -> Turns[str]:
    calls = {
        "first": Call(sum_of_ranks),
        "raises": Call(raises_on, (1,)),
        "second": Call(sum_of_ranks),
        "is killed": Call(is_killed),
        "third": Call(sum_of_ranks),
        "raises at the end": Call(raises_on, (0,)),
    }
    return in_turn(calls, SIZE)


@pytest.mark.live
@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_scenarios_before_and_behind_one_that_fails_run(turns: Turns[str], name: str) -> None:
    assert [total for total, _ in turns[name]] == [1.0, 1.0]


@pytest.mark.live
def test_all_of_them_are_forked_from_one_process(turns: Turns[str]) -> None:
    assert len({parent for name in ("first", "second", "third") for _, parent in turns[name]}) == 1


@pytest.mark.live
@pytest.mark.parametrize("name", ["raises", "raises at the end"])
def test_one_that_raises_is_told_of_with_its_rank_and_its_words(turns: Turns[str], name: str) -> None:
    with pytest.raises(AssertionError, match=rf"scenario {name}: [\s\S]*ValueError: the disk is full"):
        turns[name]


@pytest.mark.live
def test_one_that_is_killed_is_told_of_with_its_rank(turns: Turns[str]) -> None:
    with pytest.raises(AssertionError, match=r"scenario is killed: rank 1, ended \(-9\)"):
        turns["is killed"]


@scenario(SIZE)
def of_this_module(rank: int) -> int:
    return rank + 10


@pytest.mark.live
def test_the_scenarios_of_a_module_are_found_by_their_mark(told: Told) -> None:
    assert told(of_this_module) == [10, 11]


def hosted(rank: int) -> float:
    dist.init_process_group("gloo")
    return sum_of_ranks(rank)[0]


@pytest.mark.live
def test_rank_0_can_host_the_store_on_a_port_that_is_held() -> None:
    (outcomes,) = forge.run([Job(hosted, SIZE, rank_0_hosts=True)])
    assert forge.values(outcomes) == [1.0, 1.0]


def test_a_port_that_is_held_is_given_to_nobody_else() -> None:
    with hold_port() as held:
        for _ in range(200):
            with socket.socket() as other:
                other.bind(("127.0.0.1", 0))
                assert other.getsockname()[1] != held.getsockname()[1]
