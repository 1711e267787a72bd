"""Where memory cannot be shared: whoever fails, all take Gloo at once, and one sentence says why."""

from __future__ import annotations

import os
import resource
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat as ob
from offbeat.live.carriers import doors
from tests.support import forge
from tests.support.forge import Job, Outcome
from tests.support.nets import flat, loss, net, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

METHODS = {
    "allreduce": ob.allreduce(),
    "dpsgd": ob.dpsgd("ring"),
    "noloco": ob.noloco(period=1),
}
IN_GROUPS = ("noloco",)  # of which those without the rank that fails share memory
SIZE, STEPS, PATIENCE_S = 4, 4, 90.0
NEVER_S = 10 * PATIENCE_S  # who waits that long runs out of patience first, and fails
Seen = tuple[torch.Tensor, tuple[str, ...], list[str]]


def trained(rank: int, strategy: ob.Strategy) -> Seen:
    """Weights, carriers and the warnings of a short run."""
    model = net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
            for t in range(STEPS):
                optimizer.zero_grad()
                loss(model, rank, t).backward()
                optimizer.step()
    return flat(model), optimizer.carriers, [str(w.message) for w in caught if "cannot be shared" in str(w.message)]


def all_of(rank: int) -> dict[str, Seen]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doors, "MEET_S", NEVER_S)
        return {name: trained(rank, strategy) for name, strategy in METHODS.items()}


@contextmanager
def no_file(rank: int, bad: int) -> Iterator[None]:
    """That rank can make no file in memory."""

    def refuse(*_: object) -> None:
        raise OSError("Cannot allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        if rank == bad:
            patch.setattr(os, "memfd_create", refuse)
        yield


@contextmanager
def small_files(rank: int, bad: int) -> Iterator[None]:
    """The kernel refuses that rank files of more than a mebibyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == bad:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def another_user(rank: int, bad: int) -> Iterator[None]:
    """To that rank, the others are somebody else's."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == bad:
            patch.setattr(os, "getuid", lambda: 12345)
        yield


@contextmanager
def no_room(rank: int, bad: int) -> Iterator[None]:
    """That rank may have no more descriptors when others' come; the kernel drops them, and says so by a flag."""
    receive = socket.recv_fds

    def drop(*args: Any) -> Any:
        data, came, flags, address = receive(*args)
        for one in came:
            os.close(one)
        return data, [], flags | socket.MSG_CTRUNC if came else flags, address

    with pytest.MonkeyPatch.context() as patch:
        if rank == bad:
            patch.setattr(socket, "recv_fds", drop)
        yield


@scenario(SIZE)
def in_good_order(rank: int) -> dict[str, Seen]:
    return all_of(rank)


@scenario(SIZE)
def no_file_at_0(rank: int) -> dict[str, Seen]:
    with no_file(rank, 0):
        return all_of(rank)


@scenario(SIZE)
def no_file_at_1(rank: int) -> dict[str, Seen]:
    with no_file(rank, 1):
        return all_of(rank)


@scenario(SIZE)
def no_file_at_3(rank: int) -> dict[str, Seen]:
    with no_file(rank, 3):
        return all_of(rank)


@scenario(SIZE)
def small_files_at_0(rank: int) -> dict[str, Seen]:
    with small_files(rank, 0):
        return all_of(rank)


@scenario(SIZE)
def small_files_at_2(rank: int) -> dict[str, Seen]:
    with small_files(rank, 2):
        return all_of(rank)


@scenario(SIZE)
def another_user_at_0(rank: int) -> dict[str, Seen]:
    with another_user(rank, 0):
        return all_of(rank)


@scenario(SIZE)
def no_room_at_0(rank: int) -> dict[str, Seen]:
    with no_room(rank, 0):
        return all_of(rank)


@scenario(SIZE)
def no_room_at_3(rank: int) -> dict[str, Seen]:
    with no_room(rank, 3):
        return all_of(rank)


FAILS: dict[str, tuple[Callable[[int], dict[str, Seen]], int, str]] = {
    "no file, rank 0": (no_file_at_0, 0, "Cannot allocate memory"),
    "no file, rank 1": (no_file_at_1, 1, "Cannot allocate memory"),
    "no file, the last": (no_file_at_3, 3, "Cannot allocate memory"),
    "small files, rank 0": (small_files_at_0, 0, "File too large"),
    "small files, rank 2": (small_files_at_2, 2, "File too large"),
    "no room, rank 0": (no_room_at_0, 0, "Too many open files: raise its limit (ulimit -n)"),
    "no room, the last": (no_room_at_3, 3, "Too many open files: raise its limit (ulimit -n)"),
    "another user": (another_user_at_0, 0, "runs as user 12345"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", FAILS)
def test_whoever_fails_all_take_gloo_at_once_and_one_sentence_names_the_cause(
    told: Told, case: str, method: str
) -> None:
    failing, bad, why = FAILS[case]
    outs = [out[method] for out in told(failing)]
    for (weights, *_), (expected, *_) in zip(outs, (out[method] for out in told(in_good_order)), strict=True):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)
    assert outs[bad][1] == ("gloo",)
    if method not in IN_GROUPS:
        assert {carriers for _, carriers, _ in outs} == {("gloo",)}
    (sentence,) = (words for *_, warned in outs for words in warned)
    assert f"(rank {bad}: " in sentence
    assert why in sentence
    assert "vectors travel through Gloo" in sentence


AT_A_CHANNEL = {"eager": ob.eager("everyone"), "wagma": ob.wagma(2, 2, "everyone"), "ad_psgd": ob.ad_psgd()}


def without_room(rank: int, name: str) -> str:
    dist.init_process_group("gloo")
    with no_room(rank, 1):
        return forge.attempt(lambda: trained(rank, AT_A_CHANNEL[name]))


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Outcome]]:
    jobs = [Job(without_room, SIZE, (name,), timeout_s=120) for name in AT_A_CHANNEL]
    return dict(zip(AT_A_CHANNEL, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("method", AT_A_CHANNEL)
def test_where_the_host_process_cannot_hand_its_memory_over_all_ranks_end_with_a_sentence(
    ended: dict[str, list[Outcome]], method: str
) -> None:
    for rank, words in enumerate(forge.values(ended[method])):
        assert "Too many open files: raise their limit (ulimit -n)" in words
        assert rank == 1 or "rank 1 failed" in words
