"""torch's own DistributedDataParallel as a member of a comparison: the same loop, the same clock, nothing of ours."""

from __future__ import annotations

import time
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from offbeat.method.facts import Facts
from offbeat.runs.trace import Trace
from offbeat.tensors.wire import all_reduce_bytes

NAME = "ddp"
FACTS = Facts(meets="everyone", waits_where_it_begins=True)


class Ddp:
    """An optimiser whose model is wrapped by DDP, with what the worker reads of an attached one.

    DDP does not say how long it waits. The last gradient of a backward is there when the last of these hooks runs;
    what ``backward()`` takes from then on is waiting for the others and for the network.
    """

    def __init__(self, inner: torch.optim.Optimizer, model: nn.Module) -> None:
        self.inner, self.model = inner, DistributedDataParallel(model)
        self.wait_s, self.wire_bytes, self.trace = 0.0, 0, Trace()
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.carriers = ("nccl" if self._parameters[0].is_cuda else "gloo",)
        self._last_gradient_s = 0.0
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self._parameters]
        size = dist.get_world_size()
        nbytes = sum(p.numel() * p.element_size() for p in self._parameters)
        self._bytes_a_step = all_reduce_bytes(size, nbytes) // size

    def _arrived(self, _: Tensor) -> None:
        self._last_gradient_s = time.monotonic()

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)
        self.wait_s += time.monotonic() - self._last_gradient_s
        self.wire_bytes += self._bytes_a_step

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.inner.step()

    @property
    def final(self) -> Tensor:
        return torch.cat([p.detach().cpu().reshape(-1) for p in self._parameters])

    def __enter__(self) -> Ddp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
