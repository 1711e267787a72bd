"""Everything a method may ask for. Nothing else ever reaches a runtime.

Rule 1. A method is an ``async def`` coroutine. It awaits the requests below and holds no I/O, no clock, no thread.
Rule 2. Every worker runs the same text. The k-th mix of one worker meets the k-th mix of every other worker.
Rule 3. A request reads its tensors when it is made; what is changed afterwards does not travel.
Rule 4. An answer may be shared with other workers: read it, copy it, never write into it. What a channel answers is
        there until the next step is asked for.
Rule 5. Weights change between steps only: after ``Grad`` was answered and before the next ``Next``. (In a user's own
        loop the forward pass has already read them when ``Grad`` is asked.)
Rule 6. A worker that has run out of data goes on answering: it gets idle turns, in which ``Grad`` answers ``None``.

A runtime drives a coroutine with ``coroutine.send(answer)``; there is no asyncio underneath.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from offbeat.rounds.micro import Stop
from offbeat.rounds.rules import Rules
from offbeat.rounds.seat import Got as Got
from offbeat.tensors.codec import Codec, leaves_out, sent_to
from offbeat.tensors.vector import Vec
from offbeat.topology import Mixing

T = TypeVar("T")


def _keeps_what_it_leaves_out(codec: Codec | None, lost: Vec | None) -> None:
    if codec is not None and leaves_out(codec) and lost is None:
        raise ValueError(
            f"{codec.name} leaves most numbers out, and nothing keeps them to be sent later; "
            f"use another codec, or Mix(x, W, codec, lost=…)"
        )


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
    """May I take step ``t``? (Methods say ``async for t in me.steps()``.)

    ``among``: the ranks that take their steps together; a worker without data has idle turns as long as one of them has
    some. Everybody, where nothing is said; a worker by itself stops at once, and answers the others through a channel.
    """

    t: int
    among: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Grad(Effect[Vec | None]):
    """The gradient of my next batch at my weights; takes time. ``None`` in an idle turn."""


@dataclass(frozen=True, slots=True)
class GradMix(Effect[Vec | None]):
    """The gradient averaged along ``W`` while backward still runs, over those who have data.

    Without a codec the exchange is overlapped with backward, bucket by bucket; with one it follows backward.
    ``gathers``: as in ``Mix``.
    """

    W: Mixing
    codec: Codec | None = None
    gathers: bool = False

    def __post_init__(self) -> None:
        _keeps_what_it_leaves_out(self.codec, None)


@dataclass(frozen=True, slots=True)
class Spent(Effect[float]):
    """How many seconds my own steps have taken since I asked last: computing and being late, not exchanging."""


@dataclass(frozen=True, slots=True, eq=False)
class Mix(Effect[Vec]):
    """Exchange ``x`` along my row of ``W``: Σ_j W[me, j] · x_j.

    With a codec a whole group sums in two phases, in which each of its members sums and codes one stretch for all.
    ``gathers``: everybody gets everybody's coded share instead, and decodes all of them. So it is along a graph. One's
    own share is coded then as others get it; what goes to nobody is not coded.

    ``lost``: what coding has lost so far, to be added to ``x`` (``nothing_lost`` at the beginning). When the answer is
    there it holds what was lost this time; until then neither it nor ``x`` may change. Where shares are gathered, that
    is what coding one's own has lost.
    """

    x: Vec
    W: Mixing
    codec: Codec | None = None
    lost: Vec | None = None
    gathers: bool = False

    def __post_init__(self) -> None:
        _keeps_what_it_leaves_out(self.codec, self.lost)

    def in_two_phases(self, rank: int) -> bool:
        """Whether this worker's share is summed so."""
        if sent_to(self.codec, self.W.audience(rank)) is None:
            return False
        in_a_group = self.W.block(rank) is not None
        if self.lost is not None and not in_a_group:
            raise ValueError(f"what a codec lost is kept where a whole group takes its mean, not along {self.W}")
        return in_a_group and not self.gathers


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """What a worker has finished of its batch: Σ over samples of their gradients, and how many samples that were."""

    total: Vec
    samples: int
    pieces: int  # micro-batches
    of: int  # how many the whole would have been
    whole_s: float | None = None  # how long the whole batch took, or would have taken at this pace


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Effect[Done | None]):
    """Gradients of my next micro-batches, all at the weights of now, until ``stop`` says so; None in an idle turn.

    A batch is cut into ``micro`` micro-batches; what is not reached comes first next time. Whoever has done ``micro``
    of them in round ``r`` rings the bell of that round.
    """

    r: int
    micro: int
    stop: Stop


