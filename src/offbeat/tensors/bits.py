"""Small whole numbers as bits: side by side in a fixed width, and in the Elias-omega code."""

from __future__ import annotations

import torch
from torch import Tensor


def elias_omega(n: int) -> str:
    """The Elias-omega code of a whole number from 1 up, as a string of bits: 1 → 0, 2 → 100, 4 → 101000."""
    if n < 1:
        raise ValueError(f"Elias-omega codes begin at 1, and {n} is below it; code n + 1 instead")
    code = "0"
    while n > 1:
        code = f"{n:b}{code}"
        n = n.bit_length() - 1
    return code


def elias_number(code: str) -> int:
    """The number whose Elias-omega code this is: the inverse of ``elias_omega``."""
    n, at = 1, 0
    while code[at : at + 1] == "1":
        n, at = int(code[at : at + n + 1], 2), at + n + 1
    if at != len(code) - 1 or code[at] != "0":
        raise ValueError(f"{code!r} is not one Elias-omega code; such a code is what elias_omega(n) returns")
    return n


def elias_bits(numbers: Tensor) -> int:
    """The bits of all these numbers' Elias-omega codes together."""
    total, n = numbers.numel(), numbers
    while (n := n[n > 1]).numel():
        width = torch.frexp(n.to(torch.float64)).exponent.to(torch.int64)
        total += int(width.sum())
        n = width - 1
    return total


def pack(codes: Tensor, bits: int) -> Tensor:
    """int16 codes, side by side in ``bits`` bits each, lowest bits first."""
    if bits == 8:
        return codes.to(torch.int8).view(torch.uint8)
    if bits == 16:
        return codes.contiguous().view(torch.uint8)
    n = codes.numel()
    # Eight codes fill exactly `bits` bytes. Row i holds the i-th code of every such group, so that each step below
    # is one operation on a whole row.
    rows = torch.nn.functional.pad(codes, (0, -n % 8)).view(-1, 8).t().to(torch.int32, copy=True).contiguous()
    rows &= (1 << bits) - 1
    out = torch.zeros(bits, rows.shape[1], dtype=torch.int32, device=codes.device)
    for i, j, shift in _overlaps(bits):
        out[j] |= rows[i] << shift if shift >= 0 else rows[i] >> -shift
    return (out & 255).to(torch.uint8).t().reshape(-1)[: -(-n * bits // 8)]


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    """The ``n`` signed codes that ``pack`` wrote."""
    if bits == 8:
        return packed.contiguous().view(torch.int8)
    if bits == 16:
        return read_as(packed, torch.int16)
    columns = torch.nn.functional.pad(packed, (0, -packed.numel() % bits)).view(-1, bits).t().to(torch.int32)
    columns = columns.contiguous()
    out = torch.zeros(8, columns.shape[1], dtype=torch.int32, device=packed.device)
    for i, j, shift in _overlaps(bits):
        out[i] |= columns[j] >> shift if shift >= 0 else columns[j] << -shift
    spare = 32 - bits
    return ((out << spare) >> spare).t().reshape(-1)[:n]  # the shift back copies the sign bit down


def read_as(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes read as wider numbers; copied only where they lie at an odd place inside a larger buffer."""
    aligned = message.is_contiguous() and message.storage_offset() % dtype.itemsize == 0
    return (message if aligned else message.clone(memory_format=torch.contiguous_format)).view(dtype)


def _overlaps(bits: int) -> list[tuple[int, int, int]]:
    """(code, byte, shift) for each code that has bits in a byte; shift is to the left when packing."""
    pairs = ((i, j, i * bits - j * 8) for i in range(8) for j in range(bits))
    return [(i, j, shift) for i, j, shift in pairs if -bits < shift < 8]
