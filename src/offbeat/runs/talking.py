"""How often workers talked that decide by themselves when to, and how old what they took was; in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from offbeat.basics.units import format_seconds
from offbeat.runs.slowness import would_have_waited


@dataclass(frozen=True)
class Talking:
    """One worker's, since its run began: a resumed one counts anew. ``exchanges``: how often it handed in.
    ``underway``: steps after which it would have done so if its last exchange had been over. Of what it took from
    others: how many shares (``taken``), their ages in rounds (``ages``, summed) and the oldest one's. ``steps``: all
    of them, also those that it took for the sake of others of its node.
    """

    exchanges: int = 0
    underway: int = 0
    taken: int = 0
    ages: int = 0
    oldest: int = 0
    steps: int = 0

    # One of these for each step.

    def handed_in(self) -> Talking:
        return replace(self, exchanges=self.exchanges + 1, steps=self.steps + 1)

    def waiting(self) -> Talking:
        """A step more that found the last exchange under way."""
        return replace(self, underway=self.underway + 1, steps=self.steps + 1)

    def stepped(self) -> Talking:
        """A step more after which it did not want to talk."""
        return replace(self, steps=self.steps + 1)

    def took(self, ages: Sequence[int]) -> Talking:
        """Shares of others, of these ages in rounds."""
        oldest = max([self.oldest, *ages])
        return replace(self, taken=self.taken + len(ages), ages=self.ages + sum(ages), oldest=oldest)

    def numbers(self) -> list[int]:
        """Its fields in their order: ``Talking(*numbers)`` is the same again."""
        return [int(getattr(self, one.name)) for one in fields(self)]


def told(talking: Sequence[Talking], busy_s: Sequence[Sequence[float]]) -> list[str]:
    """What all workers' talking comes to, in a sentence; ``busy_s[rank][step]`` is a worker's own time."""
    steps, exchanges = sum(one.steps for one in talking), sum(one.exchanges for one in talking)
    if len(talking) < 2 or not steps:
        return []
    if not exchanges:
        return ["They have not talked."]
    said = f"They talked {_times(exchanges)}, once in {steps / exchanges:.1f} steps"
    if taken := sum(one.taken for one in talking):
        age, oldest = sum(one.ages for one in talking) / taken, max(one.oldest for one in talking)
        said += f", and took what was {age:.1f} rounds old on average, {oldest} at most"
    if underway := sum(one.underway for one in talking):
        said += f"; after {underway} of {steps} steps an exchange was still under way, and they computed on"
    avoided = would_have_waited(busy_s)
    if sum(avoided):
        most = max(range(len(avoided)), key=avoided.__getitem__)
        said += (
            f"; step by step they would have waited {format_seconds(sum(avoided))}, "
            f"{avoided[most] / sum(avoided):.0%} of it for rank {most}"
        )
    return [f"{said}."]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
