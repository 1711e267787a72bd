"""An island: the ranks that hold one replica between them, a shard each. To everybody else it is one worker.

Each shard has a world of its own, the ranks that hold it, one on each island: there they are numbered as the islands.
Beside it each island has a small world inside, for numbers that are sums over all shards, and for what must be common
to it. Its first rank leads.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.live.worker.board import Board
from offbeat.live.worker.exchange_client import InStep
from offbeat.live.worker.waiter import Waiter

Ranks = tuple[int, ...]


class Island:
    """This rank's. ``between``: the board of those who hold the same shard; ``inside``: that of the island."""

    def __init__(self, world: Board, own: Ranks, patience_s: float) -> None:
        """All ranks come here, each with the ranks of its island; ``world`` is needed no longer then."""
        self.islands = islands = _tiling(world, own, Waiter(world, patience_s))
        rank, store, name = world.rank, world.store("islands"), world.name
        self.world, self.homes = name, world.homes  # the names of all ranks' hosts, where there are several
        self.number = next(k for k, ranks in enumerate(islands) if rank in ranks)
        self.shard = islands[self.number].index(rank)
        self.size = len(islands[0])
        column = tuple(ranks[self.shard] for ranks in islands)
        self.between = Board(store, f"{name}/shard-{self.shard}", self.number, len(islands), column, world.of_job)
        self.inside = Board(
            store, f"{name}/island-{self.number}", self.shard, self.size, islands[self.number], world.of_job
        )
        self.between.beside, self.inside.beside = self.inside, self.between
        self.waiter = Waiter(self.inside, patience_s)
        self._in_step: InStep | None = None  # among the ranks of the island
        try:
            self._meet(patience_s)
        except BaseException as error:
            for board in (self.between, self.inside):
                board.fail(f"{type(error).__name__}: {error}")
                board.abandon()
            raise
        world.close()

    @property
    def hosts(self) -> int:
        """On how many those are who hold one shard, at most: the same on all ranks."""
        columns = zip(*self.islands, strict=True)
        return max(len({self.homes[rank] for rank in ranks if self.homes} or {""}) for ranks in columns)

    @property
    def leads(self) -> bool:
        return self.shard == 0

    def _meet(self, patience_s: float) -> None:
        self.between.agree({}, patience_s)
        self.inside.agree({}, patience_s)
        if self.size > 1:
            assert self.inside.line is not None
            self._in_step = InStep(self.inside.line, self.inside, self.waiter)

    def told(self, name: str, text: str) -> list[str]:
        """What the ranks of the island say under that name, when all have."""
        names = [f"{name}/{shard}" for shard in range(self.size)]
        self.inside.publish(names[self.shard], text)
        self.waiter.until(lambda: all(self.inside.published(one) is not None for one in names), "this island's ranks")
        return [self.inside.published(one) or "" for one in names]

    def agree_on(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """A reduction among the ranks of the island; gives a new tensor."""
        if self._in_step is None:
            return tensor.detach().clone()
        return self._in_step.agree_on(tensor, op, "the other shards of this island").to(tensor.device)

    def longest(self, seconds: float) -> float:
        """Of what the ranks of the island say: the same on all of them."""
        return float(self.agree_on(torch.tensor([seconds], dtype=torch.float64), dist.ReduceOp.MAX).item())

    def take_over(self, tensor: Tensor) -> None:
        """The leader's numbers for all of the island."""
        if self._in_step is not None:
            self._in_step.broadcast(tensor, "the first shard of this island")

    def fail(self, message: str) -> None:
        self.inside.fail(message)

    def close(self) -> None:
        """All are through."""
        self._leave()
        self.inside.close()

    def abandon(self) -> None:
        """Leave without waiting for anybody."""
        self._leave()
        self.inside.abandon()

    def _leave(self) -> None:
        if self._in_step is not None:
            self._in_step.close()
            self._in_step = None


def _tiling(world: Board, own: Ranks, waiter: Waiter) -> tuple[Ranks, ...]:
    """All islands, in the order of their first ranks. All ranks ask for it, and all refuse what does not fit."""
    world.publish(f"island/{world.rank}", json.dumps(own))
    everyone = range(world.size)
    waiter.until(lambda: all(world.published(f"island/{rank}") is not None for rank in everyone), "the others' islands")
    told = [tuple(json.loads(world.published(f"island/{rank}") or "[]")) for rank in everyone]
    try:
        return checked(told)
    except ValueError:
        world.all_have_read()
        raise


def checked(told: list[Ranks]) -> tuple[Ranks, ...]:
    """The islands that ranks have told of, each its own; a sentence where they do not make up the world."""
    size = len(told)
    for rank, ranks in enumerate(told):
        if rank not in ranks:
            raise ValueError(
                f"rank {rank} is not in the mesh of ranks {list(ranks)} that its model is sharded over; "
                "shard each rank's model over ranks that include it"
            )
        for other in ranks:
            if other >= size or told[other] != ranks:
                theirs = "is not there" if other >= size else f"is in one of ranks {list(told[other])}"
                raise ValueError(
                    f"rank {rank} is in an island of ranks {list(ranks)}, but rank {other} {theirs}; give every rank "
                    "of an island the same mesh"
                )
    islands = tuple(sorted(set(told)))
    sizes = [len(ranks) for ranks in islands]
    if len(set(sizes)) > 1:
        shown = ", ".join(str(list(ranks)) for ranks in islands)
        raise ValueError(
            f"the islands {shown} have {', '.join(map(str, sizes))} ranks; a shard is averaged with the same shard "
            "elsewhere, so make them of one size"
        )
    if len(islands) == 1 and size > 1:
        fitting = [n for n in range(1, size) if size % n == 0]
        raise ValueError(
            f"the model is sharded over all {size} ranks, which is one island with nobody to average with; shard it "
            f"over meshes of {' or '.join(map(str, fitting))} ranks, or train without Offbeat"
        )
    return islands
