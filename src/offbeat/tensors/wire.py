"""What travels: how many bytes a collective sends, and vectors as messages of a codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.tensors.codec import Codec
from offbeat.tensors.stretches import Stretches
from offbeat.tensors.vector import Vec, wide


def all_reduce_bytes(members: int, nbytes: int) -> int:
    """Bytes that all members together send: a ring's, 2(P − 1)/P · n each, whatever algorithm was chosen."""
    return 2 * (members - 1) * nbytes


def all_gather_bytes(members: int, message_bytes: int) -> int:
    """Bytes that all members together send: each its message to every other."""
    return members * (members - 1) * message_bytes


def two_phase_bytes(stretches: Sequence[int]) -> int:
    """Bytes that all members together send in a coded sum: of each stretch everyone's share to its owner, and the sum
    from there to everyone."""
    return 2 * (len(stretches) - 1) * sum(stretches)


def sent_in_phases(stretches: Stretches, place: int) -> int:
    """Bytes that one member sends of them: all that is not its own stretch, and the sum of that to all others."""
    return sum(stretches.lengths) + (stretches.members - 2) * stretches.lengths[place]


def message_bytes(x: Vec, codec: Codec | None) -> int:
    """Bytes of one message that carries ``x``."""
    if codec is None:
        return sum(p.numel() * torch.empty(0, dtype=wide(p.dtype)).element_size() for p in x.parts) + x._phantom_bytes
    real = sum(codec.message_bytes(p.numel(), p.element_size()) for p in x.parts)
    return real + (codec.message_bytes(x._phantom_bytes // 4, 4) if x._phantom_bytes else 0)


def encode(x: Vec, codec: Codec, key: tuple[int, ...]) -> Tensor:
    """``x`` as one message in host memory."""
    messages = [codec.encode(p, (*key, k)) for k, p in enumerate(x.parts)]
    return (messages[0] if len(messages) == 1 else torch.cat([m.cpu() for m in messages])).cpu()


def decode(message: Tensor, like: Vec, codec: Codec) -> Vec:
    """A message as a vector like ``like``, in the dtypes in which it can be summed."""
    parts, start = [], 0
    for p in like.parts:
        length = codec.message_bytes(p.numel(), p.element_size())
        parts.append(codec.decode(message[start : start + length].to(p.device), p))
        start += length
    return Vec([p.to(wide(p.dtype)) for p in parts], used=like.used)
