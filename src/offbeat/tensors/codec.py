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

*Codecs of your own* have a ``name``, ``encode``, ``decode`` and ``message_bytes``. The rest may be left out:

- ``bucket``: how many numbers are coded together. No bucket is cut apart.
- ``leaves_out = True``: most numbers are left out.
- ``encode_into(x, key, message)``, ``decode_into(message, out)``: they save fresh memory.
- ``reads_quickly = True``: it decodes about as quickly as numbers are copied, and
  ``decode_into(message, out, divisor)`` divides them as well. Then all ranks of a host decode the sums that one of
  them was sent.

Reference: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offbeat.tensors.bits import elias_bits, read_as
from offbeat.tensors.bits import elias_number as elias_number
from offbeat.tensors.bits import elias_omega as elias_omega
from offbeat.tensors.levels import Levels as Levels
from offbeat.tensors.levels import strip_on
from offbeat.tensors.messages import Codec as Codec
from offbeat.tensors.messages import check_input, check_message
from offbeat.tensors.sparse import TopK as TopK


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
        for into, what in zip(*(t.split(strip_on(out)) for t in (out, numbers)), strict=True):
            into.copy_(what).div_(divisor)
        return out

    def message_bytes(self, numel: int, itemsize: int) -> int:
        return numel * self.dtype.itemsize


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


def encode_sum(codec: Codec, terms: Sequence[Tensor], numel: int, message: Tensor) -> bool:
    """Encode the sum of these in their order, numbers or messages, without making it. False: the codec cannot."""
    into = getattr(codec, "encode_sum", None)
    return bool(terms) and into is not None and not message.data_ptr() % 8 and into(terms, numel, message)


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
