"""Memory of a GPU that one rank cannot make, open or map: nobody waits for it. Files stand in for the GPU's memory."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import offbeat as ob
from offbeat.live.carriers import doors, memory
from offbeat.live.carriers.memory import DeviceMemory
from offbeat.live.carriers.sharing import shared
from offbeat.live.memory import device
from tests.support.nets import net, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

SIZE, PATIENCE_S = 3, 90.0
NEVER_S = 10 * PATIENCE_S
Seen = dict[str, tuple[bool, list[str]]]


class OnDisk:
    """What an allocation of a GPU's memory is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    @classmethod
    def make(cls, nbytes: int, where: torch.device) -> OnDisk:
        own = cls(f"{os.getpid()}")
        Path(os.environ["JOB_FOLDER"], own._name).write_bytes(bytes(nbytes))
        return own

    @classmethod
    def open(cls, handle: bytes, where: torch.device) -> OnDisk:
        return cls(handle.rstrip(b"\0").decode())

    @property
    def handle(self) -> bytes:
        return self._name.encode().ljust(device.HANDLE_BYTES, b"\0")

    def tensor(self, dtype: torch.dtype, numel: int, offset: int) -> Tensor:
        there = Path(os.environ["JOB_FOLDER"], self._name)
        return torch.from_numpy(np.memmap(there, np.float64, "r+", offset, (numel,)))

    def free(self) -> None:
        pass


def raising(error: Exception) -> Any:
    def refuse(*_: object) -> None:
        raise error

    return refuse


@contextmanager
def failing(rank: int, bad: int, where: str) -> Iterator[None]:
    """That rank cannot ``make`` its own, ``open`` the others', or map the ``file`` beside them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "Allocation", OnDisk)
        patch.setattr(DeviceMemory, "settle", lambda self: None)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(doors, "MEET_S", NEVER_S)
        if rank == bad and where == "make":
            patch.setattr(OnDisk, "make", raising(RuntimeError("CUDA error: out of memory\nCompile with …")))
        elif rank == bad and where == "open":
            patch.setattr(OnDisk, "open", raising(OSError("cuIpcOpenMemHandle_v2: invalid argument")))
        elif rank == bad and where == "file":
            patch.setattr(mmap, "mmap", raising(OSError(12, "Cannot allocate memory")))
        yield


CASES = {
    "nobody": (0, "", ""),
    "make, the first": (0, "make", "memory on its GPU cannot be shared: CUDA error: out of memory)"),
    "make, a middle one": (1, "make", "memory on its GPU cannot be shared: CUDA error: out of memory)"),
    "make, the last": (2, "make", "memory on its GPU cannot be shared: CUDA error: out of memory)"),
    "open": (1, "open", "memory on its GPU cannot be shared: cuIpcOpenMemHandle_v2: invalid argument)"),
    "file": (2, "file", "[Errno 12] Cannot allocate memory)"),
}


@scenario(SIZE)
def tried(rank: int) -> Seen:
    """For each case, whether this rank has its memory, and what it was warned of."""
    model, ranks, out = net(), tuple(range(SIZE)), Seen()
    with ob.attach(sgd(model), model, ob.allreduce(), patience_s=PATIENCE_S) as optimizer:
        transport = optimizer._run.transport
        board, waiter = transport._board, transport.waiter
        for name, (bad, where, _) in CASES.items():
            with warnings.catch_warnings(record=True) as caught, failing(rank, bad, where):
                warnings.simplefilter("always")
                there = torch.device("cpu")

                def make(name: str = name, there: torch.device = there) -> DeviceMemory:
                    return DeviceMemory(name, ranks, 64, 1, there, board, waiter)

                found = shared(name, ranks, make, board, waiter)
                out[name] = found is not None, [str(w.message) for w in caught]
                if found is not None:
                    found.close()
    return out


@pytest.mark.parametrize("case", CASES)
def test_where_one_rank_cannot_share_its_gpus_memory_nobody_does_and_one_sentence_says_why(
    told: Told, case: str
) -> None:
    bad, where, why = CASES[case]
    for rank, seen in enumerate(told(tried)):
        found, warned = seen[case]
        assert found == (where == "")
        assert len(warned) == (rank == 0 and where != "")
        assert all(f"(rank {bad}: {why}: vectors travel through Gloo" in words for words in warned)


def test_a_call_that_the_driver_does_not_know_is_told_as_an_error_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "_driver", object)
    with pytest.raises(OSError, match="this driver has no cuIpcOpenMemHandle_v2"):
        device.call_driver("cuIpcOpenMemHandle_v2")
