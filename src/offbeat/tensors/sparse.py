"""A codec that sends few numbers: the largest of each chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.tensors.bits import pack, read_as, unpack
from offbeat.tensors.messages import check_input, check_message

_PLACE_BITS, _BIN_BITS, _BINS = 12, 2, 4


@dataclass(frozen=True)
class TopK:
    """Send the k largest numbers of each chunk, by magnitude; the others arrive as 0.

    The message is four float32 a chunk (or a float32 a number), the places of all numbers in 12 bits each, and the bin
    of each in 2 bits. A chunk's bins are a quarter of 6 σ wide, two on either side of the mean of what it sends, the
    outer ones open; each is decoded as the mean of what fell into it.
    """

    name: str
    k: int
    chunk: int
    floats: bool

    leaves_out = True

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= 4096:
            raise ValueError(f"places in a chunk of {self.chunk} numbers do not fit 12 bits; use a chunk of 1 to 4096")
        if not 1 <= self.k <= self.chunk:
            raise ValueError(f"{self.k} numbers cannot be taken from a chunk of {self.chunk}; use 1 to {self.chunk}")

    @property
    def bucket(self) -> int:
        """Numbers that are coded together."""
        return self.chunk

    def encode(self, x: Tensor, key: tuple[int, ...]) -> Tensor:
        check_input(self, x)
        x, n = x.detach(), x.numel()
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        full = n // self.chunk * self.chunk
        rows = [wide[:full].view(-1, self.chunk), wide[full:].view(1, -1)]
        picked = [self._pick(v) for v in rows if v.numel()]
        if not picked:
            return torch.empty(0, dtype=torch.uint8, device=x.device)
        heads, places, bins = (torch.cat([one[i].reshape(-1) for one in picked]) for i in range(3))
        floats = heads.to(torch.float32).view(torch.uint8)
        return torch.cat([floats, pack(places, _PLACE_BITS), *([] if self.floats else [pack(bins, _BIN_BITS)])])

    def _pick(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the chunks of one length: the float32 to send, the places, the bins."""
        # torch takes NaN for larger than anything, so a broken number is among those that are sent.
        at = v.abs().topk(min(self.k, v.shape[1]), dim=1, sorted=False).indices
        values = v.gather(1, at)
        if self.floats:
            return values, at.to(torch.int16), at
        broken = ~torch.isfinite(values).all(1, keepdim=True)
        sound = values.masked_fill(broken, 0)
        mean = sound.mean(1, keepdim=True)
        sigma = (sound - mean).square_().mean(1, keepdim=True).sqrt_()
        width = 6 * sigma / _BINS
        bins = (sound - mean).div_(torch.where(width > 0, width, 1)).floor_().add_(_BINS // 2).clamp_(0, _BINS - 1)
        bins = bins.to(torch.int64)
        sums = torch.zeros(v.shape[0], _BINS, dtype=v.dtype, device=v.device).scatter_add_(1, bins, sound)
        counts = torch.zeros_like(sums).scatter_add_(1, bins, torch.ones_like(sound))
        means = (sums / counts.clamp_(min=1)).masked_fill_(broken, math.nan)
        return means, at.to(torch.int16), bins.to(torch.int16)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return self.decode_into(message, torch.empty_like(like, memory_format=torch.contiguous_format))

    def decode_into(self, message: Tensor, out: Tensor) -> Tensor:
        """Decode into memory that is there already."""
        check_message(self, message, out)
        n, message = out.numel(), message.to(out.device)
        out.zero_()
        if n == 0:
            return out
        full, rest = divmod(n, self.chunk)
        k, last = self.k, min(self.k, rest)
        kept, chunks = full * k + last, full + (rest > 0)
        head = 4 * (kept if self.floats else _BINS * chunks)
        middle = head + -(-kept * _PLACE_BITS // 8)
        heads = read_as(message[:head], torch.float32)
        # Unpacking gives signed codes.
        places = unpack(message[head:middle], kept, _PLACE_BITS).to(torch.int64) & (2**_PLACE_BITS - 1)
        chunk = torch.arange(chunks, device=out.device).repeat_interleave(k)[:kept]
        if self.floats:
            values = heads
            broken = torch.zeros(chunks, device=out.device).index_add_(0, chunk, (~values.isfinite()).to(torch.float32))
        else:
            bins = unpack(message[middle:], kept, _BIN_BITS).to(torch.int64) & (_BINS - 1)
            values = heads[chunk * _BINS + bins]
            broken = heads.view(chunks, _BINS).isnan().any(1)
        out[chunk * self.chunk + places] = values.to(out.dtype)
        for c in broken.nonzero().view(-1).tolist():
            out[c * self.chunk : (c + 1) * self.chunk] = math.nan
        return out

    def message_bytes(self, numel: int, itemsize: int) -> int:
        full, rest = divmod(numel, self.chunk)
        kept = full * self.k + min(self.k, rest)
        places = -(-kept * _PLACE_BITS // 8)
        if self.floats:
            return 4 * kept + places
        return 4 * _BINS * (full + (rest > 0)) + places + -(-kept * _BIN_BITS // 8)
