"""When a partial round starts, and where each worker stands in it: pure bookkeeping, no clock, no network.

Rounds of a channel are numbered 0, 1, 2, … and run in that order; a run that was taken up again goes on with the number
it had reached. Both worlds ask the same two objects:

- the ``Referee`` hears who has arrived, who has begun a step, who has finished, and says when the next round starts;
- a ``Place`` is one worker's own view: how many results there are, how many it has taken, what it waits for.

Everything is decided by these numbers, never by timing. A *base* is the number of results that were contained in the
weights a step was begun with; a contribution with base b in round v is stale by v − b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from offbeat.waiting import Wait

CatchUp = Literal["current", "every_step"]
Absent = Literal["carry", "drop", "last", "shared"]


@dataclass(frozen=True)
class Rules:
    """How the rounds of a channel go.

    ``full_every``: every n-th round is full, all workers stop for it. ``bound``: a round waits for a worker whose next
    contribution would otherwise be older than that. ``late``: how many rounds a result may stay out while its worker
    goes on computing (0: it waits for it). ``fade``: a gradient counts the less, the staler it is.
    """

    wait: Wait
    absent: Absent
    full_every: int | None = None
    bound: int | None = None
    catch_up: CatchUp = "current"
    late: int = 0
    fade: bool = False

    def among(self, workers: int) -> Rules:
        """The rules where so many take part: alone there is nobody to wait for, so nothing needs to be late."""
        return self if workers > 1 else replace(self, late=0)

    @property
    def of_weights(self) -> bool:
        """Weights are averaged within a block; else gradients are summed and divided by all."""
        return self.absent in ("last", "shared")

    def is_full(self, version: int) -> bool:
        return self.full_every is not None and (version + 1) % self.full_every == 0


@dataclass(frozen=True)
class Elsewhere:
    """Where a worker is while it takes no step here, as it says itself.

    ``inside``: it is in a collective that is not ours. ``met``: how many of each kind it has entered, and who takes
    part in them. ``rounds``: of other channels, how many results it has seen, and how many it waits for (0: none).
    """

    inside: bool = False
    met: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    rounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def held(said: Mapping[int, Elsewhere]) -> set[int]:
    """The workers that cannot come to a round here before another one leaves it, when all have said where they are.

    A worker inside the n-th collective of a kind is held as long as somebody who takes part has not entered its n-th.
    When all have, it comes out by itself, and is waited for: so a round that must be full stays full. A worker that
    waits for a round of another channel is held as long as nobody has seen the result: that round may not have started.
    """

    def is_held(mine: Elsewhere) -> bool:
        others = [
            said[r].met.get(name, (0, ()))[0] < count
            for name, (count, ranks) in mine.met.items()
            if mine.inside
            for r in ranks
            if r in said
        ]
        waits = [
            all(theirs.rounds.get(name, (0, 0))[0] < wanted for theirs in said.values())
            for name, (_, wanted) in mine.rounds.items()
            if wanted
        ]
        return any(others) or any(waits)

    return {rank for rank, mine in said.items() if is_held(mine)}


@dataclass
class Referee:
    """Says when a round starts. One for a channel."""

    rules: Rules
    size: int
    seed: int
    started: int = 0  # rounds started so far, so also the number of the next one
    _position: list[int] = field(default_factory=list)  # the last round a worker has arrived for
    _computing: list[int | None] = field(default_factory=list)  # the base of the step it is in, if it is in one
    _deposit: list[int] = field(default_factory=list)  # the base of its last deposit
    _finished: set[int] = field(default_factory=set)
    _standing: set[int] = field(default_factory=set)
    _held: set[int] = field(default_factory=set)
    _training: set[int] = field(default_factory=set)  # neither finished nor standing nor held
    _arrived: set[int] = field(default_factory=set)  # of those, who has arrived for the next round

    def __post_init__(self) -> None:
        self._training = set(range(self.size))
        self._position = [self.started - 1] * self.size
        self._computing = [self.started] * self.size
        self._deposit = [self.started] * self.size

    def arrived(self, rank: int, position: int, base: int, next_base: int | None = None) -> list[int]:
        """``rank`` has deposited work with ``base`` and counts for round ``position``. The rounds that start."""
        self._position[rank] = max(self._position[rank], position)
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
        """``rank`` is about to take steps again, unless it has finished."""
        self._standing.discard(rank)
        self._returns(rank)
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

    @property
    def waits(self) -> bool:
        """Whether somebody has arrived for a round that may not start yet."""
        return bool(self._arrived)

    @property
    def holds(self) -> bool:
        """Whether somebody is held up elsewhere."""
        return bool(self._held)

    def _leaves(self, rank: int) -> None:
        self._training.discard(rank)
        self._arrived.discard(rank)

    def _returns(self, rank: int) -> None:
        if rank not in self._finished | self._standing | self._held:
            self._training.add(rank)
            self._note(rank)

    @property
    def all_finished(self) -> bool:
        return len(self._finished) == self.size

    def _note(self, rank: int) -> None:
        if rank in self._training and self._position[rank] >= self.started:
            self._arrived.add(rank)

    def _start(self) -> list[int]:
        begun = []
        while self._may_start(self.started):
            begun.append(self.started)
            self.started += 1
            self._arrived = {r for r in self._arrived if self._position[r] >= self.started}
        return begun

    def _may_start(self, version: int) -> bool:
        arrived, training = self._arrived, self._training
        if not arrived:
            return False
        if self.rules.is_full(version):
            return len(arrived) == len(training)
        if not self.rules.wait.satisfied(version, arrived, training, self.size, self.seed):
            return False
        if self.rules.bound is None:
            return True
        return not any(self._too_old(r, version) for r in range(self.size) if r not in arrived and r not in self._held)

    def _too_old(self, rank: int, version: int) -> bool:
        """Would leaving ``rank`` out of this round let something older than the bound be applied?"""
        assert self.rules.bound is not None
        if self.rules.absent == "last":  # its last weights would answer for it, in this round
            return version - self._deposit[rank] > self.rules.bound
        base = self._computing[rank]  # what it is computing would come in the next round at the earliest
        return base is not None and version + 1 - base > self.rules.bound


@dataclass
class Place:
    """One worker's place in the rounds of a channel."""

    rules: Rules
    results: int = 0  # results that are there
    taken: int = 0  # results handed to the strategy
    base: int = 0  # results contained in the weights the step under way was begun with
    outstanding: int = -1  # the last round arrived for

    @classmethod
    def beginning(cls, rules: Rules, rounds: int) -> Place:
        """Where so many rounds are over, and their results applied."""
        return cls(rules, rounds, rounds, rounds, rounds - 1)

    def must_wait_first(self) -> bool:
        """Before a new deposit, the result of the round arrived for last must be there."""
        return self.results <= self.outstanding

    def arrive(self, step: int) -> int | None:
        """A step is over and its work deposited. Answers the round it counts for, or None if it is late and goes on."""
        if self.rules.catch_up == "every_step":
            self.outstanding = step
            return step if self.results <= step or self.rules.is_full(step) else None
        current = self.results
        if self.base >= current - self.rules.late or self.rules.is_full(current):
            self.outstanding = current
            return current
        return None

    def weight(self) -> float:
        """What the gradient just made counts: 1 if it is in time, 1 / (1 + the rounds it has missed) where they fade.

        Known when it is deposited, since gradients leave the tray with the next round; one that is under way by then
        is not counted.
        """
        missed = max(0, self.results - self.base - self.rules.late)
        return 1.0 / (1.0 + missed) if self.rules.fade else 1.0

    def made_for(self, version: int, base: int) -> bool:
        """Was the newest deposit, made with ``base``, made for round ``version``? If not, it came too late.

        The base alone does not say: where results come a round late, the gradient that just missed round v − 1 has the
        same base as one that is in time for round v.
        """
        in_time = self.rules.catch_up == "every_step" or version - base <= self.rules.late
        return self.outstanding == version and in_time

    def waits_for(self, position: int | None) -> int:
        """How many results must be there before the worker goes on."""
        if position is None or self.rules.late:
            return 0
        return position + 1

    def takes_at_least(self, step: int) -> int:
        """How many results the next step will be begun with, whatever comes in until then."""
        upto = self.results
        if self.rules.catch_up == "every_step" and self.rules.absent == "last":
            upto = min(upto, step + 1)
        return max(self.taken, upto)

    def take(self, step: int) -> range:
        """The results to hand over after ``step``; the next step will be begun with them.

        All that are there; but where weights answer for the absent and every worker takes every step, the result of
        one's own round and no newer one (the paper's rule for a late worker).
        """
        before = self.taken
        self.taken = self.base = self.takes_at_least(step)
        return range(before, self.taken)
