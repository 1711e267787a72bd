"""Methods whose result does not depend on timing, with settings that differ: a table that several tests run over."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import offbeat as ob

DEPENDS_ON_TIMING = {"decoupled", "eager", "ringmaster", "msync", "self_clocked", "wagma", "nonblocking", "ad_psgd"}
IN_STEP: dict[str, ob.Strategy] = {
    str(s): s
    for s in (
        ob.allreduce(),
        ob.qsgd(),
        ob.qsgd(bits=4, bucket=64),
        ob.local_sgd(),
        ob.local_sgd(period=3),
        ob.local_sgd(period=2, moments=1),
        ob.local_sgd(period=3, codec=ob.codec.qsgd(8), moments="1/1"),
        ob.local_sgd(period=3, codec=ob.codec.qsgd(8)),
        ob.local_sgd(period=2, codec=ob.codec.int8(bucket=7)),
        ob.local_sgd(period=3, codec=ob.codec.topk(8, chunk=50)),
        ob.adaptive(),
        ob.adaptive(period=2, sampling=4),
        ob.adaptive(period=2, sampling=4, moments="1/2"),
        ob.dasgd(),
        ob.dasgd(period=3, delay=2, merge="correct"),
        ob.dasgd(period=4, delay=1, codec=ob.codec.qsgd(8)),
        ob.dasgd(period=3, delay=2, merge="correct", codec=ob.codec.bf16()),
        ob.dpsgd(),
        ob.dpsgd(order="atc"),
        ob.dpsgd("complete"),
        ob.dpsgd(codec=ob.codec.qsgd(8)),
        ob.sgp(),
        ob.sgp("ring"),
        ob.matcha(),
        ob.matcha("complete", budget=0.7),
        ob.diloco(),
        ob.diloco(period=4),
        ob.diloco(period=6, fragments=2, overlap=1, merge=0.5),
        ob.diloco(period=6, fragments=2, overlap=1, codec=ob.codec.qsgd(4, bucket=33)),
        ob.sparseloco(),
        ob.sparseloco(period=3, codec=ob.codec.topk(8, chunk=50)),
        ob.sparseloco(period=4, decay=0.5, outer_lr=0.7, codec=ob.codec.qsgd(4, bucket=33)),
        ob.noloco(),
        ob.noloco(period=3),
    )
}


def task() -> ob.Task:
    """Digits with a little noise. Their pixels are whole numbers, so entries of a gradient are equal, and which of them
    are the largest would be a matter of the last bit, which the worlds do not share on every processor.
    """
    digits = ob.tasks.digits(batch=8, hidden=12, momentum=0.9, lr=0.05, dtype=torch.float64)

    def batch(rank: int, step: int) -> tuple[Tensor, ...]:
        x, y = digits.batch(rank, step)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=x.dtype)
        return x + 0.01 * noise, y

    return replace(digits, batch=batch)
