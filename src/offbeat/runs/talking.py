"""How often workers talked that decide by themselves when to, and how old what they took was; in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from offbeat.basics.units import format_seconds
from offbeat.runs.slowness import would_have_waited


@dataclass(frozen=True)
class Talking:
    """One worker's. ``exchanges``: how often it handed in. ``underway``: steps after which it would have done so if
    its last exchange had been over. Of what it took from others: how many shares (``taken``), their ages in rounds
    (``ages``, summed) and the oldest one's.
    """

    exchanges: int = 0
    underway: int = 0
    taken: int = 0
    ages: int = 0
    oldest: int = 0

    def waiting(self) -> Talking:
        """A step more that found the last exchange under way."""
        return Talking(self.exchanges, self.underway + 1, self.taken, self.ages, self.oldest)

    def handed_in(self) -> Talking:
        return Talking(self.exchanges + 1, self.underway, self.taken, self.ages, self.oldest)

    def took(self, ages: Sequence[int]) -> Talking:
        """Shares of others, of these ages in rounds."""
        oldest = max([self.oldest, *ages])
        return Talking(self.exchanges, self.underway, self.taken + len(ages), self.ages + sum(ages), oldest)

    def numbers(self) -> list[int]:
        """Its fields in their order: ``Talking(*numbers)`` is the same again."""
        return [int(getattr(self, one.name)) for one in fields(self)]


def told(talking: Sequence[Talking], busy_s: Sequence[Sequence[float]], steps: int | None = None) -> list[str]:
    """What all workers' talking comes to, as sentences; ``busy_s[rank][step]`` is a worker's own time.

    ``steps``: how many all workers took together, where ``busy_s`` holds the last ones alone.
    """
    steps = sum(map(len, busy_s)) if steps is None else steps
    exchanges = sum(one.exchanges for one in talking)
    if len(talking) < 2 or not steps:
        return []
    if not exchanges:
        return ["They have not talked."]
    said = f"They talked {_times(exchanges)}, once in {steps / exchanges:.1f} steps"
    if taken := sum(one.taken for one in talking):
        age, oldest = sum(one.ages for one in talking) / taken, max(one.oldest for one in talking)
        said += f"; what they took was {age:.1f} rounds old on average, {oldest} at most"
    sentences = [f"{said}."]
    if underway := sum(one.underway for one in talking):
        of_a_step = [sum(own) / len(own) if own else 0.0 for own in busy_s]
        seconds = sum(one.underway * each for one, each in zip(talking, of_a_step, strict=True))
        sentences.append(
            f"After {underway} of {steps} steps an exchange was still under way: they computed for "
            f"{format_seconds(seconds)} instead of waiting for it."
        )
    avoided = would_have_waited(busy_s)
    if sum(avoided):
        most = max(range(len(avoided)), key=avoided.__getitem__)
        sentences.append(
            f"In step with each other they would have waited {format_seconds(sum(avoided))} for the slowest of each "
            f"step, {avoided[most] / sum(avoided):.0%} of it for rank {most}."
        )
    return sentences


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
