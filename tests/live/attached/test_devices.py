"""Which device a rank trains on: what ``ob.init()`` answers, with made-up GPUs, and what ``attach`` warns of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import offbeat as ob


class Gpus:
    """So many of them, as torch tells of them. Whoever asks for the current one has initialised CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.count, self.current, self.initialized, self.chosen = count, 0, False, list[int]()
        for name in ("is_available", "is_initialized", "device_count", "set_device", "current_device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def is_available(self) -> bool:
        return self.count > 0

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: int) -> None:
        assert 0 <= device < self.count
        self.current, self.initialized = device, True
        self.chosen.append(device)

    def current_device(self) -> int:
        self.initialized = True
        return self.current


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The group that ``ob.init()`` makes ends with what is attached to it."""
    yield
    with pytest.MonkeyPatch.context() as without:
        without.delenv("LOCAL_RANK", raising=False)
        attach(nn.Linear(1, 1)).finish()
    if dist.is_initialized():  # the script's own
        dist.destroy_process_group()


def attach(model: nn.Module) -> ob.Attached:
    return ob.attach(torch.optim.SGD(nn.Module.parameters(model), lr=0.1), model, ob.allreduce())


@pytest.mark.parametrize(("number", "gpus", "device"), [(0, 1, 0), (0, 8, 0), (5, 8, 5), (5, 4, 1), (3, 1, 0)])
def test_a_rank_takes_the_gpu_of_its_number_on_the_host_and_shares_where_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch, number: int, gpus: int, device: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(number))
    with pytest.MonkeyPatch.context() as here:
        box = Gpus(here, gpus)
        assert ob.init() == torch.device("cuda", device)
        assert ob.init() == torch.device("cuda", device)
        assert box.chosen == [device], "once"


def test_without_a_number_on_the_host_the_rank_counts_also_in_a_group_of_the_scripts_own() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as here:
        Gpus(here, 4)
        here.delenv("LOCAL_RANK", raising=False)
        here.setattr(dist, "get_rank", lambda: 11)
        assert ob.init() == torch.device("cuda", 3)


def test_a_script_that_has_chosen_a_gpu_is_left_its_choice() -> None:
    with pytest.MonkeyPatch.context() as here:
        here.setenv("LOCAL_RANK", "5")
        box = Gpus(here, 8)
        torch.cuda.set_device(2)
        assert ob.init() == torch.device("cuda", 2)
        assert box.chosen == [2]


def test_without_cuda_it_is_the_cpu() -> None:
    with pytest.MonkeyPatch.context() as here:
        box = Gpus(here, 0)
        assert ob.init() == torch.device("cpu")
        assert not box.initialized


def test_attach_alone_touches_no_gpu() -> None:
    with pytest.MonkeyPatch.context() as here:
        box = Gpus(here, 8)
        attach(nn.Linear(1, 1)).finish()
        assert not box.initialized


class SaysItIsOn(nn.Linear):
    """A model that tells of another device than it has."""

    def __init__(self, device: str) -> None:
        super().__init__(1, 1)
        self.told = torch.device(device)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter([SimpleNamespace(device=self.told)])


@pytest.mark.parametrize(
    ("number", "gpus", "device", "warned"),
    [(3, 8, "cuda:0", True), (0, 8, "cuda:0", False), (3, 8, "cuda:3", False), (3, 1, "cuda:0", False)],
)
def test_a_model_on_the_first_gpu_of_several_is_warned_of_unless_it_belongs_there(
    number: int, gpus: int, device: str, warned: bool
) -> None:
    with pytest.MonkeyPatch.context() as here, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        here.setenv("LOCAL_RANK", str(number))
        here.setattr(torch.cuda, "device_count", lambda: gpus)
        attach(SaysItIsOn(device)).finish()
    sentence = (
        f"the model of local rank {number} is on cuda:0, as that of local rank 0, and there are {gpus} GPUs; move"
    )
    assert [str(one.message).startswith(sentence) for one in heard] == [True] * warned
    assert all("device = ob.init(), then model.to(device)" in str(one.message) for one in heard)
    assert all(one.filename == __file__ for one in heard), "it points at the line that attaches"


def test_warnings_point_at_the_line_of_the_script() -> None:
    def never_stepped() -> None:
        model = nn.Linear(2, 1)
        optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, "eager")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.finish()

    def in_part() -> None:
        model = nn.Linear(2, 1)
        both = nn.Sequential(model, nn.Linear(1, 1))
        ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), both, "eager").finish()

    for mistake, words in ((never_stepped, "never called"), (in_part, "will not be trained")):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            mistake()
        (one,) = [one for one in heard if words in str(one.message)]
        assert one.filename == __file__
