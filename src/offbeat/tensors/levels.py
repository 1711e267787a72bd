"""Numbers as levels of their bucket's norm: what ``int8`` and ``qsgd`` send.

On a CPU a strip of numbers is through all passes before the next one is read, so that it stays in the core's own cache.
A call takes as long as some ten thousand numbers there, and fresh memory longer; so there are few of one, and none of
the other. Whether all buckets can be multiplied is asked at the end; the first strip is looked at before, so that
vectors with many empty buckets do not pay twice. A product and a sum in one operation (``addcmul``), or a product with
1/127 instead of a division, would turn numbers close to halfway the other way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offbeat.basics import draw
from offbeat.tensors.bits import pack, read_as, unpack
from offbeat.tensors.messages import check_input, check_length, check_message

_NORM_BYTES = 4
_BLOCK = 1 << 18  # numbers of a CPU that are rounded alike: which way is asked for all of them at once
_STRIP = 1 << 17  # numbers of one call: they stay in a core's own cache, and calls are few
_MOST_SPARE, _LARGEST_SPARE = 4, 4 * _STRIP
_spare: list[Tensor] = []  # memory for a strip, of whoever codes next, in any thread: fresh pages are slow

Term = Tensor | tuple[Tensor, Tensor]  # numbers, or levels and norms


@dataclass(frozen=True)
class Levels:
    """Send every number as one of 2s + 1 levels of its bucket's norm, s = 2^(bits − 1) − 1.

    The message is the float32 norms of all buckets, then all codes (two's complement) without a gap between them.
    """

    name: str
    bits: int
    bucket: int
    norm: Literal["max", "l2"]
    rounding: Literal["stochastic", "nearest"]

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(f"{self.bits} bits cannot hold a sign and a level; use 2 to 16 bits")
        if self.bucket < 1:
            raise ValueError(f"a bucket of {self.bucket} numbers is empty; use a bucket of 1 or more, such as 512")
        if self.norm not in ("max", "l2"):
            raise ValueError(f"there is no norm {self.norm!r}; use 'max' or 'l2'")

    @property
    def s(self) -> int:
        """The highest level."""
        return int(2 ** (self.bits - 1)) - 1

    def encode(self, x: Tensor, key: tuple[int, ...]) -> Tensor:
        message = torch.empty(self.message_bytes(x.numel(), 4), dtype=torch.uint8, device=x.device)
        self.encode_into(x, key, message)
        return message

    def encode_into(self, x: Tensor, key: tuple[int, ...], message: Tensor) -> None:
        """Encode into memory that is there already."""
        check_input(self, x)
        x, n = x.detach(), x.numel()
        norms, codes = self._split(message, n)
        if self.rounding == "nearest" and self.norm == "max" and x.dtype != torch.float64 and not x.is_cuda:
            levels = codes.view(torch.int8) if self.bits == 8 else torch.empty(n, dtype=torch.int16)
            self._encode_nearest(x, norms, levels)
            return None if self.bits == 8 else self._put(levels, codes, 0, n)
        # One generator for all blocks: the draws of a message come from its key alone.
        draws = draw.generator(*key, device=x.device) if self.rounding == "stochastic" else None
        room = torch.empty(0, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for lo, hi in self._blocks(n, x.device):
            v = self._buckets(x[lo:hi])
            if room.numel() < v.numel():
                room = torch.empty_like(v).view(-1)  # for all blocks: fresh pages are slow
            memory = room[: v.numel()].view(v.shape)
            of_block = norms[lo // self.bucket : -(-hi // self.bucket)]
            of_block.copy_(self._norms(v, memory))
            self._put(self._levels(v, of_block, draws, memory).view(-1)[: hi - lo], codes, lo, hi)

    def _encode_nearest(self, x: Tensor, norms: Tensor, codes: Tensor) -> None:
        """The same for what is coded most, in fewer passes and calls: to the nearest level, in float32, on a CPU.

        At once where no bucket is empty or broken. Else numbers are multiplied in the blocks that have no such bucket,
        and divided in those that have.
        """
        if self._encode_at_once([x], norms, codes):
            return
        room = torch.empty(min(x.numel(), _STRIP + self.bucket))
        for lo, hi in _cuts(x.numel(), self._width):
            v, levels = x[lo:hi].float(), codes[lo:hi]
            top = norms[lo // self.bucket : -(-hi // self.bucket)]
            scale = torch.empty_like(top)
            for numbers, highest, lowest in self._strips([v], [top, scale], hi - lo):
                torch.amax(numbers, 1, True, out=highest)
                torch.amin(numbers, 1, True, out=lowest)
            torch.maximum(top, scale.neg_(), out=top)
            top.abs_().masked_fill_(top.isnan(), math.nan)  # one zero and one NaN for all
            if _can_scale(torch.reciprocal(top, out=scale).mul_(self.s)):
                for numbers, out, factor in self._strips([v, levels], [scale], _STRIP):
                    out.copy_(torch.mul(numbers, factor, out=room[: out.numel()].view(out.shape)).round_())
            else:
                self._divide(v, top, levels, room)

    def _encode_at_once(self, terms: Sequence[Term], norms: Tensor, codes: Tensor) -> bool:
        """Code the sum of these, where every bucket can be multiplied, and the first ones say so. Whether it is done.

        The nearest level is the same as in two operations, but for numbers halfway between two; s times 1 ± 2^-22 is
        still s.
        """
        numbers, given = [t if isinstance(t, Tensor) else t[0] for t in terms], len(terms)
        of_numbers = [None if isinstance(t, Tensor) else t[1] for t in terms]
        columns, coded = [t for t in of_numbers if t is not None], [t is not None for t in of_numbers]
        s, room, shape = torch.full((1,), float(self.s)), _take(2 * (_STRIP + self.bucket)), None
        done = True
        for out, *strips in self._strips([codes, *numbers], [norms, *columns], _STRIP):
            first, top = shape is None, strips[given]
            if out.shape != shape:
                shape = out.shape
                total, memory = (part[: out.numel()].view(shape) for part in room.chunk(2))
                scale = torch.empty(top.shape)
            v = strips[0].float() if given == 1 and not columns else _add_up(strips, coded, s, total, memory)
            torch.amax(v, 1, True, out=top)
            torch.amin(v, 1, True, out=scale)
            torch.maximum(top, scale.neg_(), out=top)
            torch.reciprocal(top, out=scale).mul_(s)
            if first and not _can_scale(scale):
                done = False
                break
            out.copy_(torch.mul(v, scale, out=memory).round_())
        _give_back(room)
        return done and (not norms.numel() or _can_scale(torch.reciprocal(norms).mul_(s)))

    def encode_sum(self, terms: Sequence[Tensor], numel: int, message: Tensor) -> bool:
        """Encode the sum of these in their order, numbers or messages (uint8), as if it had been made before. False:
        it must be made."""
        nearest = self.bits == 8 and self.rounding == "nearest" and self.norm == "max"
        if not nearest or any(t.is_cuda or t.dtype not in (torch.float32, torch.uint8) for t in terms):
            return False
        read = list[Term]()
        for term in terms:
            if term.dtype == torch.uint8:
                norms, codes = self._split(term, numel)
                read.append((codes.view(torch.int8), norms))
            else:
                read.append(term)
        norms, codes = self._split(message, numel)
        return self._encode_at_once(read, norms, codes.view(torch.int8))

    def _divide(self, x: Tensor, norms: Tensor, codes: Tensor, room: Tensor) -> None:
        broken = ~torch.isfinite(norms)
        some, divisor = bool(broken.any()), torch.where(broken | (norms == 0), 1, norms)
        for v, levels, by, bad in self._strips([x, codes], [divisor, broken], _STRIP):
            a = torch.div(v, by, out=room[: v.numel()].view(v.shape)).mul_(self.s)
            # Casting NaN to an integer is undefined: see `_levels`.
            levels.copy_((a.masked_fill_(bad, 0) if some else a).round_())

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return self.decode_into(message, torch.empty_like(like, memory_format=torch.contiguous_format))

    @property
    def reads_quickly(self) -> bool:
        return self.bits == 8

    def decode_into(self, message: Tensor, out: Tensor, divisor: float = 1) -> Tensor:
        """Decode into memory that is there already, and divide."""
        check_message(self, message, out)
        n, dtype = out.numel(), torch.promote_types(out.dtype, torch.float32)
        norms, codes = self._split(message.to(out.device), n)
        # A power of two divides the norms, and with them the numbers, as exactly as it divides these.
        of_norms, of_numbers = (divisor, 1.0) if math.frexp(divisor)[0] == 0.5 else (1.0, divisor)
        # level / s comes first: s / s is exactly 1, so the largest number of a bucket arrives unchanged. The divisor
        # is a tensor: CUDA turns division by a Python number into a product with 1 / s, and s · (1 / s) may not be 1.
        s = torch.full((1,), self.s, dtype=dtype, device=out.device)
        for lo, hi in [(0, n)] if self.bits == 8 else self._blocks(n, out.device):
            of_block = norms[lo // self.bucket : -(-hi // self.bucket)].to(dtype)
            of_block = of_block if of_norms == 1 else of_block / of_norms
            levels = self._get(codes, lo, hi)
            for target, level, norm in self._strips([out[lo:hi], levels], [of_block], strip_on(out)):
                zeta = target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)
                zeta.copy_(level).div_(s).mul_(norm)
                if of_numbers != 1:
                    zeta.div_(of_numbers)
                if zeta is not target:
                    target.copy_(zeta)
        return out

    def message_bytes(self, numel: int, itemsize: int) -> int:
        return self._norm_bytes(numel) + -(-numel * self.bits // 8)

    def codes(self, message: Tensor, numel: int) -> Tensor:
        """The signed levels in a message, −s … s, as int32."""
        check_length(self, message, numel)
        return unpack(message[self._norm_bytes(numel) :], numel, self.bits).to(torch.int32)

    def _split(self, message: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The norms (as float32) and the packed codes of a message."""
        at = self._norm_bytes(n)
        norms, codes = message.split_with_sizes([at, message.numel() - at])
        return read_as(norms, torch.float32), codes

    def _norm_bytes(self, n: int) -> int:
        return -(-n // self.bucket) * _NORM_BYTES

    @property
    def _width(self) -> int:
        """The numbers of a block: whole buckets that end at a whole byte."""
        grain = math.lcm(self.bucket, 8)
        return max(_BLOCK // grain, 1) * grain

    def _blocks(self, n: int, device: torch.device) -> list[tuple[int, int]]:
        """On a CPU so short that they stay in its cache."""
        return _cuts(n, self._width if device.type == "cpu" else max(n, 1))

    def _strips(
        self, numbers: Sequence[Tensor], of_buckets: Sequence[Tensor], length: int
    ) -> Iterator[tuple[Tensor, ...]]:
        """The same stretches of these, of about that length at most, with a bucket in each row. What each bucket has
        one of are columns."""
        n = numbers[0].numel()
        full, rest = divmod(n, self.bucket)
        if full:
            whole, columns, count = numbers, of_buckets, -(-n // length)
            if rest:
                whole, columns = [t[: n - rest] for t in numbers], [t[:full] for t in of_buckets]
            rows = [t.view(full, self.bucket).chunk(count) for t in whole]  # not split, which takes longer to call
            yield from zip(*rows, *(t.unsqueeze(1).chunk(count) for t in columns), strict=True)
        if rest:
            yield (*(t[n - rest :].view(1, rest) for t in numbers), *(t[full:, None] for t in of_buckets))

    def _put(self, levels: Tensor, codes: Tensor, lo: int, hi: int) -> None:
        if self.bits == 8:
            codes[lo:hi].view(torch.int8).copy_(levels)
        else:
            codes[lo * self.bits // 8 : -(-hi * self.bits // 8)].copy_(pack(levels.to(torch.int16), self.bits))

    def _get(self, codes: Tensor, lo: int, hi: int) -> Tensor:
        return unpack(codes[lo * self.bits // 8 : -(-hi * self.bits // 8)], hi - lo, self.bits)

    def _buckets(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        width = min(self.bucket, x.numel())
        return (torch.nn.functional.pad(x, (0, -x.numel() % width)) if x.numel() % width else x).view(-1, width)

    def _norms(self, v: Tensor, memory: Tensor) -> Tensor:
        top = torch.abs(v, out=memory).amax(1)
        if self.norm == "l2":
            # Squares of large or small float32 numbers leave float32's range; those of v / top do not.
            top = top * torch.linalg.vector_norm(v / torch.where(top > 0, top, 1)[:, None], dim=1)
        return top

    def _levels(self, v: Tensor, norms: Tensor, draws: torch.Generator | None, memory: Tensor) -> Tensor:
        """The signed levels of one block, as floats."""
        fine = torch.isfinite(norms) & (norms > 0)
        a = torch.div(v, torch.where(fine, norms, 1).to(v.dtype)[:, None], out=memory)
        if v.is_cuda or not fine.all():
            # Casting NaN to an integer is undefined. A broken bucket sends zeros instead, and its norm tells the tale:
            # 0 × NaN and 0 × inf are both NaN.
            a.masked_fill_(~fine[:, None], 0)
        a.mul_(self.s).clamp_(-self.s, self.s)
        if draws is None:
            return a.round_()
        # Not floor(a + u): in floating point 1 + u can round up to 2, which would move exact levels.
        level = a.floor()
        u = torch.rand(a.shape, generator=draws, dtype=a.dtype, device=a.device)
        return level.add_(u < a.sub_(level))


def _add_up(terms: Sequence[Tensor], coded: Sequence[bool], s: Tensor, total: Tensor, memory: Tensor) -> Tensor:
    """The sum of a strip of each, in ``total`` if there are several; behind them, after one more, the norms of those
    that are ``coded``."""
    norms, made = iter(terms[len(coded) + 1 :]), None
    for term, is_coded in zip(terms, coded, strict=False):
        if is_coded:
            term = (total if made is None else memory).copy_(term).div_(s).mul_(next(norms))
        made = term if made is None else torch.add(made, term, out=total)
    assert made is not None, "a sum of nothing"
    return made


def _take(numel: int) -> Tensor:
    try:
        room = _spare.pop()  # asked first, another thread could take the last one
    except IndexError:
        return torch.empty(numel)
    return room if room.numel() >= numel else torch.empty(numel)


def _give_back(room: Tensor) -> None:
    if len(_spare) < _MOST_SPARE and room.numel() <= _LARGEST_SPARE:
        _spare.append(room)


def _can_scale(scale: Tensor) -> bool:
    """Whether all buckets can be multiplied with these."""
    low, high = torch.aminmax(scale)
    return float(low) > 0 and float(high) < math.inf


def strip_on(out: Tensor) -> int:
    """The numbers of one call: on a CPU so few that they stay in its cache until they are through."""
    return _STRIP if out.device.type == "cpu" else max(out.numel(), 1)


def _cuts(n: int, width: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + width, n)) for lo in range(0, n, width)]
