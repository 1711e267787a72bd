"""The way of a visit: a visitor's vector goes to the visited, and its answer comes back.

On one host both lie in memory that the two share. A visitor comes again only when it has read the answer to its last
visit; so when it lays down its next vector the visited has read the one before, and when the visited answers, its last
answer has been read. One counter on each side says which visit what lies there belongs to, and goes up after the
numbers; nobody reads what is not whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from offbeat.live.carriers.group import Group
from offbeat.live.carriers.memory import nap, shared_memory, vector_bytes
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter, Work
from offbeat.tensors.vector import Vec

WORDS_BYTES = 4096


class VisitWay(Protocol):
    """Of one visitor to one visited; each side uses its own half."""

    carrier: str

    def visit(self, mine: Vec, answer: Vec) -> list[Work]:
        """The visitor's: ``mine`` goes there, and ``answer`` is filled when all of these are over."""
        ...

    def receive(self, theirs: Vec) -> list[Work]:
        """The visited's: ``theirs`` is filled when these are over."""
        ...

    def answer(self, mine: Vec) -> list[Work]: ...

    def groups(self) -> list[Group]: ...

    def close(self, together: bool = True) -> None: ...


class ByMessage:
    """Through a Gloo group of the two."""

    carrier = "gloo"

    def __init__(self, visitor: int, visited: int, board: Board, waiter: Waiter) -> None:
        ranks = (min(visitor, visited), max(visitor, visited))
        self._visitor, self._visited = visitor, visited
        self._group = Group(f"visit-{visitor}-{visited}", ranks, board, waiter)

    def visit(self, mine: Vec, answer: Vec) -> list[Work]:
        out: list[Work] = [self._group.broadcast(part, self._visitor) for part in mine.parts]
        return out + [self._group.broadcast(part, self._visited) for part in answer.parts]

    def receive(self, theirs: Vec) -> list[Work]:
        return [self._group.broadcast(part, self._visitor) for part in theirs.parts]

    def answer(self, mine: Vec) -> list[Work]:
        return [self._group.broadcast(part, self._visited) for part in mine.parts]

    def groups(self) -> list[Group]:
        return [self._group]

    def close(self, together: bool = True) -> None:
        """Nothing beside the group."""


class InMemory:
    """Where both are on one host. Vectors look like ``like``; made by both together."""

    carrier = "shm"

    def __init__(self, name: str, visitor: int, visited: int, like: Vec, board: Board, waiter: Waiter) -> None:
        ranks = visitor, visited
        kinds = [(p.dtype, p.numel()) for p in like.parts]
        nbytes = WORDS_BYTES + max(vector_bytes(kinds), 1)
        self._memory = shared_memory(name, ranks, torch.device("cpu"), WORDS_BYTES, nbytes, 1, board, waiter)
        self._views = [self._memory.vector(member, 0, WORDS_BYTES, kinds) for member in range(2)]
        self._words = self._memory.words(np.int64, 1, 0)
        self._visits = 0

    def visit(self, mine: Vec, answer: Vec) -> list[Work]:
        self._visits += 1
        self._lay(0, mine)
        return [self._comes(1, answer)]

    def receive(self, theirs: Vec) -> list[Work]:
        self._visits += 1
        return [self._comes(0, theirs)]

    def answer(self, mine: Vec) -> list[Work]:
        self._lay(1, mine)
        return []

    def _lay(self, member: int, x: Vec) -> None:
        for view, part in zip(self._views[member], x.parts, strict=True):
            view.copy_(part)
        self._words[member][0] = self._visits

    def _comes(self, member: int, x: Vec) -> Lying:
        number, word, views = self._visits, self._words[member], self._views[member]
        return Lying(lambda: bool(word[0] >= number), views, x.parts)

    def groups(self) -> list[Group]:
        return []

    def close(self, together: bool = True) -> None:
        self._views, self._words = [], []
        self._memory.close(together)


class Lying(NamedTuple):
    """When what is waited for lies there, it is copied."""

    is_there: Callable[[], bool]
    there: Sequence[Tensor]
    here: Sequence[Tensor]

    def within(self, seconds: float) -> bool:
        start = time.monotonic()
        while not self.is_there():
            if time.monotonic() - start > seconds:
                return False
            nap(start)
        for own, view in zip(self.here, self.there, strict=True):
            own.copy_(view)
        return True
