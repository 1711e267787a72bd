"""Sums of vectors where they lie, in the order of the members.

A term is added in one call over the whole vector. Stretches that stay in a cache read the sum once less, and are slower
even on idle cores: memory is quickest when read in long lines. Beside busy cores each call waits for all its threads,
and many calls took a hundred times as long. Each number is made by the same operations in the same order wherever a
stretch begins or ends: whoever computes it gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.live.memory.kernels import Term, add_in_one_pass
from offbeat.tensors.vector import Used, Vec, Way

Pairs = Sequence[tuple[Tensor, Tensor]]
Pieces = Callable[[Tensor], Pairs]  # given memory for a vector: where in it which tensors are to be copied

STRETCH = 1 << 22  # numbers, where a term of several vectors is summed in other memory first


def add_up(out: Tensor, terms: Sequence[Term], divisor: float) -> None:
    """Let ``out`` be the sum of all members' terms, divided once."""
    if not terms:
        out.zero_()
        return
    numel = out.numel()
    if out.is_cuda and add_in_one_pass(out, terms, divisor, 0, numel):
        return
    several = any(len(term) > 1 for term in terms[1:])
    stretch = min(STRETCH, numel) if several and not out.is_cuda else numel
    scratch = torch.empty(stretch, dtype=out.dtype, device=out.device) if several else None
    for a in range(0, numel, max(stretch, 1)):
        b = min(a + stretch, numel)
        here = out[a:b]
        plain = len(terms) > 1 and all(len(t) == 1 and t[0][1] == 1.0 for t in terms[:2])
        if plain:
            torch.add(terms[0][0][0][a:b], terms[1][0][0][a:b], out=here)
        else:
            _put(here, terms[0], a, b)
        for term in terms[2 if plain else 1 :]:
            if len(term) == 1:
                tensor, factor = term[0]
                here.add_(tensor[a:b], alpha=factor)
            else:
                assert scratch is not None
                here.add_(_put(scratch[: b - a], term, a, b))
        if divisor != 1:
            here.div_(divisor)


def _put(here: Tensor, term: Term, a: int, b: int) -> Tensor:
    (first, factor), *rest = term
    if rest and factor == 1.0:  # one pass for two
        second, f = rest.pop(0)
        torch.add(first[a:b], second[a:b], alpha=f, out=here)
    elif factor == 1.0:
        here.copy_(first[a:b])
    else:
        torch.mul(first[a:b], factor, out=here)
    for tensor, f in rest:
        here.add_(tensor[a:b], alpha=f)
    return here


def copy(pairs: Pairs) -> None:
    """Let the first of each pair be what the second is."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [what for _, what in pairs])


def lay(x: Vec, target: Vec) -> None:
    """Let ``target`` be ``x``, made or copied there in one pass."""
    if isinstance(x, Way) and not x.is_made:
        for into, start, end in zip(target.parts, x.start.parts, x.end.parts, strict=True):
            add_up(into, [[(end, 1.0), (start, -1.0)]], 1)
        target.used = x.used
    else:
        x.put_into(target)


class Unadded(Vec):
    """A sum of vectors that have not been added up yet: it is made where it is put, in one pass.

    Whoever reads it gets it in memory that ``room`` gives.
    """

    __slots__ = ("_made", "_room", "_term")

    def __init__(self, term: Sequence[tuple[Vec, float]], used: Used, room: Callable[[], Vec]) -> None:
        self._term, self._room, self._phantom_bytes, self.used = term, room, 0, used
        self._made: Vec | None = None
        self.cut = None

    @property
    def parts(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        if self._made is None:
            made = self._room()
            self._made = self.put_into(made)
        return self._made.parts

    def put_into(self, target: Vec, scale: float = 1.0) -> Vec:
        if self._made is not None or scale != 1.0:
            return super().put_into(target, scale)
        for p, tensor in enumerate(target.parts):
            add_up(tensor, [[(v.parts[p], f) for v, f in self._term]], 1)
        target.used = self.used
        return target
