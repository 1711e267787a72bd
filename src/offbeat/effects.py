"""Everything a strategy may ask for. Nothing else ever reaches a runtime.

Rule 1. A strategy is an ``async def`` coroutine. It awaits the requests below and holds no I/O, no clock, no thread.
Rule 2. Every worker runs the same text. The k-th mix of one worker meets the k-th mix of every other worker.
Rule 3. A request reads its tensors when it is made; what is changed afterwards does not travel.
Rule 4. An answer may be shared with other workers: read it, copy it, never write into it.
Rule 5. Weights change between steps only: after ``Grad`` was answered and before the next ``Next``. (In a user's own
        loop the forward pass has already read them when ``Grad`` is asked.)
Rule 6. A worker that has run out of data goes on answering: it gets idle turns, in which ``Grad`` answers ``None``.

A runtime drives a coroutine with ``coroutine.send(answer)``; there is no asyncio underneath.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from offbeat.codec import Codec
from offbeat.topology import Mixing
from offbeat.vector import Vec

T = TypeVar("T")


class Effect(Generic[T]):
    """A request to the runtime; awaiting it gives the answer, with its own type."""

    __slots__ = ()

    def __await__(self) -> Generator[Effect[T], T, T]:
        return (yield self)


class Turn(Enum):
    """What the next step is: one with data, one without (others still have some), or none at all."""

    WORK = "work"
    IDLE = "idle"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Next(Effect[Turn]):
    """May I take step ``t``? (Strategies say ``async for t in me.steps()``.)"""

    t: int


@dataclass(frozen=True, slots=True)
class Grad(Effect[Vec | None]):
    """The gradient of my next batch at my weights; takes time. ``None`` in an idle turn."""


@dataclass(frozen=True, slots=True)
class GradMix(Effect[Vec | None]):
    """The gradient averaged along ``W`` while backward still runs, over those who have data.

    Without a codec the exchange is overlapped with backward, bucket by bucket; with one it follows backward.
    """

    W: Mixing
    codec: Codec | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Mix(Effect[Vec]):
    """Exchange ``x`` along my row of ``W``: Σ_j W[me, j] · x_j. With a codec, one's own share is coded too."""

    x: Vec
    W: Mixing
    codec: Codec | None = None


class Ticket(Generic[T]):
    """Something that was begun. Only ``Finish`` looks inside."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Begin(Effect[Ticket[Vec]]):
    """Start a mix and go on computing."""

    effect: Mix


@dataclass(frozen=True, slots=True, eq=False)
class Finish(Effect[Vec]):
    """The result of what was begun; waits only if it is not there yet."""

    ticket: Ticket[Vec]


CLOSED_SET = (Next, Grad, GradMix, Mix, Begin, Finish)


def not_ours(effect: object) -> TypeError:
    """The error for awaiting something that no runtime can answer."""
    names = ", ".join(e.__name__ for e in CLOSED_SET)
    return TypeError(
        f"a strategy awaited {effect!r}, which is not an Offbeat effect; await one of {names} (offbeat.effects)"
    )
