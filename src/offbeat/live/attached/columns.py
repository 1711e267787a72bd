"""A batch as columns: tensors (and arrays, and lists) with one row a sample, in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from offbeat.live.transport.errors import OffbeatError


def rows_of(batch: Any) -> int:
    """How many samples a batch has; refuses one that does not say so, or says so twice."""
    sizes = [column.shape for column in _leaves(batch)]
    if not sizes:
        raise OffbeatError(
            f"a batch of type {type(batch).__name__} holds no tensors; use a tensor, or a tuple, list or dict of some"
        )
    if any(not shape for shape in sizes):
        raise OffbeatError("a tensor of the batch has no dimensions; let the first dimension count the samples")
    rows = sorted({int(shape[0]) for shape in sizes})
    if len(rows) > 1:
        raise OffbeatError(
            f"the tensors of a batch have {', '.join(map(str, rows))} rows; give all of them one row a sample "
            "(samples of unequal length can be padded, and cut by cost=)"
        )
    return rows[0]


def columns(batch: Any, lo: int, hi: int, rows: int) -> Any:
    """The samples from ``lo`` to ``hi``, in a batch of the same form."""
    return _each(batch, rows, lambda column: column[lo:hi])


def row(batch: Any, k: int, rows: int) -> Any:
    """One sample, in the same form without the first dimension."""
    return _each(batch, rows, lambda column: column[k])


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def _leaves(batch: Any) -> Iterator[Any]:
    if _is_leaf(batch):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _leaves(value)


def _each(batch: Any, rows: int, cut: Callable[[Any], Any]) -> Any:
    if _is_leaf(batch):
        return cut(batch)
    if isinstance(batch, Mapping):
        parts = {name: _each(value, rows, cut) for name, value in batch.items()}
        return _like(type(batch), parts)
    if isinstance(batch, (tuple, list)):
        if len(batch) == rows and next(_leaves(batch), None) is None:
            return cut(batch)  # such as a list of strings, one a sample
        items = [_each(value, rows, cut) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _like(kind: Callable[[Any], Any], parts: dict[Any, Any]) -> Any:
    """Most kinds of dict are made from a dict; a ``defaultdict`` is not, and becomes a plain one."""
    try:
        return kind(parts)
    except TypeError:
        return parts
