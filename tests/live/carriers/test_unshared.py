"""Where no host process can be used: whoever fails, all do without it at once, and one sentence says why."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.live.worker import start
from tests.support.nets import flat, loss, net, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

METHODS = {
    "allreduce": ob.allreduce(),
    "dpsgd": ob.dpsgd("ring"),
    "noloco": ob.noloco(period=1),
    "eager": ob.eager("everyone"),
    "wagma": ob.wagma(2, 2, "everyone"),
    "ad_psgd": ob.ad_psgd(),
}
AT_A_CHANNEL = ("eager", "wagma", "ad_psgd")
BY_CHANCE = ("ad_psgd",)  # whose weights depend on who met when
SIZE, STEPS, PATIENCE_S = 4, 4, 90.0
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
    return flat(model), optimizer.carriers, [str(w.message) for w in caught if "no host process" in str(w.message)]


def all_of(rank: int) -> dict[str, Seen]:
    return {name: trained(rank, strategy) for name, strategy in METHODS.items()}


@contextmanager
def no_room(rank: int, bad: int) -> Iterator[None]:
    """That rank may have no more descriptors when the arena's comes; the kernel drops it, and says so by a flag."""
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
def no_room_at_0(rank: int) -> dict[str, Seen]:
    with no_room(rank, 0):
        return all_of(rank)


@scenario(SIZE)
def no_room_at_3(rank: int) -> dict[str, Seen]:
    with no_room(rank, 3):
        return all_of(rank)


@scenario(SIZE)
def no_process(rank: int) -> dict[str, Seen]:
    """Whoever starts one, it ends at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "spawn", lambda listener, token: None)
        return all_of(rank)


FAILS: dict[str, tuple[Callable[[int], dict[str, Seen]], int, str]] = {
    "no room, rank 0": (no_room_at_0, 0, "Too many open files: raise their limit (ulimit -n)"),
    "no room, the last": (no_room_at_3, 3, "Too many open files: raise their limit (ulimit -n)"),
    "no process": (no_process, 0, "has ended 3 times before it answered"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", FAILS)
def test_whoever_fails_all_do_without_it_at_once_and_one_sentence_names_the_cause(
    told: Told, case: str, method: str
) -> None:
    failing, bad, why = FAILS[case]
    outs = [out[method] for out in told(failing)]
    good = [out[method] for out in told(in_good_order)]
    for (weights, *_), (expected, *_) in zip(outs, good, strict=True):
        if method not in BY_CHANCE:
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)
    assert {carriers for _, carriers, _ in good} == {("shm",)}
    if method in AT_A_CHANNEL:  # what is in step may still go through memory that the ranks share themselves
        assert {carriers for _, carriers, _ in outs} == {("gloo",)}
    (sentence,) = (words for *_, warned in outs for words in warned)
    assert f"(rank {bad}: " in sentence
    assert why in sentence
    assert "vectors travel through Gloo" in sentence
