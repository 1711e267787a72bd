"""Whether NCCL carries sums of all ranks, or the host processes do, through host memory.

NCCL only where the user's own group uses it, and where each rank has a GPU of its own: NCCL refuses two ranks on one.
Every rank posts what it has, and all decide from the same posts, so that all decide alike.
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
    """Of one rank: the default group's backend for CUDA tensors, the GPUs its model lies on, and its host."""

    backend: str | None
    gpus: tuple[str, ...]
    home: str = ""


def here(devices: Iterable[torch.device]) -> Equipment:
    """This rank's, for a model on ``devices``. A GPU is named by what it is called on all machines, not by a number."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    found = {str(torch.cuda.get_device_properties(d).uuid) for d in devices if d.type == "cuda"}
    return Equipment(backends.get("cuda"), tuple(sorted(found)), hosts.home())


def nccl_fits(everyones: Sequence[Equipment]) -> bool:
    """Whether NCCL may be used among these ranks."""
    gpus = [gpu for own in everyones for gpu in own.gpus]
    all_have_some = len(everyones) > 1 and all(own.gpus for own in everyones)
    return all_have_some and len(set(gpus)) == len(gpus) and all(own.backend == "nccl" for own in everyones)


def post(board: Board, own: Equipment) -> None:
    board.publish(f"equipment/{board.rank}", json.dumps(asdict(own)))


def all_have_posted(board: Board) -> bool:
    return all(board.published(f"equipment/{rank}") is not None for rank in range(board.size))


def posted(board: Board) -> list[Equipment]:
    """Everybody's, once all have posted it."""
    texts = [board.published(f"equipment/{rank}") for rank in range(board.size)]
    read = [json.loads(text) for text in texts if text is not None]
    assert len(read) == board.size, "somebody has not posted its equipment"
    return [Equipment(own["backend"], tuple(own["gpus"]), own["home"]) for own in read]
