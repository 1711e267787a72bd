"""How vectors become one: sums in a fixed order, wide enough, so that every worker gets the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from offbeat.tensors.codec import Codec
from offbeat.tensors.vector import Vec, either, wide


def mean(vecs: Sequence[Vec], divisor: float) -> Vec:
    """The sum in the order given, accumulated in at least float32, divided once."""
    if len(vecs) == 1 and divisor == 1:
        return vecs[0].clone()
    first = vecs[0]
    parts = []
    for k, part in enumerate(first.parts):
        total = part.to(wide(part.dtype), copy=True)
        for v in vecs[1:]:
            total += v.parts[k]
        parts.append(total.div_(divisor))
    return Vec(parts, first._phantom_bytes)


def weighted(rows: Iterable[tuple[float, Vec]]) -> Vec:
    """Σ w · x in the order given, accumulated in at least float32."""
    (weight, first), *rest = rows
    parts = []
    for k, part in enumerate(first.parts):
        total = part.to(wide(part.dtype)) * weight
        for w, v in rest:
            total.add_(v.parts[k].to(total.dtype), alpha=w)
        parts.append(total)
    return Vec(parts, first._phantom_bytes)


def owing(x: Vec, lost: Vec | None) -> Vec:
    """What is to be sent: ``x``, and what coding has lost before."""
    return x if lost is None else lost + x


def keep(lost: Vec | None, wanted: Vec, sent: Vec) -> None:
    """Note what was lost this time: of what was ``wanted``, all that was not ``sent``."""
    if lost is not None:
        for kept, w, s in zip(lost.parts, wanted.parts, sent.parts, strict=True):
            torch.sub(w, s, out=kept)
        lost.used = either(wanted.used, sent.used)


def coded(x: Vec, codec: Codec, key: tuple[int, ...]) -> Vec:
    """What arrives when ``x`` is sent through ``codec``."""
    parts = [codec.decode(codec.encode(p, (*key, k)), p) for k, p in enumerate(x.parts)]
    return Vec([p.to(wide(p.dtype)) for p in parts], x._phantom_bytes)
