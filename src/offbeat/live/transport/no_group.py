"""The default process group of a worker that has come back: it knows rank and size, and reaches nobody.

The others' group was made with this worker's predecessor, and Gloo lets nobody take a place in it. What Offbeat does
needs none; a collective of the script's own would wait for ever, and is refused in a sentence.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Store

from offbeat.live.transport.elsewhere import COLLECTIVES, MESSAGES
from offbeat.live.transport.errors import OffbeatError

BACKEND = "offbeat_returned"


class NoGroup(ProcessGroup):
    """Of one worker that has come back."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    def getBackendName(self) -> str:  # torch's own name
        return BACKEND


def _refused(name: str) -> Any:
    def refuse(group: NoGroup, *args: Any, **kwargs: Any) -> NoReturn:
        raise OffbeatError(
            f"{name} of torch.distributed was called in a worker that has come back, and the others' process group was "
            "made without it; leave the script's own collectives out where workers may come back"
        )

    return refuse


for _name in (*COLLECTIVES, *MESSAGES):
    setattr(NoGroup, _name, _refused(_name))


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> NoGroup:
    return NoGroup(rank, size)


def init(store: Store, rank: int, size: int) -> None:
    """Let `torch.distributed` know of it."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
