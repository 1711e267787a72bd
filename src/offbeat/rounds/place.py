"""Where one worker stands in the rounds of a channel: how many results there are, how many it has taken."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.rounds.rules import Rules


@dataclass
class Place:
    """One worker's place in the rounds of a channel."""

    rules: Rules
    results: int = 0  # results that are there
    taken: int = 0  # results handed to the method
    base: int = 0  # results contained in the weights the step under way was begun with
    outstanding: int = -1  # the last round arrived for
    begun: int = 0  # rounds that have taken what this worker gives to them; what it deposits now goes to the next one

    @classmethod
    def beginning(cls, rules: Rules, rounds: int) -> Place:
        """Where so many rounds are over, and their results applied."""
        return cls(rules, rounds, rounds, rounds, rounds - 1, rounds)

    def must_wait_first(self) -> bool:
        """Before a new deposit, the result of the round arrived for last must be there."""
        return self.results <= self.outstanding

    def arrive(self, step: int) -> int | None:
        """A step is over and its work deposited. Answers the round it counts for, or None if it is late and goes on.

        Where results come a round late, a worker lacks that of the round it arrived for last, and is in time all the
        same. One that lacks another's is late: if it were not, each of P quick workers would start a round of its own
        in every step, with one gradient in it, and the optimiser would take P steps for one.
        """
        if self.rules.good_for is not None:
            if self.begun - self.base >= self.rules.good_for:
                return None
            self.outstanding = self.begun
            return self.begun
        if self.rules.catch_up == "every_step":
            self.outstanding = step
            return step if self.results <= step or self.rules.is_full(step) else None
        current = self.results
        lacks = self.rules.late if self.outstanding == current - 1 else 0
        if self.base >= current - lacks or self.rules.is_full(current):
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
        if self.rules.good_for is not None:
            in_time = version - base < self.rules.good_for
        else:
            in_time = self.rules.catch_up == "every_step" or version - base <= self.rules.late
        return self.outstanding == version and in_time

    def waits_for(self, position: int | None) -> int:
        """How many results must be there before the worker goes on."""
        if position is None and self.rules.good_for is not None:
            return self.begun  # what it had was too old; what it begins now is as new as can be
        if position is None or self.rules.late:
            return 0
        return position + 1

    def takes_at_least(self, step: int) -> int:
        """How many results the next step will be begun with, whatever comes in until then."""
        upto = self.results
        if self.rules.catch_up == "every_step" and self.rules.absent == "last":
            upto = min(upto, step + 1)
        return max(self.taken, upto)

    def take(self, step: int, upto: int | None = None) -> range:
        """The results to hand over after ``step``; the next step will be begun with them.

        All that are there; but where weights answer for the absent and every worker takes every step, the result of
        one's own round and no newer one (the paper's rule for a late worker). ``upto``: those before this one, where
        the worker has not heard of more.
        """
        before = self.taken
        self.taken = self.base = self.takes_at_least(step) if upto is None else max(before, upto)
        return range(before, self.taken)
