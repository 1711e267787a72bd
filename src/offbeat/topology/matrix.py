"""The mixing matrix W: row i says what worker i takes from whom, x_i ← Σ_j W_ij x_j."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.topology.graphs import Edge, clean, refuse_unless

Row = tuple[tuple[int, float], ...]

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Mixing:
    """One mixing matrix, stored by its rows. Make one with `uniform_blocks`, `from_rows` or `from_edges`.

    ``rows[i]`` holds the pairs (j, W_ij) in ascending j: those that are not zero, and always oneself.
    """

    size: int
    rows: tuple[Row, ...]
    name: str = field(default="mixing", compare=False)

    @classmethod
    def uniform_blocks(cls, size: int, blocks: Iterable[Iterable[int]], name: str = "blocks") -> Mixing:
        """Each block averages within itself; ranks in no block keep what they have."""
        rows: list[Row] = [((rank, 1.0),) for rank in range(size)]
        seen: set[int] = set()
        for members in (sorted(block) for block in blocks):
            row = tuple((rank, 1.0 / len(members)) for rank in members)  # one row, shared by all of the block
            for rank in members:
                refuse_unless(0 <= rank < size, f"rank {rank} is not one of 0 … {size - 1}; name ranks that exist")
                refuse_unless(rank not in seen, f"rank {rank} is in a block twice; blocks must not overlap")
                seen.add(rank)
                rows[rank] = row
        return cls(size, tuple(rows), name)

    @classmethod
    def from_rows(cls, size: int, rows: Sequence[Mapping[int, float]], name: str = "rows") -> Mixing:
        """From one mapping {sender: weight} for each rank, whatever the weights are."""
        refuse_unless(len(rows) == size, f"{len(rows)} rows were given for {size} ranks; give one row a rank")
        for rank, row in enumerate(rows):
            for j in row:
                refuse_unless(
                    0 <= j < size,
                    f"row {rank} takes from rank {j}, but ranks are 0 … {size - 1}; name ranks that exist",
                )
        kept = ({rank: 0.0} | {j: float(w) for j, w in row.items() if w} for rank, row in enumerate(rows))
        return cls(size, tuple(tuple(sorted(row.items())) for row in kept), name)

    @classmethod
    def from_edges(cls, size: int, edges: Iterable[Edge], name: str = "edges") -> Mixing:
        """Metropolis weights on an undirected graph: symmetric, and doubly stochastic for every graph."""
        links = [set[int]() for _ in range(size)]
        for i, j in clean(edges, size):
            links[i].add(j)
            links[j].add(i)
        rows = []
        for rank, near in enumerate(links):
            row = {j: 1.0 / (1 + max(len(near), len(links[j]))) for j in near}
            regular = all(len(links[j]) <= len(near) for j in near)
            rows.append(row | {rank: 1.0 / (1 + len(near)) if regular else 1.0 - math.fsum(row.values())})
        return cls.from_rows(size, rows, name)

    def row(self, rank: int) -> Mapping[int, float]:
        """What ``rank`` takes from whom: {j: W[rank, j]}, ascending, itself included."""
        return self._maps[rank]

    def senders(self, rank: int) -> tuple[int, ...]:
        """The others that ``rank`` hears from, ascending."""
        return self._senders[rank]

    def receivers(self, rank: int) -> tuple[int, ...]:
        """The others that hear from ``rank``, ascending."""
        return self._receivers[rank]

    def audience(self, rank: int) -> int:
        """How many others hear from ``rank``."""
        ranks = self.block(rank)  # of a thousand who average evenly nobody makes lists of receivers
        return len(self.receivers(rank)) if ranks is None else len(ranks) - 1

    def block(self, rank: int) -> tuple[int, ...] | None:
        """The ranks, itself included, that average evenly among themselves and with nobody else; else None.

        Where there is one, a plain all-reduce among these ranks performs the exchange.
        """
        return self._blocks[rank]

    def matrix(self) -> NDArray[np.float64]:
        """W as a dense array, (size, size)."""
        dense = np.zeros((self.size, self.size))
        for rank, row in enumerate(self.rows):
            for j, weight in row:
                dense[rank, j] = weight
        return dense

    def is_row_stochastic(self) -> bool:
        """Every row sums to 1: workers that agree stay as they are. (MATCHA's own weights may be negative.)"""
        return all(abs(math.fsum(weight for _, weight in row) - 1) <= _TOLERANCE for row in set(self.rows))

    def is_column_stochastic(self) -> bool:
        """Every column sums to 1: the sum over all workers is preserved."""
        sums = [0.0] * self.size
        for row in self.rows:
            for j, weight in row:
                sums[j] += weight
        return all(abs(total - 1) <= _TOLERANCE for total in sums)

    def is_doubly_stochastic(self) -> bool:
        """Both: the mean is preserved, and mixing stops when all agree."""
        return self.is_row_stochastic() and self.is_column_stochastic()

    def spectral_gap(self) -> float:
        """1 − the second largest |eigenvalue|: 1 is the exact mean at once, 0 never gets there."""
        w = self.matrix()
        if self.size == 1:
            return 1.0
        sizes = np.abs(np.linalg.eigvalsh(w) if np.array_equal(w, w.T) else np.linalg.eigvals(w))
        return 1.0 - float(np.sort(sizes)[-2])

    def __str__(self) -> str:
        if self.size > 16:
            degrees = [len(row) - 1 for row in self.rows]
            return f"{self.name}: {self.size} ranks, each mixing with {min(degrees)} to {max(degrees)} others"
        return "\n".join([f"{self.name}: {self.size} ranks", *map(_line, self.matrix())])

    def __reduce__(self) -> tuple[Any, ...]:
        return Mixing, (self.size, self.rows, self.name)  # the read-only views below cannot be pickled

    def __hash__(self) -> int:
        return hash((self.size, self.rows[0], self.rows[-1]))

    @cached_property
    def _maps(self) -> tuple[Mapping[int, float], ...]:
        shared = {id(row): MappingProxyType(dict(row)) for row in self.rows}
        return tuple(shared[id(row)] for row in self.rows)

    @cached_property
    def _senders(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(j for j, weight in row if j != i and weight) for i, row in enumerate(self.rows))

    @cached_property
    def _receivers(self) -> tuple[tuple[int, ...], ...]:
        columns: list[list[int]] = [[] for _ in range(self.size)]
        for rank, senders in enumerate(self._senders):
            for j in senders:
                columns[j].append(rank)
        return tuple(map(tuple, columns))

    @cached_property
    def _blocks(self) -> tuple[tuple[int, ...] | None, ...]:
        # Rows of a block are one shared object where we made them: look at each object once, not at each rank.
        distinct = {id(row): row for row in self.rows}
        even = {key: all(abs(weight * len(row) - 1) <= 1e-12 for _, weight in row) for key, row in distinct.items()}
        support = {key: tuple(j for j, _ in row) if even[key] else None for key, row in distinct.items()}
        takers = [0] * self.size
        for row in self.rows:
            for j, weight in row:
                takers[j] += weight != 0
        mine = [support[id(row)] for row in self.rows]
        found = {
            key: ranks if ranks and all(mine[j] == ranks and takers[j] == len(ranks) for j in ranks) else None
            for key, ranks in support.items()
        }
        return tuple(found[id(row)] for row in self.rows)


def _line(weights: NDArray[np.float64]) -> str:
    return " ".join(f"{weight:6.3f}" if weight else "     ·" for weight in weights)
