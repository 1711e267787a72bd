"""How the rounds of a channel go: the settings that the referee, the seats and the trays obey."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from offbeat.rounds.grace import Window
from offbeat.rounds.waiting import Wait

CatchUp = Literal["current", "every_step"]
Absent = Literal["carry", "drop", "anew", "last", "shared"]


@dataclass(frozen=True)
class Rules:
    """How the rounds of a channel go.

    - ``full_every``: every n-th round is full. All workers stop for it.
    - ``bound``: a round waits for a worker whose next contribution would otherwise be older than that.
    - ``late``: how many rounds a result may stay out while its worker goes on computing. With 0 the worker waits.
    - ``fade``: a gradient counts the less, the staler it is.
    - ``good_for``: a gradient that is younger than so many rounds starts or joins the next one, as if it had been made
      for it. An older one is dropped, and its worker goes on with the newest weights. With None only what was made for
      a round starts it.
    - ``pool``: a round is made of so many of those who have handed something in. The others have no part in it, and
      nothing answers for them. With None all take part in every round, each in its block of a schedule.
    - ``draws``: where messages are quick, a worker averages with so many others that compute, one after the other.
    - ``grace``: how long a round that may start waits for others, in seconds, or as long as that pays
      (`offbeat.rounds.grace`).
    - ``spares``: results change nothing but the weights and the inner optimiser, alike for all. So a worker that has
      missed many of them may take over another's replica instead (`offbeat.rounds.spares`).
    """

    wait: Wait
    absent: Absent
    full_every: int | None = None
    bound: int | None = None
    catch_up: CatchUp = "current"
    late: int = 0
    fade: bool = False
    good_for: float | None = None
    pool: int | None = None
    draws: int = 0
    grace: Window = 0.0
    spares: bool = False

    def __post_init__(self) -> None:
        if self.pool is not None:  # each has rounds of its own number: none that all stop for, none that is too old
            assert (self.absent, self.good_for) == ("shared", math.inf)
            assert (self.full_every, self.bound, self.grace) == (None, None, 0)
        assert self.pool == 2 or not self.draws  # a round of more would need as many groups as there are choices

    def among(self, workers: int) -> Rules:
        """The rules where so many take part: alone there is nobody to wait for, so nothing needs to be late."""
        return self if workers > 1 else replace(self, late=0, pool=None, draws=0)

    @property
    def of_weights(self) -> bool:
        """Weights are averaged within a block; else gradients are summed and divided by all."""
        return self.absent in ("last", "shared")

    @property
    def replaces(self) -> bool:
        """What a worker deposits takes the place of what it has deposited before, which is nobody's from then on."""
        return self.absent == "last"

    @property
    def hears_of_late(self) -> bool:
        """Whether the referee is told of deposits that come too late for their round: when, and what comes next."""
        return self.bound is not None or bool(self.grace)

    def is_full(self, version: int) -> bool:
        return self.full_every is not None and (version + 1) % self.full_every == 0
