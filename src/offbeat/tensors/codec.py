"""What goes over the wire, and how many bytes it takes.

A codec turns a flat tensor into a message of bytes and back. Quantised values cannot be summed on the way. A group
therefore sums in two phases: each member is sent everybody's coded part of one stretch, sums it, codes the sum, and
sends it to all, which is about two messages a worker however many there are. ``qsgd`` and ``sparseloco`` gather
everybody's message on every worker instead, as their papers do, and so does mixing along a graph. What goes to nobody
is not coded (``sent_to``): one worker, or a group of one, trains as without a codec.

Methods that average weights keep what a codec lost and send it with the next average (``Mix(…, lost=…)``).

| codec | what it does | what it costs |
| --- | --- | --- |
| ``bf16()`` | cast; keeps the range of float32, 8 bits of mantissa | 2 bytes a number |
| ``fp16()`` | cast; above 65504 it becomes infinite | 2 bytes a number |
| ``int8()`` | nearest of 255 levels, scaled by each bucket's max | 1 byte, and 4 a bucket |
| ``qsgd(b)`` | QSGD: stochastic rounding, right on average | b bits, and 4 bytes a bucket |
| ``topk(k)`` | the k largest of each chunk of 4,096, in four sizes | 14 bits for each of them, and 16 bytes a chunk |

*Broken numbers stay broken.* A bucket or chunk that holds a NaN or an infinity decodes to NaN as a whole, so that a
diverged worker is seen by everybody. *float64* is quantised and decoded in float64, but a bucket's norm travels as
float32: the result is as good as the norm's 24 bits, and a norm outside float32's range decodes to NaN (too big) or 0
(too small).

*Codecs of your own* have a ``name``, ``encode``, ``decode`` and ``message_bytes``. Where numbers are coded together,
say in ``bucket`` how many, and no bucket is cut apart; ``leaves_out = True`` says that most numbers are left out; and
``encode_into(x, key, message)`` and ``decode_into(message, out)``, if they are there, save fresh memory.

Reference: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offbeat.basics import draw
from offbeat.tensors.bits import elias_bits, pack, read_as, unpack
from offbeat.tensors.bits import elias_number as elias_number
from offbeat.tensors.bits import elias_omega as elias_omega
from offbeat.tensors.messages import Codec as Codec
from offbeat.tensors.messages import check_input, check_length, check_message
from offbeat.tensors.sparse import TopK as TopK

_NORM_BYTES = 4
_BLOCK = 1 << 18  # numbers of a CPU that are rounded alike: which way is asked for all of them at once
_STRIP = 1 << 16  # numbers of one call: they stay in a core's own cache, and calls are few
_MOST_SPARE = 4
_spare: list[Tensor] = []  # memory for a strip, of whoever codes next, in any thread: fresh pages are slow


@dataclass(frozen=True)
class Cast:
    """Send every number in a narrower floating type, rounded to nearest."""

    name: str
    dtype: torch.dtype
    reads_quickly = True

    def encode(self, x: Tensor, key: tuple[int, ...]) -> Tensor:
        check_input(self, x)
        # A copy even where the type is already right: a message must not change when the weights do.
        return x.detach().to(self.dtype, copy=True, memory_format=torch.contiguous_format).view(torch.uint8)

    def encode_into(self, x: Tensor, key: tuple[int, ...], message: Tensor) -> None:
        """Encode into memory that is there already."""
        check_input(self, x)
        message.view(self.dtype).copy_(x.detach())

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return self.decode_into(message, torch.empty_like(like, memory_format=torch.contiguous_format))

    def decode_into(self, message: Tensor, out: Tensor, divisor: float = 1) -> Tensor:
        """Decode into memory that is there already, and divide."""
        check_message(self, message, out)
        numbers = read_as(message, self.dtype)
        if divisor == 1:
            return out.copy_(numbers)
        for into, what in zip(*(t.split(_strip_on(out)) for t in (out, numbers)), strict=True):
            into.copy_(what).div_(divisor)
        return out

    def message_bytes(self, numel: int, itemsize: int) -> int:
        return numel * self.dtype.itemsize


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
        """The same for what is coded most, in fewer passes and calls: to the nearest level, in float32, on a CPU."""
        if self._encode_at_once(x, norms, codes):
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

    def _encode_at_once(self, x: Tensor, norms: Tensor, codes: Tensor) -> bool:
        """Whether every bucket can be multiplied, and the first ones say so. Then it is done: each strip is through all
        passes before the next is read.

        The nearest level is the same as in two operations, but for numbers halfway between two; s times 1 ± 2^-22 is
        still s.
        """
        s, room, shape = torch.full((1,), float(self.s)), _take(_STRIP + self.bucket), None
        for v, out, top in self._strips([x, codes], [norms], _STRIP):
            first = shape is None
            if v.shape != shape:
                shape = v.shape
                memory, scale = room[: v.numel()].view(shape), torch.empty(top.shape)
            v = v.float()
            torch.amax(v, 1, True, out=top)
            torch.amin(v, 1, True, out=scale)
            torch.maximum(top, scale.neg_(), out=top)
            torch.reciprocal(top, out=scale).mul_(s)
            if first and not _can_scale(scale):
                break
            out.copy_(torch.mul(v, scale, out=memory).round_())
        else:
            _give_back(room)
            return not norms.numel() or _can_scale(torch.reciprocal(norms).mul_(s))
        _give_back(room)
        return False

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
            for target, level, norm in self._strips([out[lo:hi], levels], [of_block], _strip_on(out)):
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


def _take(numel: int) -> Tensor:
    try:
        room = _spare.pop()  # asked first, another thread could take the last one
    except IndexError:
        return torch.empty(numel)
    return room if room.numel() >= numel else torch.empty(numel)


def _give_back(room: Tensor) -> None:
    if len(_spare) < _MOST_SPARE:
        _spare.append(room)


def _can_scale(scale: Tensor) -> bool:
    """Whether all buckets can be multiplied with these."""
    low, high = torch.aminmax(scale)
    return float(low) > 0 and float(high) < math.inf


def _strip_on(out: Tensor) -> int:
    """The numbers of one call: on a CPU so few that they stay in its cache until they are through."""
    return _STRIP if out.device.type == "cpu" else max(out.numel(), 1)


def _cuts(n: int, width: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + width, n)) for lo in range(0, n, width)]


def bf16() -> Codec:
    """Half the bytes of float32, the same range, 8 bits of mantissa. Safe for gradients and weights alike."""
    return Cast("bf16", torch.bfloat16)


def fp16() -> Codec:
    """Half the bytes of float32, 11 bits of mantissa. Numbers above 65504 become infinite, not silently smaller, and so
    do sums of a group's numbers."""
    return Cast("fp16", torch.float16)


