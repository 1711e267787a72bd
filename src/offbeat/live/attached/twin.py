"""A replica as vectors and numbers: the weights, and what the inner optimiser remembers for each parameter.

A worker that has missed many rounds takes over another's (`offbeat.rounds.spares`). What torch's own optimisers
remember is a tensor of the parameter's shape or a number, by parameter and name, and nothing beside; of others nobody
knows. Weights and tensors are laid into vectors like the gradients, which hold them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.live.attached.flat import Flat
from offbeat.tensors.vector import Vec

# Of one parameter, by name: (which vector, 0 for a number; the number; dtype and device of a tensor, or nothing).
Entry = tuple[int, Any, str, str]
Said = list[dict[str, Entry]]


class ReplicaTwin:
    """This worker's replica."""

    def __init__(self, flat: Flat, inner: torch.optim.Optimizer) -> None:
        self._flat, self._inner = flat, inner

    @staticmethod
    def of(flat: Flat, inner: torch.optim.Optimizer) -> ReplicaTwin | None:
        """None where something may hang on the optimiser's steps that a copy would not hold."""
        hooks = (getattr(inner, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
        ours = type(inner).__module__.startswith("torch.optim") and not isinstance(inner, torch.optim.LBFGS)
        return ReplicaTwin(flat, inner) if ours and flat.island is None and not any(hooks) else None

    def lay_into(self, room: Callable[[int], Vec], most: int) -> tuple[int, Said]:
        """How many vectors it takes, of ``most`` that there is room for, and what is said of them. 0: not to be had."""
        vectors = dict[str, int]()
        said: Said = []
        self._flat.x.put_into(room(0))
        for p, slot in zip(self._flat.tensors, self._flat.layout.slots, strict=True):
            entries = dict[str, Entry]()
            for name, value in self._inner.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape == p.shape:
                    where = vectors.setdefault(name, 1 + len(vectors))
                    if where >= most or not _holds(part := room(where).parts[slot.part], value):
                        return 0, []
                    slot.view(part).copy_(value)
                    entries[name] = where, None, _name(value.dtype), value.device.type
                elif isinstance(value, Tensor) and not value.dim():
                    entries[name] = 0, value.item(), _name(value.dtype), value.device.type
                elif value is None or isinstance(value, int | float):
                    entries[name] = 0, value, "", ""
                else:
                    return 0, []
            said.append(entries)
        return 1 + len(vectors), said

    def take_over(self, vectors: Sequence[Vec], said: Said) -> None:
        """Go on as the one that has laid these down."""
        self._flat.x.copy_(vectors[0])
        for p, slot, entries in zip(self._flat.tensors, self._flat.layout.slots, said, strict=True):
            state = self._inner.state[p] if entries else self._inner.state.pop(p, {})
            for name in [name for name in state if name not in entries]:
                del state[name]
            for name, (where, number, dtype, device) in entries.items():
                if where:
                    if not isinstance(state.get(name), Tensor):
                        state[name] = torch.empty_like(p, dtype=getattr(torch, dtype))
                    state[name].copy_(slot.view(vectors[where].parts[slot.part]))
                elif not dtype:
                    state[name] = number
                elif isinstance(state.get(name), Tensor):
                    state[name].fill_(number)
                else:
                    place = p.device if p.device.type == device else device
                    state[name] = torch.tensor(number, dtype=getattr(torch, dtype), device=place)


def _holds(part: Tensor, value: Tensor) -> bool:
    """Whether these numbers can lie there exactly."""
    return value.is_floating_point() and torch.promote_types(value.dtype, part.dtype) == part.dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
