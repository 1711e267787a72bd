"""What the ranks' GPUs are good for: whether NCCL carries sums of all ranks, and whether slots lie on GPUs.

NCCL only where the user's own group uses it, and where each rank has a GPU of its own: NCCL refuses two ranks on one.
Slots lie on GPUs where every rank's GPU reads the memory of all others directly, or where there is but one. Every rank
posts what it has, and all decide from the same posts, so that all decide alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from offbeat.live.transport import hosts
from offbeat.live.worker.board import Board


@dataclass(frozen=True)
class Equipment:
    """Of one rank: the default group's backend for CUDA tensors, the GPUs its model lies on, its host, and the GPUs
    whose memory its own read directly.
    """

    backend: str | None
    gpus: tuple[str, ...]
    home: str = ""
    reads: tuple[str, ...] = ()


def here(devices: Iterable[torch.device]) -> Equipment:
    """This rank's, for a model on ``devices``. A GPU is named by what it is called on all machines, not by a number."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    own = sorted({_number(d) for d in devices if d.type == "cuda"})
    every = range(torch.cuda.device_count()) if own else ()
    read = [k for k in every if all(k == one or torch.cuda.can_device_access_peer(one, k) for one in own)]
    return Equipment(backends.get("cuda"), _named(own), hosts.home(), _named(read))


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _named(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(sorted(str(torch.cuda.get_device_properties(k).uuid) for k in numbers))


def nccl_fits(everyones: Sequence[Equipment]) -> bool:
    """Whether NCCL may be used among these ranks."""
    gpus = [gpu for own in everyones for gpu in own.gpus]
    all_have_some = len(everyones) > 1 and all(own.gpus for own in everyones)
    return all_have_some and len(set(gpus)) == len(gpus) and all(own.backend == "nccl" for own in everyones)


def of_slots(everyones: Sequence[Equipment]) -> tuple[str, ...]:
    """The GPUs of all ranks, of one host, if slots can lie there; one after the other is given a slot."""
    gpus = sorted({gpu for own in everyones for gpu in own.gpus})
    as_if = hosts.gpus_as_if()
    if as_if == "each" or not all(set(own.reads).issuperset(gpus) for own in everyones):
        return ()
    return tuple(gpus) if as_if is None else tuple(gpu for own in everyones for gpu in own.gpus)


def post(board: Board, own: Equipment) -> None:
    board.publish(f"equipment/{board.rank}", json.dumps(asdict(own)))


def all_have_posted(board: Board) -> bool:
    return all(board.published(f"equipment/{rank}") is not None for rank in range(board.size))


def posted(board: Board) -> list[Equipment]:
    """Everybody's, once all have posted it."""
    texts = [board.published(f"equipment/{rank}") for rank in range(board.size)]
    read = [json.loads(text) for text in texts if text is not None]
    assert len(read) == board.size, "somebody has not posted its equipment"
    return [Equipment(own["backend"], tuple(own["gpus"]), own["home"], tuple(own["reads"])) for own in read]
