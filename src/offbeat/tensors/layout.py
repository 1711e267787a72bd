"""How a model's tensors lie in flat memory: one stretch for each dtype and device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies."""

    name: str
    part: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """This tensor inside the flat one (the memory is shared)."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def rows(self, flat: Tensor) -> Tensor:
        """The same for a table of flat rows: one tensor a row."""
        return flat[:, self.offset : self.offset + self.numel].view(flat.shape[0], *self.shape)


@dataclass(frozen=True)
class Layout:
    """The slots in order, and the kind and length of each flat part."""

    slots: tuple[Slot, ...]
    kinds: tuple[tuple[torch.dtype, torch.device], ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]], keep_strides: bool = False) -> Layout:
        """Lay tensors out in the order given. ``keep_strides`` keeps channels-last tensors channels-last."""
        kinds: dict[tuple[torch.dtype, torch.device], int] = {}
        lengths: list[int] = []
        slots = []
        for name, tensor in named:
            part = kinds.setdefault((tensor.dtype, tensor.device), len(kinds))
            if part == len(lengths):
                lengths.append(0)
            stride = tensor.stride() if keep_strides and _dense(tensor) else _contiguous(tensor.shape)
            slots.append(Slot(name, part, lengths[part], tensor.shape, stride))
            lengths[part] += tensor.numel()
        return cls(tuple(slots), tuple(kinds), tuple(lengths))

    @classmethod
    def apart(cls, named: Iterable[tuple[str, Tensor]]) -> Layout:
        """Contiguous tensors that lie where they are: each is a part of its own."""
        held = list(named)
        slots = [Slot(name, k, 0, t.shape, _contiguous(t.shape)) for k, (name, t) in enumerate(held)]
        return cls(tuple(slots), tuple((t.dtype, t.device) for _, t in held), tuple(t.numel() for _, t in held))

    def empty(self, rows: int | None = None) -> list[Tensor]:
        """Uninitialised flat memory: one vector a part, or one table of ``rows`` vectors."""
        shape = (lambda n: (n,)) if rows is None else (lambda n: (rows, n))
        return [torch.zeros(shape(n), dtype=d, device=v) for n, (d, v) in zip(self.lengths, self.kinds, strict=True)]

    def views(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """All tensors inside the flat parts, in slot order."""
        return [slot.view(parts[slot.part]) for slot in self.slots]


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))
