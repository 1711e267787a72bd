"""Waiting that is not ours: where a worker's time went while it was in somebody else's collective, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from offbeat.basics.units import format_seconds

TOLD = 3  # places that a sentence names
WORTH_TELLING = 0.05  # of all waiting
EVERY = 0.9  # of the steps: a trainer may leave one out, at the end of an epoch


@dataclass(frozen=True)
class ForeignWait:
    """A place from which a collective was called that is not Offbeat's, and the time spent in it.

    ``where`` is a file, from its package on, and a line; ``op`` is what was called there, as ``torch.distributed`` has
    it. ``calls``, ``steps`` (those in which it was called) and ``seconds``: of one worker, or of all together.
    """

    where: str
    op: str
    calls: int
    steps: int
    seconds: float


def together(workers: Iterable[Sequence[ForeignWait]]) -> tuple[ForeignWait, ...]:
    """The same places on all workers added up, the longest wait first."""
    found: dict[tuple[str, str], ForeignWait] = {}
    for one in (wait for own in workers for wait in own):
        known = found.get((one.where, one.op), replace(one, calls=0, steps=0, seconds=0.0))
        found[one.where, one.op] = replace(
            known,
            calls=known.calls + one.calls,
            steps=known.steps + one.steps,
            seconds=known.seconds + one.seconds,
        )
    return tuple(sorted(found.values(), key=lambda one: -one.seconds))


def told(waits: Sequence[ForeignWait], waited_s: float, steps: int, workers: int = 1) -> list[str]:
    """A sentence, or none where it is not worth one.

    ``waited_s`` (all waiting, ours too) and ``steps`` are of all ``workers`` whose waits these are.
    """
    worth = [one for one in waits if one.seconds > WORTH_TELLING * waited_s][:TOLD]
    if not worth:
        return []
    places = [
        f"{format_seconds(one.seconds)} went into {short(one.where)} ({one.op}, {_often(one, steps, workers)})"
        for one in worth
    ]
    return [f"Of {format_seconds(waited_s)} of waiting from attach to the end, {', '.join(places)}."]


def short(where: str) -> str:
    """The package and the file are enough to find it."""
    parts = PurePosixPath(where).parts
    return where if len(parts) <= 3 else f"{parts[0]}/…/{parts[-1]}"


def _often(one: ForeignWait, steps: int, workers: int) -> str:
    if one.calls <= workers:
        return "once"
    if one.steps >= EVERY * steps:
        return "every step"
    return f"{one.calls / workers:.0f} times"
