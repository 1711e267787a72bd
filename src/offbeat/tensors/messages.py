"""What every codec is, and what a message must be like."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@runtime_checkable
class Codec(Protocol):
    """Bytes from numbers, numbers from bytes. Codecs are values: equal settings make equal codecs."""

    @property
    def name(self) -> str:
        """Short name, as on the command line."""

    def encode(self, x: Tensor, key: tuple[int, ...]) -> Tensor:
        """The message (1-D uint8, on x's device) for a 1-D floating tensor.

        Any randomness comes from ``key`` alone, so the same key gives the same bytes (on the same kind of device: CPU
        and CUDA generators differ). Put the rank into the key: workers that share draws share their rounding errors,
        and averaging then no longer cancels them.
        """

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """The numbers in a message, as a 1-D tensor with the length, dtype and device of ``like``."""

    def message_bytes(self, numel: int, itemsize: int) -> int:
        """The exact length of the message for ``numel`` numbers of ``itemsize`` bytes each."""


def check_input(codec: Codec, x: Tensor) -> None:
    if x.dim() != 1 or x.dtype not in _FLOATS:
        seen = f"{x.dtype} of shape {tuple(x.shape)}"
        raise ValueError(f"{codec.name} encodes flat float16, bfloat16, float32 or float64 tensors, not {seen}")


def check_message(codec: Codec, message: Tensor, like: Tensor) -> None:
    if like.dtype not in _FLOATS:
        raise ValueError(f"{codec.name} decodes to float16, bfloat16, float32 or float64, not {like.dtype}")
    check_length(codec, message, like.numel(), like.element_size())


def check_length(codec: Codec, message: Tensor, numel: int, itemsize: int = 4) -> None:
    due = codec.message_bytes(numel, itemsize)
    if message.dtype != torch.uint8 or message.shape != (due,):
        raise ValueError(
            f"a {codec.name} message for {numel} numbers is {due} bytes (uint8), not {message.dtype} of shape "
            f"{tuple(message.shape)}; decode with the codec and the length it was encoded with"
        )
