"""Sums of vectors where they lie, in the order of the members, a cache's worth at a time.

A chunk of the result stays in the cache while all terms are added to it, so every number is read once and written once.
Each number is made by the same operations in the same order wherever a stretch begins or ends: whoever computes it gets
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.live.memory.hands import ONE, Hands
from offbeat.live.memory.kernels import Term, add_in_one_pass
from offbeat.tensors.vector import Used, Vec, Way, no_grad

CHUNK = 1 << 17  # numbers: out and one term stay inside a core's second cache, and calls are few


def add_up(
    out: Tensor, terms: Sequence[Term], divisor: float, lo: int = 0, hi: int | None = None, hands: Hands = ONE
) -> None:
    """Let ``out[lo:hi]`` be the sum of all members' terms, divided once."""
    hi = out.numel() if hi is None else hi
    if out.is_cuda:
        _add_up(out, terms, divisor, lo, hi)
    else:
        hands.over(lo, hi, lambda a, b: _add_up(out, terms, divisor, a, b))


def _add_up(out: Tensor, terms: Sequence[Term], divisor: float, lo: int, hi: int) -> None:
    if not terms:
        out[lo:hi].zero_()
        return
    if out.is_cuda and add_in_one_pass(out, terms, divisor, lo, hi):
        return
    chunk = hi - lo if out.is_cuda else CHUNK * max(1, torch.get_num_threads())
    several = any(len(term) > 1 for term in terms[1:])
    scratch = torch.empty(min(chunk, hi - lo), dtype=out.dtype, device=out.device) if several else None
    for a in range(lo, hi, max(chunk, 1)):
        b = min(a + chunk, hi)
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


def add_in_place(mine: Tensor, terms: Sequence[Tensor], divisor: float, lo: int, hi: int, hands: Hands = ONE) -> None:
    """Let ``mine[lo:hi]`` be the sum of all, divided once, of which it is one itself: not written to before it has been
    added."""
    if lo == hi:  # nor would the others' memory be told from one's own
        return
    if mine.is_cuda:
        _add_in_place(mine, terms, divisor, lo, hi)
    else:
        hands.over(lo, hi, lambda a, b: _add_in_place(mine, terms, divisor, a, b))


def _add_in_place(mine: Tensor, terms: Sequence[Tensor], divisor: float, lo: int, hi: int) -> None:
    chunk = max(hi - lo, 1) if mine.is_cuda else CHUNK * max(1, torch.get_num_threads())
    if len(terms) == 2:  # a + b has the bits of b + a
        other = next(term for term in terms if term.data_ptr() != mine.data_ptr())
        for a in range(lo, hi, chunk):
            here = mine[a : min(a + chunk, hi)].add_(other[a : min(a + chunk, hi)])
            if divisor != 1:
                here.div_(divisor)
        return
    scratch = torch.empty(min(chunk, hi - lo), dtype=mine.dtype, device=mine.device)
    for a in range(lo, hi, chunk):
        b = min(a + chunk, hi)
        here = scratch[: b - a]
        _add_up(here, [[(term[a:b], 1.0)] for term in terms], divisor, 0, b - a)
        mine[a:b].copy_(here)


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


def lay(x: Vec, target: Vec, hands: Hands) -> None:
    """Let ``target`` be ``x``, made or copied there in one pass."""
    if isinstance(x, Way) and not x.is_made:
        for into, start, end in zip(target.parts, x.start.parts, x.end.parts, strict=True):
            add_up(into, [[(end, 1.0), (start, -1.0)]], 1, hands=hands)
        target.used = x.used
    elif target.parts[0].is_cuda or not hands.help_with(target.numel) or (pairs := x.pairs_with(target)) is None:
        x.put_into(target)
    else:
        with no_grad():
            hands.copy(pairs)


class Unadded(Vec):
    """A sum of vectors that have not been added up yet: it is made where it is put, in one pass.

    Whoever reads it gets it in memory that ``room`` gives.
    """

    __slots__ = ("_hands", "_made", "_room", "_term")

    def __init__(self, term: Sequence[tuple[Vec, float]], used: Used, room: Callable[[], Vec], hands: Hands) -> None:
        self._term, self._room, self._hands, self._phantom_bytes, self.used = term, room, hands, 0, used
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
            add_up(tensor, [[(v.parts[p], f) for v, f in self._term]], 1, hands=self._hands)
        target.used = self.used
        return target


def stretch(numel: int, part: int, parts: int) -> tuple[int, int]:
    """The numbers that one of so many adders makes: whole cache lines, as equal as they get."""
    lines = -(-numel // 16)
    return min(16 * (lines * part // parts), numel), min(16 * (lines * (part + 1) // parts), numel)
