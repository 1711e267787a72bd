"""One worker's seat at a channel: the protocol of partial rounds, without I/O, clock or thread.

Both worlds drive the same seats. A driver does three things, and decides nothing:

1. It passes every `Notice` that a seat hands out on to the channel's referee (`Referee.hear`), which answers with the
   rounds that start; and it lets each seat hear of every round that it has a part in, in the order of their numbers.
   A seat counts these rounds: where all take part in all of them, the count is the number of the round.
2. For round v it asks the seats of a block for a ``snapshot``, sums what they give, and hands the mean to each of them
   with ``deliver``; ``over`` is what the referee hears of it. Rounds of one seat never overlap. When all have finished,
   one more round is the *flush*.
3. It lets a worker wait until ``results`` has reached ``needs_first`` before a deposit, and ``needs`` after it.

A worker's step:  wait for ``needs_first`` → ``offer`` → pass the notice on → wait for ``needs`` → ``take`` → ``began``.
One that looks ahead:    ``show`` when ``needs_first`` is there, and at each result from then on; ``offer`` and ``take``
with how much of what it was shown it has taken, which happens in that worker before the deposit is heard of here.
A worker without data:  ``finish``; then ``renew`` and ``next``, until ``next`` has none and ``flushed`` is set.
A worker that stands:  ``stand``, ``renew`` and ``next`` until all stand, ``back``, wait, ``catch_up``, ``began``.

What happens at a seat happens in one order, which is all that decides a run: a seat that is given a ``log`` writes
that order down, and `offbeat.sim.replay` follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from offbeat.rounds.place import Place
from offbeat.rounds.referee import Notice, Say
from offbeat.rounds.rules import Rules
from offbeat.rounds.tray import Deposit, Tray

if TYPE_CHECKING:
    from offbeat.tensors.vector import Vec
    from offbeat.topology.hierarchy import Nodes
    from offbeat.topology.matrix import Mixing


@dataclass(frozen=True, slots=True, eq=False)
class Got:
    """The result of one round, as one worker sees it."""

    version: int
    value: Vec
    fresh: bool  # my newest deposit is in it
    full: bool  # everybody's is
    count: int  # how many it averages over
    contributors: Mapping[int, int]  # rank → how many rounds old its work is; who is not here gave nothing


class Freshness(NamedTuple):
    """What is said of one seat's part in a round: how old its oldest work is, and whether its newest was in time."""

    age: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Given:
    """What one seat gives to one round."""

    value: Vec | None
    deposits: int  # of this worker that are in it, or were made before
    share: Freshness | None  # None: it gives nothing


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round came to: the same for all members of a block. ``shares``: who gave something."""

    version: int
    value: Vec
    shares: Mapping[int, Freshness]
    members: int
    flush: bool
    contributors: Mapping[int, int]

    @classmethod
    def of(
        cls, nodes: Nodes, version: int, value: Vec, shares: Mapping[int, Freshness], members: int, flush: bool
    ) -> Outcome:
        contributors = nodes.spread({rank: share.age for rank, share in shares.items()})
        return cls(version, value, shares, members, flush, contributors)


THROUGH = "through"  # written down by whoever looks: where the host process keeps the seat, the worker
Event = tuple[str, int]  # what happened at a seat, and the step or round it was about


class Diary(Protocol):
    """Where events are written down: a list, or whoever does the same after us."""

    def append(self, event: Event, /) -> None: ...


class Seat:
    """A worker's seat. ``rank`` is its node's: where every worker is a node of its own, its own.

    ``first_round``, ``first_step``: where a run that was taken up again goes on. Results may be shared with other
    seats, and are never written to.
    """

    def __init__(
        self,
        rules: Rules,
        whom: Callable[[int], Mixing],
        nodes: Nodes,
        rank: int,
        x: Vec | None,
        *,
        first_round: int = 0,
        first_step: int = 0,
        log: Diary | None = None,
    ) -> None:
        self.rules, self._whom, self._nodes, self.rank, self.size = rules, whom, nodes, rank, nodes.count
        self.tray = Tray(rules.absent)
        self.place = Place.beginning(rules, first_round)
        self._ahead = first_round - first_step  # rounds begin with the steps
        self._results: dict[int, tuple[Outcome, int]] = {}  # by count; with how many deposits of this worker are in it
        # By count, results that the worker has heard of and not taken, as far as is known here.
        self._shown: list[tuple[int, Got]] = []
        self._newest: Vec | None = None  # the last deposit, which what was shown before does not contain
        self.needs = 0
        self.takes_each = False  # it rests or stands, and takes one result after the other
        self.has_finished = self.flushed = self.is_dead = False
        self._counted = 0  # deposits that some round has had in it
        self._log = log
        if x is not None:
            self.tray.deposit(x, Deposit(-1, first_round))

    def twin(self, rank: int) -> Seat:
        """The seat of a worker that goes on from where the one of this seat is, between two steps. It has arrived for
        nothing yet. What this one's weights are answers for it, too; gradients that are owed stay this one's.
        """
        seat = Seat(self.rules, self._whom, self._nodes, rank, None)
        seat._ahead, seat._results = self._ahead, dict(self._results)
        seat.place = replace(self.place, outstanding=min(self.place.outstanding, self.place.results - 1))
        if self.rules.of_weights and self.tray.value is not None:
            seat.tray.deposit(self.tray.shown(), Deposit(-1, self.place.base))
        seat.tray.deposits = seat._counted = self.tray.deposits
        return seat

    # The worker.

    @property
    def results(self) -> int:
        """How many rounds are over here."""
        return self.place.results

    @property
    def needs_first(self) -> int:
        """How many results must be there before the next deposit: that of the round arrived for last."""
        return self.place.outstanding + 1 if self.place.must_wait_first() else 0

    def is_through(self, step: int) -> bool:
        """Whether a deposit after ``step`` would wait for nothing, as far as this seat knows."""
        found = self.results >= self.needs_first
        if found:
            self._note(THROUGH, step)
        return found

    def offer(self, x: Vec, step: int, upto: int | None = None) -> Notice | None:
        """Deposit the work of a step. It counts for the current round, or is late, and its worker goes on.

        ``upto``: where the worker looks ahead, the results it has taken; it begins the next step with these.
        """
        if self.is_dead and self.rules.absent == "shared" and self.tray.value is None:
            return None  # its weights have left the mean, and a step from there has nothing to be added to
        self._note("offer", step)
        self._newest = None
        if upto is not None:
            self._note("upto", upto)
            self._newest = x
        step += self._ahead
        deposit = Deposit(step, self.place.base)
        position = self.place.arrive(step)
        if position is None and self.rules.absent in ("drop", "anew"):
            self.tray.discard(deposit)
        else:
            self.tray.deposit(x, deposit, self.place.weight())
        self.needs = self.place.waits_for(position)
        if self.needs > self.results and upto is None:  # it will take that one, and none before it
            self._drop_older()
        if not self.rules.hears_of_late:
            return None if position is None else Notice(Say.ARRIVED, position, deposit.base)
        next_base = max(self.place.takes_at_least(step), self.needs) if upto is None else upto
        return Notice(Say.ARRIVED if position is not None else Say.PASSED, position or 0, deposit.base, next_base)

    def take(self, step: int, upto: int | None = None) -> list[Got]:
        """The results to apply after a step, oldest first; the next step is begun with them.

        ``upto``: only those before this one, as they were shown.
        """
        self._note("take", step)
        versions = self.place.take(step + self._ahead, upto)
        return self._taken(versions) if upto is None else self._taken_as_shown(upto)

    def show(self) -> list[Got]:
        """The results that are there and have not been shown, for a worker that will take them at its next step.

        They stay here until it says so. Shared weights are shown again: what was shown before a deposit lacks it, and
        a worker that takes the newest adds its last step alone.
        """
        self._note("show", self.results)
        since = self.heard_of
        there = sorted(v for v in self._results if self.place.taken <= v < self.results)
        new = there[-1:] if self.rules.absent == "shared" else [v for v in there if v >= since]
        shown = [(v, self._got(v, coming=1)) for v in new]
        self._shown += shown
        return [got for _, got in shown]

    @property
    def heard_of(self) -> int:
        """How many results its worker has taken, or has been shown."""
        return max([self.place.taken, *(count + 1 for count, _ in self._shown)])

    @property
    def untold(self) -> list[Vec]:
        """The results that are here, and that it has not taken."""
        return [outcome.value for outcome, _ in self._results.values()]

    @property
    def values(self) -> list[Vec]:
        """All vectors that may still be asked for here."""
        shown = [got.value for _, got in self._shown]
        return [*self.tray.values, *self.untold, *shown, *([] if self._newest is None else [self._newest])]

    @property
    def kept(self) -> int:
        """How many results are kept here."""
        return len(self._results)

    @property
    def untaken(self) -> int:
        """How many it has been shown and not taken."""
        return len(self._shown)

    @property
    def waiting(self) -> int:
        """How many are kept here that it has not heard of."""
        heard_of = self.heard_of
        return sum(count >= heard_of for count in self._results)

    def replace(self, outcome: Outcome) -> None:
        """What holds the result of this round, and of all before it, takes their place; what was shown stays so."""
        newer = {count: result for count, result in self._results.items() if count > outcome.version}
        self._results = {**newer, outcome.version: (outcome, 0)}

    def shown_upto(self, count: int) -> int:
        """How many results a worker has that took the first ``count`` of those it was shown and had not taken."""
        return self._shown[count - 1][0] + 1 if count else self.place.taken

    def began(self) -> Notice | None:
        """The next step is under way, with everything that was taken."""
        said = self.rules.hears_of_late and not self.has_finished
        return Notice(Say.BEGAN, 0, self.place.base) if said else None

    def finish(self) -> Notice | None:
        """No data left: it never counts again, but goes on answering."""
        if self.has_finished:
            return None
        self._note("finish", self.place.taken)
        self._shown = []
        self.has_finished = self.takes_each = True
        return Notice(Say.FINISHED)

    def bury(self) -> Notice:
        """Its worker is dead. What it had handed in, and no round has had in it, counts once; then it gives nothing."""
        self._shown, self._newest = [], None
        self._results.clear()
        self.has_finished = self.is_dead = True
        return Notice(Say.DIED)

    @property
    def has_counted(self) -> bool:
        """Whether some round has had in it all that was deposited."""
        return self._counted == self.tray.deposits

    def renew(self, x: Vec | None) -> Notice | None:
        """Without a step to take, ``x`` answers for the worker from now on."""
        if x is None:
            return None
        self._note("renew", self.place.taken)
        self.tray.deposit(x, Deposit(-1, self.place.taken))
        return Notice(Say.RENEWED, 0, self.place.taken) if self.rules.bound is not None else None

    def next(self) -> Got | None:
        """The oldest result not taken yet, if there is one, for a worker that takes each by itself."""
        count = min(self._results, default=self.results)
        if count >= self.results:
            return None
        # What stands for several is written down as if each had been taken.
        for version in range(self.place.taken, count) if self.rules.spares else ():
            self._note("next", version)
        self._note("next", self._results[count][0].version)
        self.place.taken = self.place.base = count + 1
        return self._got(count)

    def returned(self) -> Notice:
        """Its worker, which had died, is there again."""
        return Notice(Say.RETURNED, 0, self.place.base)

    def stand(self) -> Notice:
        """It takes no step until it is back, and nobody waits for it; it takes every result, as one without data."""
        self._note("stand", self.place.taken)
        self._shown = []
        self.takes_each = True
        return Notice(Say.STANDS)

    def back(self) -> Notice:
        """All stand; soon it takes steps again."""
        return Notice(Say.BACK)

    def catch_up(self, results: int) -> list[Got]:
        """All results of the rounds that have started, so that all workers have applied the same ones.

        ``results``: how many all have agreed on, of which not every worker may have a part in each.
        """
        results = min(results, self.results)
        self._note("catch up", results)
        self.takes_each = self.has_finished
        return self._taken(self.place.take(results - 1)) if results else []

    @property
    def lost(self) -> list[int]:
        """The steps whose gradients were dropped."""
        return [deposit.step - self._ahead for deposit in self.tray.lost if deposit.step >= 0]

    def _taken(self, versions: range) -> list[Got]:
        return [self._got(version) for version in versions if version in self._results]

    def as_shown(self, upto: int, newest: Vec | None) -> list[Got]:
        """What a worker takes that has been shown the results before ``upto``, and makes its ``newest`` deposit."""
        taken = [got for count, got in self._shown if count < upto]
        if self.rules.absent != "shared" or newest is None:
            return taken
        return [replace(got, value=got.value.clone().add_(newest)) for got in taken[-1:]]

    def _taken_as_shown(self, upto: int) -> list[Got]:
        taken = self.as_shown(upto, self._newest)
        self._shown = [(count, got) for count, got in self._shown if count >= upto]
        self._results = {count: result for count, result in self._results.items() if count >= upto}
        return taken

    def _got(self, count: int, coming: int = 0) -> Got:
        """``coming``: deposits that the worker will have made when it takes this; until then the result stays."""
        outcome, deposits = self._results[count] if coming else self._results.pop(count)
        # A late result knows nothing of the deposit just made.
        fresh = deposits >= self.tray.deposits + coming - self.rules.late
        value, full = outcome.value, outcome.flush or self.rules.is_full(outcome.version)
        if self.rules.absent == "shared":
            newest = count + 1 == self.results and deposits == self.tray.deposits
            if not newest:  # else the tray has become just that
                value = self.tray.shown()
        return Got(outcome.version, value, fresh, full, outcome.members, outcome.contributors)

    # A round.

    def is_next(self, version: int) -> bool:
        """Whether it is through with every round before ``version`` that it has a part in."""
        return self.results == (version if self.rules.pool is None else self.place.begun)

    def members(self, version: int, flush: bool = False) -> tuple[int, ...]:
        """With whom this seat averages in round ``version``, where the referee names nobody."""
        if flush or self.rules.is_full(version):
            return tuple(range(self.size))
        W = self._whom(version)
        block = W.block(self.rank)
        if block is None:
            raise ValueError(f"partial rounds average within groups, but round {version} mixes along {W}")
        return block

    def divisor(self, members: tuple[int, ...], absent: Set[int] = frozenset()) -> int:
        """Weights are averaged among the members; gradients are divided by all.

        ``absent``: of all, the dead who give nothing.
        """
        if self.rules.of_weights:
            return max(1, len(set(members) - absent))
        return max(1, self.size - len(absent))

    @property
    def flushes(self) -> bool:
        """Whether something may still be owed when all have finished: gradients, but never weights."""
        return not self.rules.of_weights

    def snapshot(self, version: int, flush: bool = False) -> Given:
        """What answers for the worker in round ``version``, with the record of what is in it."""
        self._note("flush" if flush else "snapshot", version)
        if self.is_dead and self.has_counted:
            self.tray.clear()
            self.place.begun += 1
            return Given(None, self.tray.deposits, None)
        deposits = self.tray.pieces
        count = self.place.begun
        in_time = bool(deposits) and not flush and self.place.made_for(count, deposits[-1].base)
        self.place.begun = count + 1
        shot = self.tray.snapshot(count, in_time)
        self._counted = shot.deposits
        if self.is_dead and self.rules.absent == "shared":
            self.tray.clear()
        age = shot.staleness(count)
        share = None if age is None else Freshness(age, shot.fresh(count, self.rules.catch_up))
        return Given(shot.value, shot.deposits, share)

    def deliver(self, outcome: Outcome, given: Given) -> bool:
        """A round is over, to which this seat has ``given`` its part.

        A flush in which nobody owed anything gives no result, so that no optimiser moves; then the answer is False.
        """
        if outcome.flush and not outcome.shares:
            return False
        self._note("result", outcome.version)
        if self.rules.absent == "shared" and self.tray.value is not None:
            self.tray.adopt(outcome.value)
        if self.is_dead:
            self.place.results += 1
            return False
        self._drop_older()
        self._results[self.results] = (outcome, given.deposits)
        self.place.results += 1
        return True

    def _drop_older(self) -> None:
        """Of averages of weights a late worker takes the newest: it need not keep one for every round it misses."""
        if self.rules.of_weights and self.rules.catch_up == "current" and not self.takes_each:
            self._results.clear()

    def over(self) -> Notice | None:
        """A round is over here: its worker can be in another one."""
        return Notice(Say.OVER) if self.rules.draws else None

    def _note(self, what: str, number: int) -> None:
        if self._log is not None:
            self._log.append((what, number))
