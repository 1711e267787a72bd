"""Between a model's device and the host memory that rounds and visits work on.

On the way down a copy runs on a stream of its own, into pinned memory, after all that the worker's stream has queued;
the host waits for that one copy. So a tray is whole before anybody is told of it: the interleaving this prevents is a
clerk that sums a tray while the copy into it still runs. On the way up the worker's stream waits, the host does not;
torch keeps pinned memory from being used again while such a copy reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.tensors.vector import Vec, wide


class Staging:
    """Copies vectors that look like ``like`` down and up. On the host itself there is nothing to copy."""

    def __init__(self, like: Vec) -> None:
        self._devices = [p.device for p in like.parts]
        self._streams = {d: torch.cuda.Stream(d) for d in self._devices if d.type == "cuda"}
        self._stays = not self._streams and all(p.dtype == wide(p.dtype) for p in like.parts)

    def down(self, x: Vec) -> Vec:
        """``x`` in host memory, in the dtypes in which it can be summed; complete when this returns.

        What needs no copy is not copied: a tray does that.
        """
        if self._stays:
            return x
        begun = [self._begin(p) for p in x.parts]
        for stream in self._streams.values():
            torch.cuda.Event.synchronize(stream.record_event())
        return Vec(begun, used=x.used)

    def _begin(self, p: Tensor) -> Tensor:
        if not p.is_cuda:
            return p.to(device="cpu", dtype=wide(p.dtype))
        stream = self._streams[p.device]
        stream.wait_stream(torch.cuda.current_stream(p.device))
        with torch.cuda.stream(stream):
            host = torch.empty(p.shape, dtype=wide(p.dtype), pin_memory=True)
            host.copy_(p.to(wide(p.dtype)), non_blocking=True)
        return host

    def up(self, x: Vec) -> Vec:
        """``x`` where the model lives; on a device it may still be on its way, for the current stream to wait for."""
        if not self._streams:
            return x
        return Vec([_up(p, device) for p, device in zip(x.parts, self._devices, strict=True)], used=x.used)


def _up(p: Tensor, device: torch.device) -> Tensor:
    return p.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else p
