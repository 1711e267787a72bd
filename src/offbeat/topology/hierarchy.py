"""Workers in nodes: consecutive ranks on one machine, as torchrun numbers them, that act as one worker outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Nodes:
    """``size`` workers in nodes of ``per_node``. The first rank of a node leads it: it alone talks to other nodes."""

    size: int
    per_node: int = 1

    def __post_init__(self) -> None:
        if self.per_node < 1 or self.size % self.per_node:
            fitting = ", ".join(str(n) for n in range(1, self.size + 1) if self.size % n == 0)
            raise ValueError(f"nodes of {self.per_node} do not make up {self.size} workers; use one of {fitting}")

    @property
    def count(self) -> int:
        return self.size // self.per_node

    def of(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.per_node

    def leader(self, node: int) -> int:
        return node * self.per_node

    def leads(self, rank: int) -> bool:
        return rank % self.per_node == 0

    def spread(self, of_nodes: Mapping[int, T]) -> dict[int, T]:
        """What is said of nodes, said of their ranks."""
        if self.per_node == 1:
            return dict(of_nodes)
        return {rank: said for node, said in of_nodes.items() for rank in self.ranks(node)}

    def spread_all(self, of_nodes: Iterable[tuple[int, T]]) -> list[tuple[int, T]]:
        """The same of things of which a node may have several."""
        return [(rank, said) for node, said in of_nodes for rank in self.ranks(node)]

    def ranks(self, node: int) -> tuple[int, ...]:
        first = self.leader(node)
        return tuple(range(first, first + self.per_node))