def int8(bucket: int = 512) -> Levels:
    """A quarter of the bytes of float32: nearest of 255 levels of each bucket's largest magnitude.

    Deterministic, with less error than ``qsgd(8)`` on one message; but the error has a direction: what is below half
    a level is lost every time, also on average.
    """
    return Levels("int8", 8, bucket, "max", "nearest")


def qsgd(bits: int = 8, bucket: int = 512, norm: Literal["max", "l2"] = "max") -> Levels:
    """QSGD: every number becomes a level of its bucket's norm, rounded up or down at random so that E[Q(v)] = v.

        a = s |v_k| / ‖v‖,   ζ_k = (⌊a⌋ + 1) / s  with probability a − ⌊a⌋,  else ⌊a⌋ / s,   Q(v_k) = ‖v‖ sgn(v_k) ζ_k

    bits: 2 to 16, the sign included, so s = 2^(bits − 1) − 1 levels; really packed that densely.
    bucket: how many numbers share a norm. Fewer: less noise, more bytes. The paper takes 512 for 4 bits, 64 for 2.
    norm: "max" (the paper's practice; the largest number arrives exactly) or "l2" (the paper's theory; sparser).
    """
    return Levels(f"qsgd{bits}", bits, bucket, norm, "stochastic")


def topk(k: int = 64, chunk: int = 4096, floats: bool = False) -> TopK:
    """The ``k`` largest of each ``chunk`` of numbers, in 14 bits each: 12 say which, 2 how large.

    What is left out is lost, and always the same way: it is for methods that send later what a codec lost
    (``local_sgd``, ``adaptive``, ``dasgd``, ``diloco``, ``sparseloco``); the others refuse it.

    floats: send the numbers as float32 instead of 2 bits. With ``k`` a whole chunk nothing is lost then.
    """
    return TopK(f"topk{k}{'-floats' if floats else ''}", k, chunk, floats)