class Ticket(Generic[T]):
    """Something that was begun. Only ``Finish`` looks inside."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Begin(Effect[Ticket[Any]]):
    """Start a mix or a meeting and go on computing."""

    effect: Mix | Meet


@dataclass(frozen=True, slots=True, eq=False)
class Finish(Effect[Any]):
    """The result of what was begun; waits only if it is not there yet."""

    ticket: Ticket[Any]


class Keeping:
    """``channel.keep(x)``: a copy of ``x``, from which the way to later weights may be handed in; until then, or until
    the next one. A runtime may keep it ``elsewhere``, where that way will lie, which saves a copy."""

    def __init__(self) -> None:
        self.elsewhere: Callable[[Vec], Vec] | None = None
        self._memory: Vec | None = None

    def __call__(self, x: Vec) -> Vec:
        if self.elsewhere is not None:
            return self.elsewhere(x)
        self._memory = x.clone() if self._memory is None else self._memory.copy_(x)
        return self._memory


@dataclass(frozen=True, eq=False)
class Channel:
    """A partial collective: from ``Open`` on, any worker that is ready can start its next round.

    Round v averages within my block of ``whom(v)``. A worker that is still computing is answered for by its seat:
    with the gradients it still owes (``rules.absent`` "carry"; "drop" loses what is late, of "anew" its worker makes
    another for the round it is in time for), divided by all workers; or
    with its last weights ("last"), divided by the block; or with weights that follow the rounds while it computes, to
    which it adds its steps ("shared"), so that nothing is ever lost from the mean.

    Where workers make up nodes, a node is one worker here: ``whom`` mixes nodes, and all ranks of a node get the same
    results. They make the same deposits, as they share their gradients.

        partial.apply(await partial.mix(await Grad(), t))
    """

    name: str
    whom: Callable[[int], Mixing]
    rules: Rules
    apply: Callable[[list[Got]], None]  # how results change my weights; a runtime may call it between two steps
    codec: Codec | None = None
    holds: Callable[[], Vec | None] = lambda: None  # what answers for me while I stand between two steps
    per_node: int = 1
    lost: Vec | None = None  # what coding has lost, added to what is given next; whoever codes keeps it meanwhile
    like: Vec | None = None  # what its vectors look like, where they do not look like the weights
    beside: bool = False  # the run is about something else: it may be open beside a channel, or beside shared weights
    keep: Keeping = field(default_factory=Keeping, init=False, repr=False)

    def __post_init__(self) -> None:
        _keeps_what_it_leaves_out(self.codec, self.lost)

    def looks(self, x: Vec) -> Vec:
        """What its vectors look like where the weights are ``x``."""
        return x if self.like is None else self.like

    def mix(self, x: Vec, t: int) -> Offer:
        """Deposit ``x``, made in step ``t``; the results that are there to be applied, oldest first."""
        return Offer(self, x, t)

    def through(self, t: int) -> Through:
        """Whether what I handed in is through, so that ``mix`` in step ``t`` waits for nobody."""
        return Through(self, t)

    async def rest(self, x: Callable[[], Vec | None]) -> AsyncIterator[Got]:
        """I have no data left; the others may. Their results, until all have finished. ``x`` answers for me."""
        while (got := await Rest(self, x())) is not None:
            yield got


@dataclass(frozen=True, slots=True, eq=False)
class Open(Effect[None]):
    """Declare a partial collective; ``x`` answers for me until I deposit something (None: nothing does)."""

    channel: Channel
    x: Vec | None


@dataclass(frozen=True, slots=True, eq=False)
class Offer(Effect[list[Got]]):
    """Deposit and take what is there. Waits for the round if I am in time for it, and not at all if I am late."""

    channel: Channel
    x: Vec
    t: int


@dataclass(frozen=True, slots=True, eq=False)
class Through(Effect[bool]):
    """Is the round that I handed in for the last time over? If so, the next ``mix`` does not wait for it."""

    channel: Channel
    t: int


@dataclass(frozen=True, slots=True, eq=False)
class Rest(Effect[Got | None]):
    """The next result after I have run out of data; None when all have, and nothing is owed any more."""

    channel: Channel
    x: Vec | None


@dataclass(frozen=True, slots=True, eq=False)
class Share(Effect[None]):
    """From now on ``peers`` may average their weights with mine at any moment; ``x`` is what they find.

    Peers are mutual: who is mine has me among its own.
    """

    x: Vec
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Meet(Effect[None]):
    """Average my shared weights with those of ``peer``, atomically for both: the sum of the two stays what it was.

    Whoever keeps the peer's weights answers, whatever the peer is doing. (To be begun, so that computing goes on.)
    """

    peer: int


@dataclass(frozen=True, slots=True, eq=False)
class Add(Effect[Vec]):
    """Add ``delta`` to my shared weights; answers what they are then."""

    delta: Vec


@dataclass(frozen=True, slots=True, eq=False)
class Retire(Effect[Vec]):
    """I have no data left. My shared weights when nobody can change them any more: all have retired."""


CLOSED_SET = (
    Next,
    Grad,
    GradMix,
    Batch,
    Spent,
    Mix,
    Begin,
    Finish,
    Open,
    Offer,
    Through,
    Rest,
    Share,
    Meet,
    Add,
    Retire,
)


def not_ours(effect: object) -> TypeError:
    """The error for awaiting something that no runtime can answer."""
    names = ", ".join(e.__name__ for e in CLOSED_SET)
    return TypeError(
        f"a method awaited {effect!r}, which is not an Offbeat effect; await one of {names} (offbeat.method.effects)"
    )


class OnlyOurs:
    """asyncio's own awaitables fail before they reach a runtime; say what that means."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and str(error) == "no running event loop":
            raise not_ours("something of asyncio") from error
