"""When a partial round starts.

Rounds of a channel are numbered 0, 1, 2, … and run in that order; a run that was taken up again goes on with the number
it had reached. Where rounds are made of those who have arrived (`offbeat.rounds.pool`), each seat counts the rounds
that it has a part in, and what it says of itself goes by that count; elsewhere the two are the same. Everything is
decided by these numbers, never by timing; but for a grace window, for which the drivers say what time it is. A *base*
is the number of results that were contained in the weights a step was begun with; a contribution with base b in round v
is stale by v − b.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from offbeat.rounds.grace import Grace
from offbeat.rounds.pool import Pool
from offbeat.rounds.rules import Rules


class Say(Enum):
    """What a seat tells the referee."""

    ARRIVED = auto()  # position, base, next base
    PASSED = auto()  # base, next base
    BEGAN = auto()  # base
    RENEWED = auto()  # base
    FINISHED = auto()
    DIED = auto()
    RETURNED = auto()  # base
    STANDS = auto()
    BACK = auto()
    OVER = auto()


class Notice(NamedTuple):
    """One thing a seat tells; numbers that it does not say are 0, a next base that nobody knows is −1."""

    what: Say
    position: int = 0
    base: int = 0
    next_base: int = -1


@dataclass
class Referee:
    """Says when a round starts. One for a channel."""

    rules: Rules
    size: int
    seed: int
    started: int = 0  # rounds started so far, so also the number of the next one
    deadline_s: float | None = None  # when the next round starts, if nothing is heard before: `tick` is called then
    in_batches: bool = False  # those who have come meet when `tick` says so, not one by one as they come
    _position: list[int] = field(default_factory=list)  # the last round a worker has arrived for
    _computing: list[int | None] = field(default_factory=list)  # the base of the step it is in, if it is in one
    _deposit: list[int] = field(default_factory=list)  # the base of its last deposit
    _finished: set[int] = field(default_factory=set)  # the dead among them
    _dead: set[int] = field(default_factory=set)
    _standing: set[int] = field(default_factory=set)
    _held: set[int] = field(default_factory=set)
    _training: set[int] = field(default_factory=set)  # neither finished nor standing nor held
    _arrived: set[int] = field(default_factory=set)  # of those, who has arrived for the next round
    _pool: Pool | None = None
    _ticks: bool = False
    _still: bool = False  # after all have stood, until one has taken a step
    _grace: Grace | None = None
    _now_s: float = 0.0
    _members: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of rounds whose members nobody has asked for
    _had_part: list[int] = field(default_factory=list)  # how many rounds have started that a worker has a part in

    def __post_init__(self) -> None:
        if self.rules.pool is not None:
            self._pool = Pool(self.size, self.rules.pool, self.seed, self.rules.draws)
            self._had_part = [self.started] * self.size
        if self.rules.grace:
            self._grace = Grace(self.size, self.rules.grace, self.rules.late)
        self._training = set(range(self.size))
        self._position = [self.started - 1] * self.size
        self._computing = [self.started] * self.size
        self._deposit = [self.started] * self.size

    @property
    def missing(self) -> set[int]:
        """Who trains, and has not arrived for the next round."""
        return self._training - self._arrived

    def hear(self, rank: int, notice: Notice, now_s: float = 0.0) -> list[int]:
        """What the seat of ``rank`` tells. The rounds that start."""
        self._now_s = now_s
        if self._grace is not None and notice.what in (Say.ARRIVED, Say.PASSED):
            self._grace.came(rank, now_s)
        next_base = notice.next_base if notice.next_base >= 0 else None
        match notice.what:
            case Say.ARRIVED:
                return self.arrived(rank, notice.position, notice.base, next_base)
            case Say.PASSED:
                return self.passed(rank, notice.base, next_base)
            case Say.BEGAN:
                return self.began(rank, notice.base)
            case Say.RENEWED:
                return self.renewed(rank, notice.base)
            case Say.FINISHED:
                return self.finished(rank)
            case Say.DIED:
                return self.died(rank)
            case Say.RETURNED:
                return self.returned(rank, notice.base)
            case Say.STANDS:
                return self.stands(rank)
            case Say.BACK:
                return self.back(rank)
            case Say.OVER:
                return self.over(rank)

    def arrived(self, rank: int, position: int, base: int, next_base: int | None = None) -> list[int]:
        """``rank`` has deposited work with ``base`` and counts for round ``position``. The rounds that start."""
        self._position[rank] = max(self._position[rank], position)
        self._still = False
        self._note(rank)
        return self.passed(rank, base, next_base)

    def passed(self, rank: int, base: int, next_base: int | None = None) -> list[int]:
        """``rank`` has deposited work with ``base`` too late for the round it was made for, and goes on.

        ``next_base``: what its next step will contain at least, where it may have begun before ``began`` is heard.
        """
        self._computing[rank], self._deposit[rank] = next_base, base
        return self._start()

    def began(self, rank: int, base: int) -> list[int]:
        """``rank`` computes at weights that contain ``base`` results."""
        self._computing[rank] = base
        return self._start()

    def finished(self, rank: int) -> list[int]:
        """``rank`` has no more data; it never counts again."""
        self._finished.add(rank)
        return self.stands(rank)

    def died(self, rank: int) -> list[int]:
        """``rank`` is no worker any more: nobody waits for it, and a quorum is one of those who are left."""
        self._dead.add(rank)
        return self.finished(rank)

    def lost(self, rank: int) -> None:
        """The seat of ``rank`` is no more, with all that it would have said of rounds it is in."""
        if self._pool is not None:
            self._pool.begin_anew(rank)

    def returning(self, rank: int, twin_of: int) -> None:
        """``rank``, which had died, is a worker again, the twin of another one between two steps. It is on its way:
        as one that stands, it is waited for by nobody.
        """
        self._dead.discard(rank)
        self._finished.discard(rank)  # it stands, as whoever has finished does
        self._computing[rank], self._deposit[rank] = None, self._deposit[twin_of]
        if self._pool is not None:
            self._had_part[rank] = self._had_part[twin_of]
            self._pool.begin_anew(rank)
        self._position[rank] = self.started_with(rank) - 1
        if self._grace is not None:
            self._grace.forget(rank)

    def returned(self, rank: int, base: int) -> list[int]:
        """It is there, and computes at weights that contain ``base`` results."""
        self._standing.discard(rank)
        self._computing[rank] = base
        self._returns(rank)
        return self._start()

    def renewed(self, rank: int, base: int) -> list[int]:
        """A worker without a step to take has taken ``base`` results; its weights are as new as that."""
        self._deposit[rank] = base
        return self._start()

    def stands(self, rank: int) -> list[int]:
        """``rank`` takes no step until it is back: nobody waits for it."""
        self._standing.add(rank)
        self._computing[rank] = None
        self._leaves(rank)
        return self._start()

    def back(self, rank: int) -> list[int]:
        """``rank`` is about to take steps again, unless it has finished.

        From now on nobody draws before a step is over: each has been told, or is being told, how many rounds it has a
        part in, and averages with all when their results are there.
        """
        self._standing.discard(rank)
        self._still = True
        self._returns(rank)
        return self._start()

    def over(self, rank: int) -> list[int]:
        """A round is over for ``rank``, where somebody may draw it again, or it somebody else."""
        assert self._pool is not None
        self._pool.over(rank)
        return self._start()

    def held(self, ranks: set[int]) -> list[int]:
        """These, and no others, are held up elsewhere: nobody waits for them until they are free.

        What such a worker was computing may come in later than a bound allows: a bound that waited for it could lock.
        """
        before, self._held = self._held, set(ranks)
        for rank in self._held - before:
            self._leaves(rank)
        for rank in before - self._held:
            self._returns(rank)
        return self._start()

    def tick(self, now_s: float) -> list[int]:
        """Time has passed. The rounds that start."""
        self._ticks, self._now_s = True, now_s
        begun = self._start()
        self._ticks = False
        return begun

    def members(self, version: int) -> tuple[int, ...] | None:
        """Who takes part in a round that has started, to be asked once. None: everyone, each in its block."""
        return self._members.pop(version, None)

    def started_with(self, rank: int) -> int:
        """How many rounds have started that ``rank`` has a part in."""
        return self.started if self._pool is None else self._had_part[rank]

    @property
    def waits(self) -> bool:
        """Whether somebody has arrived for a round that may not start yet, and cannot go on without it."""
        return bool(self._arrived) and (self._pool is None or not self.rules.late)

    @property
    def holds(self) -> bool:
        """Whether somebody is held up elsewhere."""
        return bool(self._held)

    def _leaves(self, rank: int) -> None:
        self._training.discard(rank)
        self._arrived.discard(rank)
        if self._pool is not None:
            self._pool.leave(rank)

    def _returns(self, rank: int) -> None:
        if rank not in self._finished | self._standing | self._held:
            self._training.add(rank)
            self._note(rank)

    @property
    def all_finished(self) -> bool:
        return len(self._finished) == self.size

    def _note(self, rank: int) -> None:
        if rank in self._training and self._position[rank] >= self.started_with(rank):
            self._arrived.add(rank)
            if self._pool is not None:
                self._pool.come(rank)

    def _start(self) -> list[int]:
        begun: list[int] = []
        if self.in_batches and not self._ticks:
            return begun
        # Where a quorum has let one group meet, all who are there may: they are as many rounds as they make groups.
        while (quorum := self._may_start(self.started)) or self._pool is not None:
            if self._hopes_for_more(self.started) or not self._are_called(self.started, quorum or bool(begun)):
                return begun
            begun.append(self.started)
            self.started += 1
            self._arrived = {r for r in self._arrived if self._position[r] >= self.started_with(r)}
            if self._grace is not None:
                self._grace.started(self._now_s)
        if self._grace is not None:
            self._grace.not_yet()
            self.deadline_s = None
        return begun

    def _hopes_for_more(self, version: int) -> bool:
        """Whether a round that may start waits for others all the same; a full one has waited for them."""
        self.deadline_s = None
        missing = self._training - self._arrived
        if self._grace is None or not missing or self.rules.is_full(version):
            return False
        in_time = [rank for rank in missing if self._would_count(rank, version)]
        until_s = self._grace.until_s(self._now_s, self._arrived, in_time)
        if self._now_s < until_s:
            self.deadline_s = until_s
        return self.deadline_s is not None

    def _are_called(self, version: int, quorum: bool) -> bool:
        """Choose who takes part. False: those who are there wait for others."""
        if self._pool is None:
            return True
        members = self._pool.gather(version, self._training, quorum, self._still)
        if members is None:
            return False
        self._members[version] = members
        for rank in members:
            self._had_part[rank] += 1
        return True

    def _may_start(self, version: int) -> bool:
        arrived, training = self._arrived, self._training
        if not arrived:
            return False
        if self.rules.is_full(version):
            return len(arrived) == len(training)
        if not self.rules.wait.satisfied(version, arrived, training, self.size - len(self._dead), self.seed):
            return False
        if self.rules.bound is None:
            return True
        waited_for = set(range(self.size)) - arrived - self._held - self._dead
        return not any(self._too_old(r, version) for r in waited_for)

    def _would_count(self, rank: int, version: int) -> bool:
        """Whether what ``rank`` is computing would be in time for this round."""
        base = self._computing[rank]
        if base is None:
            return False
        if self.rules.good_for is not None:
            return version - base < self.rules.good_for
        return version - base <= self.rules.late

    def _too_old(self, rank: int, version: int) -> bool:
        """Would leaving ``rank`` out of this round let something older than the bound be applied?"""
        assert self.rules.bound is not None
        if self.rules.absent == "last":  # its last weights would answer for it, in this round
            return version - self._deposit[rank] > self.rules.bound
        # What it is computing would come in the next round at the earliest. Where results may be late, it may have
        # handed that in unheard, and compute on with nothing newer: that would come a round later still.
        base = self._computing[rank]
        return base is not None and version + 1 + self.rules.late - base > self.rules.bound
