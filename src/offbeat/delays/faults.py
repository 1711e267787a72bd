"""Workers that die, in virtual time: who, and when."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from offbeat.basics import draw
from offbeat.basics.units import format_seconds, parse_seconds

_ACCEPTED = "'rank 3 dies at 40s', '2 ranks die at 40s', or 'mtbf 300s', several of them joined by +"
_DRAWN = 0x64696573


@dataclass(frozen=True)
class Faults:
    """``dies``: a rank and the second of its death; ``ranks``: so many drawn ones, and theirs; ``mtbf_s``: the mean
    time between two deaths, each of a drawn worker, at moments without memory. The last worker never dies.
    """

    dies: tuple[tuple[int, float], ...] = ()
    ranks: tuple[tuple[int, float], ...] = ()
    mtbf_s: float | None = None

    def deaths(self, workers: int, seed: int) -> dict[int, float]:
        """When each worker dies that does."""
        found: dict[int, float] = {}
        for rank, at_s in self.dies:
            if not 0 <= rank < workers:
                raise ValueError(f"rank {rank} cannot die among {workers} workers; use 0 to {workers - 1}")
            found[rank] = min(at_s, found.get(rank, math.inf))
        for number, (count, at_s) in enumerate(self.ranks):
            living = [rank for rank in range(workers) if rank not in found]
            if count > len(living):
                raise ValueError(f"{count} ranks cannot die where {len(living)} are left; use 0 to {len(living)}")
            for place in draw.sample(len(living), count, seed, _DRAWN, number):
                found[living[place]] = at_s
        if self.mtbf_s is not None:
            at_s = 0.0
            for number in range(workers - 1):
                at_s += -self.mtbf_s * math.log(1.0 - draw.uniform(seed, _DRAWN, 1, number))
                living = [rank for rank in range(workers) if rank not in found]
                if len(living) > 1:
                    found[living[draw.below(len(living), seed, _DRAWN, 2, number)]] = at_s
        if len(found) == workers:
            raise ValueError(f"all {workers} workers die; let one of them live")
        return found

    def __str__(self) -> str:
        said = [f"rank {rank} dies at {format_seconds(at_s)}" for rank, at_s in self.dies]
        said += [f"{count} ranks die at {format_seconds(at_s)}" for count, at_s in self.ranks]
        return " + ".join([*said, *([] if self.mtbf_s is None else [f"mtbf {format_seconds(self.mtbf_s)}"])])


def parse(text: str) -> Faults | None:
    """The faults that a phrase stands for, such as ``rank 3 dies at 40s`` or ``mtbf 300s``; ``none`` is None."""
    if text.strip().lower() == "none":
        return None
    dies, ranks, mtbf_s = list[tuple[int, float]](), list[tuple[int, float]](), None
    for part in text.split("+"):
        phrase = " ".join(part.lower().replace("μ", "µ").split())
        if "back" in phrase:
            raise ValueError(f"the faults {text!r} have a worker come back, which is not built; use {_ACCEPTED}")
        if match := re.fullmatch(r"rank (\d+) dies at (.+)", phrase):
            dies.append((int(match[1]), _seconds(match[2], text)))
        elif match := re.fullmatch(r"(\d+) ranks? dies? at (.+)", phrase):
            ranks.append((int(match[1]), _seconds(match[2], text)))
        elif (match := re.fullmatch(r"mtbf (.+)", phrase)) and mtbf_s is None:
            mtbf_s = _seconds(match[1], text)
        else:
            raise ValueError(f"the faults {text!r} are not understood; use {_ACCEPTED}")
    return Faults(tuple(dies), tuple(ranks), mtbf_s)


def _seconds(words: str, text: str) -> float:
    try:
        return parse_seconds(words.replace(" ", ""))
    except ValueError as error:
        raise ValueError(f"the faults {text!r} cannot be used: {error}") from None
