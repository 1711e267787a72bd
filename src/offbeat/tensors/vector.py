"""A model's weights as one vector, although it may hold several dtypes.

A ``Vec`` is a short tuple of one-dimensional tensors (one per dtype and device) that is added, scaled and mixed as
one. Methods are written on it, so that a model with float32 and bfloat16 layers needs no word in any of them. A
*phantom* holds no tensors but knows its size: time-only simulation runs the very same methods on phantoms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of ``dtype`` are summed: at least float32; float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)


_NOTHING = nullcontext()


def no_grad() -> AbstractContextManager[Any]:
    """``torch.no_grad()``, which takes twenty calls, unless gradients are not asked for anyway, as in a hook."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


Used = tuple[bool, ...] | None


def either(a: Used, b: Used) -> Used:
    """What a sum of two vectors uses."""
    return None if a is None or b is None else tuple(x or y for x, y in zip(a, b, strict=True))


class Vec:
    """One vector, held as a few tensors. In-place methods end in an underscore, as in torch.

    A gradient may know which of the model's parameters were ``used`` to make it (``None``: all, or nobody asks); the
    others read as zeros. What is scaled or copied knows what it was made of, and a sum uses what either did.
    """

    __slots__ = ("_phantom_bytes", "cut", "parts", "used")

    def __init__(self, parts: Sequence[Tensor], phantom_bytes: int = 0, used: Used = None) -> None:
        self.parts = tuple(parts)
        self._phantom_bytes = phantom_bytes
        self.used = used
        self.cut: list[Tensor] | None = None  # the model's tensors in it, kept by who has cut them out

    @property
    def nbytes(self) -> int:
        """Bytes on the wire without a codec."""
        return sum(p.numel() * p.element_size() for p in self.parts) + self._phantom_bytes

    @property
    def numel(self) -> int:
        """How many numbers (a phantom's are float32)."""
        return sum(p.numel() for p in self.parts) + self._phantom_bytes // 4

    def __repr__(self) -> str:
        return f"Vec({', '.join(f'{p.numel()} {p.dtype}' for p in self.parts) or f'phantom, {self._phantom_bytes} B'})"

    def _zip(self, other: Vec | float, op: Callable[[Tensor, Tensor | float], Tensor]) -> Vec:
        if not isinstance(other, Vec):
            return Vec([op(p, other) for p in self.parts], self._phantom_bytes, self.used)
        if len(other.parts) == 1 and other.parts[0].numel() == 1:  # a scalar, such as push-sum's weight
            scalar = other.parts[0]
            return Vec([op(p, scalar.to(p.dtype)) for p in self.parts], self._phantom_bytes, self.used)
        parts = [op(p, q) for p, q in zip(self.parts, other.parts, strict=True)]
        return Vec(parts, self._phantom_bytes, either(self.used, other.used))

    def __add__(self, other: Vec | float) -> Vec:
        return self._zip(other, torch.add)

    def __sub__(self, other: Vec | float) -> Vec:
        return self._zip(other, torch.sub)

    def __mul__(self, other: Vec | float) -> Vec:
        return self._zip(other, torch.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Vec | float) -> Vec:
        return self._zip(other, torch.div)

    def __neg__(self) -> Vec:
        return self * -1.0

    def clone(self) -> Vec:
        return Vec([p.clone() for p in self.parts], self._phantom_bytes, self.used)

    def zeros_like(self) -> Vec:
        return Vec([torch.zeros_like(p) for p in self.parts], self._phantom_bytes)

    def copy_(self, other: Vec) -> Vec:
        return other.put_into(self)

    def put_into(self, target: Vec, scale: float = 1.0) -> Vec:
        """Let ``target`` be ``scale`` times this vector, in one go."""
        for p, q in zip(target.parts, self.parts, strict=True):
            if scale == 1.0:
                p.copy_(q)
            else:
                torch.mul(q, scale, out=p)
        target.used = self.used
        return target

    def pairs_with(self, target: Vec) -> list[tuple[Tensor, Tensor]] | None:
        """What has to be copied where for ``target`` to be this vector; None where only `put_into` can do it."""
        return list(zip(target.parts, self.parts, strict=True))

    def add_(self, other: Vec, alpha: float = 1.0) -> Vec:
        for p, q in zip(self.parts, other.parts, strict=True):
            p.add_(q, alpha=alpha)
        self.used = either(self.used, other.used)
        return self

    def taken_from_(self, other: Vec) -> Vec:
        """Let this be ``other`` minus this, in one go."""
        for p, q in zip(self.parts, other.parts, strict=True):
            torch.sub(q, p, out=p)
        self.used = either(self.used, other.used)
        return self

    def way_to(self, other: Vec) -> Way:
        """``other`` minus this, which takes the place of this when somebody reads it."""
        return Way(self, other)

    def mul_(self, factor: Vec | float) -> Vec:
        return self.copy_(self * factor) if isinstance(factor, Vec) else self._scale_(factor)

    def _scale_(self, factor: float) -> Vec:
        for p in self.parts:
            p.mul_(factor)
        return self

    def zero_(self) -> Vec:
        for p in self.parts:
            p.zero_()
        return self

    def square_norm(self) -> Vec:
        """‖x‖² in float64, as a vector of one number, so that it can be mixed."""
        if not self.parts:
            return Vec((), 8)
        total = torch.zeros(1, dtype=torch.float64, device=self.parts[0].device)
        for p in self.parts:
            total += p.double().square().sum().to(total.device)
        return Vec((total,))

    def item(self) -> float:
        """The number a vector of one number holds; a phantom's is 0."""
        return float(self.parts[0].item()) if self.parts else 0.0

    def tolist(self) -> list[float]:
        """The numbers a short vector holds; a phantom's are 0."""
        return [float(v) for p in self.parts for v in p.tolist()] or [0.0] * (self._phantom_bytes // 8)

    def fragments(self, count: int) -> list[Vec]:
        """``count`` contiguous stretches as equal as possible, as views, first to last."""
        total = self.numel
        if not 1 <= count <= max(total, 1):
            raise ValueError(f"{count} fragments do not fit a model of {total} parameters; use 1 to {total}")
        bounds = [total * k // count for k in range(count + 1)]
        return [self._slice(lo, hi) for lo, hi in pairwise(bounds)]

    def _slice(self, lo: int, hi: int) -> Vec:
        if not self.parts:
            return Vec((), 4 * (hi - lo))
        views, start = [], 0
        for p in self.parts:
            a, b = max(lo - start, 0), min(hi - start, p.numel())
            if a < b:
                views.append(p[a:b])
            start += p.numel()
        return Vec(views)


class Way(Vec):
    """How far it is from ``start`` to ``end``, made where it is needed.

    Put elsewhere, it is made there in one pass. Whoever reads it finds it in the memory of ``start``, which is then
    gone. So neither may change before it was put or read for the last time.
    """

    __slots__ = ("_made", "end", "start")

    def __init__(self, start: Vec, end: Vec) -> None:
        self.start, self.end, self._made, self.cut = start, end, False, None
        self._phantom_bytes = start._phantom_bytes
        self.used = either(start.used, end.used)

    @property
    def is_made(self) -> bool:
        """Whether it lies in memory of its own."""
        return self._made

    @property
    def parts(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        if not self._made:
            self._made = True
            self.start.taken_from_(self.end)
        return self.start.parts

    @property
    def nbytes(self) -> int:
        return self.start.nbytes

    @property
    def numel(self) -> int:
        return self.start.numel

    def put_into(self, target: Vec, scale: float = 1.0) -> Vec:
        if self._made or scale != 1.0:
            return super().put_into(target, scale)
        for p, a, b in zip(target.parts, self.start.parts, self.end.parts, strict=True):
            torch.sub(b, a, out=p)
        target.used = self.used
        return target

    def pairs_with(self, target: Vec) -> list[tuple[Tensor, Tensor]] | None:
        return super().pairs_with(target) if self._made else None


def scalar(value: float, like: Vec) -> Vec:
    """A vector of one float64 number, where ``like`` lives (a phantom beside a phantom)."""
    return numbers([value], like)


def numbers(values: Sequence[float], like: Vec) -> Vec:
    """A few float64 numbers as a vector, so that they can be mixed (a phantom beside a phantom)."""
    if not like.parts:
        return Vec((), 8 * len(values))
    return Vec((torch.tensor(values, dtype=torch.float64, device=like.parts[0].device),))


def pack(*vecs: Vec) -> Vec:
    """Several vectors as one, sharing memory: they travel in one message."""
    return Vec([p for v in vecs for p in v.parts], sum(v._phantom_bytes for v in vecs))


def unpack(packed: Vec, *like: Vec) -> list[Vec]:
    """The inverse of ``pack``: cut ``packed`` as ``like`` was."""
    out, start = [], 0
    for v in like:
        out.append(Vec(packed.parts[start : start + len(v.parts)], v._phantom_bytes))
        start += len(v.parts)
    return out
