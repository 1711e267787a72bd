"""Who cannot come to a round because of something that is not ours: a collective of the script, another channel."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

NEVER = sys.maxsize  # results that nobody sees: waited for by one whose rounds others have no part in


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
