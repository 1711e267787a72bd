"""Who was not there: workers that died, and when those that came back were there again; in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offbeat.basics.units import format_ranks, format_seconds

MOST_TOLD = 4


class Absence(NamedTuple):
    """``back_s``: when it was a member again; None: it never was. ``lost``: the step of its own that was lost with it,
    as it had handed nothing of it in; None: there was none. ``cut``: its host could not hear the others, so it stopped.
    """

    rank: int
    died_s: float
    back_s: float | None = None
    lost: int | None = None
    cut: bool = False


def told(absences: Sequence[Absence], workers: int, seconds: float) -> list[str]:
    """In a sentence or two; nothing where all were there."""
    if not absences or not workers * seconds:
        return []
    away_s = sum((seconds if one.back_s is None else min(one.back_s, seconds)) - one.died_s for one in absences)
    if len(absences) <= MOST_TOLD:
        said = [
            f"rank {one.rank} {'was cut off' if one.cut else 'died'} at {format_seconds(one.died_s)}"
            + ("" if one.back_s is None else f" and was back at {format_seconds(one.back_s)}")
            for one in absences
        ]
    else:
        back = sum(one.back_s is not None for one in absences)
        never = [one.rank for one in absences if one.back_s is None]
        cut = sum(one.cut for one in absences)
        said = [f"workers died {len(absences)} times, and came back {back} times"]
        said += [f"{cut} of them as their host could not hear the others"] if cut else []
        said += [f"{format_ranks(never)} never"] if never and back else []
    text = ", ".join(said)
    if steps := sum(one.lost is not None for one in absences):
        text += "; a step that was under way is lost" if steps == 1 else f"; {steps} steps under way are lost"
    return [f"{text[0].upper()}{text[1:]}; of the workers' time {1 - away_s / (workers * seconds):.1%} was left."]
