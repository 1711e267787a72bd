"""Local steps in proportion to speed (DyLU), after Liu et al. (2024): for methods that average every H steps.

Asynchronous Local-SGD Training for Language Modeling, arXiv:2401.09135. The fastest worker takes H steps between two
averages, one of half its speed H/2, so that all come to the average at about the same time. Averages count steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import torch

from offbeat.method import Grad, Mix, Replica, Spent, Vec, one_of, pacing, topology
from offbeat.strategies.common import whole_or

Pace = Literal["equal", "speed"]
PACES: tuple[Pace, ...] = ("equal", "speed")


def steps_and_pace(period: int | Literal["speed"], pace: Pace | None, usual: int) -> tuple[int, Pace]:
    """How many steps a period has, and at whose pace; ``period="speed"`` is the usual ones with ``pace="speed"``."""
    if pace is not None:
        one_of("pace", pace, PACES)
    whole_or("period", period, 1, "speed")
    if period != "speed":
        return period, pace or "equal"
    if pace == "equal":
        raise ValueError(
            f"period='speed' is a period of {usual} steps with pace='speed', but pace is 'equal'; leave pace out, or "
            f"give the period as a number of steps"
        )
    return usual, "speed"


@dataclass(frozen=True)
class Came:
    """Who came to an average: of each worker its steps since the last one, their seconds, and whether it has data.
    ``count``: how many came; of those who died before, nothing is known.
    """

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    has_data: tuple[bool, ...]
    count: int

    @classmethod
    async def heard(cls, me: Replica, steps: int, has_data: bool) -> Came:
        """What all say of themselves; all hear the same. Never a phantom: it decides in simulations of time alone."""
        P, own = me.size, (float(steps), await Spent(), 2.0 if has_data else 1.0)
        line = torch.zeros(3, P, dtype=torch.float64)
        line[:, me.rank] = torch.tensor(own, dtype=torch.float64)
        mean = await Mix(Vec((line.reshape(-1),)), topology.everyone(P)(0))
        count = sum(value > 0 for value in mean.tolist()[2 * P :])
        values = [count * value for value in mean.tolist()]
        return cls(
            tuple(round(value) for value in values[:P]),  # a mean of P, times P, may round
            tuple(values[P : 2 * P]),
            tuple(value > 1.5 for value in values[2 * P :]),
            count,
        )

    def weight(self, rank: int) -> float:
        """How often a worker counts in the mean of those who came: by its steps, and 1 on average."""
        return self.steps[rank] * self.count / sum(self.steps)


async def by_speed(me: Replica, period: int, average: Callable[[float], Awaitable[None]]) -> None:
    """Take steps by oneself, as many as one's speed allows, and ``average`` with a weight when they are done.

    Steps are one's own: no idle turns. A worker without data goes on coming to the averages, where it counts for what
    it has not brought yet, then for nothing, until all are without. An average to which nobody has brought all of its
    steps does not take place: that is the run's end, which makes replicas equal.
    """
    mem = me.recall(taken=0, plan=[period] * me.size)

    async def meet(has_data: bool) -> bool:
        came = await Came.heard(me, mem.taken, has_data)
        if any(n >= planned for n, planned in zip(came.steps, mem.plan, strict=True)):
            await average(came.weight(me.rank))
            mem.taken, mem.plan = 0, pacing.in_proportion(period, came.steps, came.seconds)
            me.report(period=mem.plan[me.rank])
        return any(came.has_data)

    me.report(period=mem.plan[me.rank])
    async for _ in me.own_steps():
        g = await Grad()
        me.step(g)
        mem.taken += g is not None
        if mem.taken >= mem.plan[me.rank]:  # more, where it goes on for one of another speed
            await meet(has_data=True)
    while await meet(has_data=False):
        pass