def leaves_out(codec: Codec | None) -> bool:
    """Whether most numbers of a message are left out, so that what was lost must be sent later."""
    return getattr(codec, "leaves_out", False)


def encode_into(codec: Codec, x: Tensor, key: tuple[int, ...], message: Tensor) -> None:
    """Encode into memory that is there already, where the codec can and the memory begins at a whole word."""
    into = getattr(codec, "encode_into", None)
    if into is None or message.data_ptr() % 8:
        message.copy_(codec.encode(x, key))
    else:
        into(x, key, message)


def decode_into(codec: Codec, message: Tensor, out: Tensor, divisor: float = 1) -> Tensor:
    """Decode into memory that is there already, where the codec can, and divide."""
    into = getattr(codec, "decode_into", None)
    if into is not None and reads_quickly(codec):
        return into(message, out, divisor)  # type: ignore[no-any-return]
    out = out.copy_(codec.decode(message, out)) if into is None else into(message, out)
    return out if divisor == 1 else out.div_(divisor)


def reads_quickly(codec: Codec) -> bool:
    """Whether decoding takes hardly longer than copying the numbers would."""
    return getattr(codec, "reads_quickly", False)


def sent_to(codec: Codec | None, others: int) -> Codec | None:
    """The codec of what goes to so many others: what goes to nobody is not coded."""
    return codec if others else None


def parse(text: str) -> Codec | None:
    """The codec for a name such as ``bf16``, ``int8``, ``qsgd4``, ``topk64`` or ``topk64-floats``; ``none``: None."""
    word = text.strip().lower()
    plain = {"bf16": bf16, "fp16": fp16, "int8": int8}
    if word == "none":
        return None
    if word in plain:
        return plain[word]()
    if match := re.fullmatch(r"qsgd([0-9]{1,4})", word):
        return qsgd(int(match[1]))
    if match := re.fullmatch(r"topk([0-9]{0,5})(-floats)?", word):
        return topk(int(match[1] or 64), floats=match[2] is not None)
    raise ValueError(f"there is no codec {text!r}; use none, bf16, fp16, int8, qsgd2 to qsgd16, or topk1 to topk4096")


def elias_bytes(x: Tensor, codec: Codec, key: tuple[int, ...] = (0,)) -> int:
    """How many bytes the message for ``x`` would take if its codes were Elias-coded, as in the QSGD paper.

    The norms stay float32. Of the paper's two ways the shorter one counts, with a bit to say which: *sparse* (for each
    non-zero: gap, sign, level) or *dense* (for each number: level + 1, and a sign if it is not zero). This is an
    estimate to report beside the real bytes; the wire carries fixed-width codes.
    """
    if not isinstance(codec, Levels):
        raise ValueError(f"{codec.name} has no levels to Elias-code; use qsgd or int8")
    n = x.numel()
    level = codec.codes(codec.encode(x, key), n).abs().to(torch.int64)
    at = level.nonzero().view(-1)
    gaps = torch.diff(at, prepend=at.new_tensor([-1]))
    sparse = elias_bits(gaps) + at.numel() + elias_bits(level[at])
    dense = elias_bits(level + 1) + at.numel()
    return codec.message_bytes(n, x.element_size()) - -(-n * codec.bits // 8) + -(-(1 + min(sparse, dense)) // 8)
