"""NCCL carries full collectives only where the user's group uses it and no two ranks share a GPU. Asked without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat as ob
from offbeat.live.carriers import gpus
from offbeat.live.carriers.gpus import Equipment, nccl_fits
from tests.support import forge
from tests.support.forge import Job
from tests.support.nets import PATIENCE_S, flat, net, sgd


def on(*each: tuple[str, ...], backend: str | None = "nccl") -> list[Equipment]:
    return [Equipment(backend, one) for one in each]


TABLE = {
    "a GPU for each rank": (on(("a",), ("b",), ("c",)), True),
    "two GPUs for each rank": (on(("a", "b"), ("c", "d")), True),
    "two ranks on one GPU": (on(("a",), ("b",), ("a",)), False),
    "all on one GPU": (on(("a",), ("a",)), False),
    "one of two GPUs is shared": (on(("a", "b"), ("b", "c")), False),
    "the user chose Gloo": (on(("a",), ("b",), backend="gloo"), False),
    "the user's group has nothing for GPUs": (on(("a",), ("b",), backend=None), False),
    "one rank's group is another": ([*on(("a",)), *on(("b",), backend="gloo")], False),
    "no GPU": (on((), ()), False),
    "one rank has none": (on(("a",), ()), False),
    "one rank alone": (on(("a",)), False),
}


@pytest.mark.parametrize("case", TABLE)
def test_nccl_is_chosen_only_where_the_user_chose_it_and_nobody_shares_a_gpu(case: str) -> None:
    everyones, fits = TABLE[case]
    assert nccl_fits(everyones) is fits


def that_read(*each: tuple[str, tuple[str, ...]]) -> list[Equipment]:
    return [Equipment(None, (own,) if own else (), "", reads) for own, reads in each]


ALL = ("a", "b", "c")
# Where slots lie: as it is, and as if each rank had a GPU of its own, that reads the others' memory or does not.
SLOTS = {
    "all on one GPU": (that_read(("a", ALL), ("a", ALL)), ("a",), ("a", "a"), ()),
    "GPUs that read each other": (that_read(("b", ALL), ("a", ALL)), ("a", "b"), ("b", "a"), ()),
    "one that reads its own alone": (that_read(("a", ("a",)), ("b", ALL)), (), (), ()),
    "one that sees no other": (that_read(("a", ("a",)), ("b", ("b",))), (), (), ()),
    "no GPU": (that_read(("", ()), ("", ())), (), (), ()),
}


@pytest.mark.parametrize("case", SLOTS)
def test_slots_lie_on_gpus_only_where_each_reads_all(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everyones, *expected = SLOTS[case]
    for as_if, found in zip(("", "peers", "each"), expected, strict=True):
        monkeypatch.setenv("OFFBEAT_GPUS", as_if)
        assert gpus.of_slots(everyones) == found


def test_a_word_that_is_none_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_GPUS", "both")
    with pytest.raises(ob.OffbeatError, match="OFFBEAT_GPUS='both' is no choice; use 'each' or 'peers'"):
        gpus.of_slots(that_read(("a", ALL), ("b", ALL)))


def asked(rank: int, backend: str, shared: bool) -> tuple[list[Any], Any]:
    """A run whose ranks say that they have GPUs; the group that would be made of them, and the weights at the end."""
    dist.init_process_group("gloo")
    made: list[Any] = []
    gpus.here = lambda devices: Equipment(backend, ("a",) if shared else (f"gpu {rank}",))
    torchs: Any = dist
    new_group, destroy = dist.new_group, dist.destroy_process_group

    def make(backend: str, **_: Any) -> str:
        made.append(backend)
        return backend

    torchs.new_group, torchs.destroy_process_group = make, made.remove
    model = net()
    with ob.attach(sgd(model), model, ob.allreduce(), patience_s=PATIENCE_S) as optimizer:
        during = list(made)
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
    torchs.new_group, torchs.destroy_process_group = new_group, destroy
    dist.destroy_process_group()
    return [during, made], flat(model)


CHOICES = {("nccl", False): ["nccl"], ("nccl", True): [], ("gloo", False): []}


@pytest.mark.live
@pytest.mark.parametrize("choice", CHOICES)
def test_all_ranks_are_asked_and_decide_alike(choice: tuple[str, bool]) -> None:
    (outcomes,) = forge.run([Job(asked, 2, choice)])
    outs = forge.values(outcomes)
    for groups, weights in outs:
        assert groups == [CHOICES[choice], []]
        assert torch.equal(weights, outs[0][1])
