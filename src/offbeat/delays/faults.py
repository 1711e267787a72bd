"""Workers that die and come back, in virtual time: who, and when."""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.basics import draw
from offbeat.basics.units import format_seconds, parse_seconds

_ACCEPTED = (
    "'rank 3 dies at 40s', '2 ranks die at 40s', or 'mtbf 300s', each with ', back after 30s' or without, "
    "several of them joined by +"
)
_DRAWN = 0x64696573


class Death(NamedTuple):
    """Of a rank, or of so many drawn ones. ``absent_s``: they come back after so long; None: never."""

    who: int
    at_s: float
    absent_s: float | None = None


class Event(NamedTuple):
    """``rank`` dies, or somebody is there in its place."""

    at_s: float
    rank: int
    is_back: bool


class _Due(NamedTuple):
    """``kind``: "rank", "ranks" or "mtbf", which die, or "back"; ``number`` orders what is due at the same time."""

    at_s: float
    number: int
    kind: str
    of: Death


@dataclass(frozen=True)
class Faults:
    """``dies``: single ranks; ``ranks``: so many drawn ones; ``mtbf_s``: the mean time between two deaths, each of a
    drawn worker, at moments without memory. The last worker never dies.
    """

    dies: tuple[Death, ...] = ()
    ranks: tuple[Death, ...] = ()
    mtbf_s: float | None = None
    mtbf_absent_s: float | None = None

    def check(self, workers: int, seed: int) -> None:
        """Refuse what cannot be with so many workers."""
        for rank, _, _ in self.dies:
            if not 0 <= rank < workers:
                raise ValueError(f"rank {rank} cannot die among {workers} workers; use 0 to {workers - 1}")
        away = set[int]()
        for event in Faults(self.dies, self.ranks)._events(workers, seed, spares_the_last=False):
            (away.discard if event.is_back else away.add)(event.rank)
            if len(away) == workers:
                raise ValueError(f"all {workers} workers die; let one of them live")

    def events(self, workers: int, seed: int) -> Iterator[Event]:
        """In the order of time; without end where all who die at moments without memory come back."""
        return self._events(workers, seed, spares_the_last=True)

    def _events(self, workers: int, seed: int, spares_the_last: bool) -> Iterator[Event]:
        numbers, draws, away = itertools.count(), itertools.count(), set[int]()
        due = [_Due(one.at_s, next(numbers), "rank", one) for one in self.dies]
        due += [_Due(one.at_s, next(numbers), "ranks", one) for one in self.ranks]
        if self.mtbf_s is not None:
            due.append(_Due(self._until_next_s(seed, 0), next(numbers), "mtbf", Death(1, 0.0, self.mtbf_absent_s)))
        heapq.heapify(due)
        while due:
            at_s, number, kind, (who, _, absent_s) = heapq.heappop(due)
            living = [rank for rank in range(workers) if rank not in away]
            if kind == "back":
                away.discard(who)
                yield Event(at_s, who, is_back=True)
                continue
            if kind == "rank":
                dying = [who] if who in living else []
            elif kind == "ranks":
                if who > len(living) and not spares_the_last:
                    raise ValueError(f"{who} ranks cannot die where {len(living)} are left; use 0 to {len(living)}")
                count = min(who, len(living))  # some may have died at a drawn moment
                dying = [living[place] for place in draw.sample(len(living), count, seed, _DRAWN, number)]
            else:
                drawn = next(draws)
                dying = [living[draw.below(len(living), seed, _DRAWN, 2, drawn)]]
                # Nobody else can die where the last one is left, and nobody is to come back.
                others = len(living) > 2 or any(one.kind == "back" for one in due)
                if others or (absent_s is not None and len(living) > 1):
                    next_s = at_s + self._until_next_s(seed, drawn + 1)
                    heapq.heappush(due, _Due(next_s, next(numbers), "mtbf", Death(1, 0.0, absent_s)))
            for rank in dying:
                if len(away) < workers - 1 or not spares_the_last:
                    away.add(rank)
                    yield Event(at_s, rank, is_back=False)
                    if absent_s is not None:
                        heapq.heappush(due, _Due(at_s + absent_s, next(numbers), "back", Death(rank, at_s)))

    def _until_next_s(self, seed: int, number: int) -> float:
        assert self.mtbf_s is not None
        return -self.mtbf_s * math.log(1.0 - draw.uniform(seed, _DRAWN, 1, number))

    @property
    def is_endless(self) -> bool:
        """Whether there are always more."""
        return self.mtbf_absent_s is not None

    def __str__(self) -> str:
        said = [f"rank {who} dies at {format_seconds(at_s)}{_back(absent_s)}" for who, at_s, absent_s in self.dies]
        said += [f"{who} ranks die at {format_seconds(at_s)}{_back(absent_s)}" for who, at_s, absent_s in self.ranks]
        if self.mtbf_s is not None:
            said.append(f"mtbf {format_seconds(self.mtbf_s)}{_back(self.mtbf_absent_s)}")
        return " + ".join(said)


def _back(absent_s: float | None) -> str:
    return "" if absent_s is None else f", back after {format_seconds(absent_s)}"


def parse(text: str) -> Faults | None:
    """The faults that a phrase stands for, such as ``rank 3 dies at 40s, back at 60s`` or ``mtbf 300s, back after
    30s``; ``none`` is None.
    """
    if text.strip().lower() == "none":
        return None
    dies, ranks, mtbf = list[Death](), list[Death](), list[tuple[float, float | None]]()
    for part in text.split("+"):
        phrase, _, returns = " ".join(part.lower().replace("μ", "µ").split()).partition(",")
        if match := re.fullmatch(r"rank (\d+) dies at (.+)", phrase):
            at_s = _seconds(match[2], text)
            dies.append(Death(int(match[1]), at_s, _absent(returns, at_s, text)))
        elif match := re.fullmatch(r"(\d+) ranks? dies? at (.+)", phrase):
            at_s = _seconds(match[2], text)
            ranks.append(Death(int(match[1]), at_s, _absent(returns, at_s, text)))
        elif (match := re.fullmatch(r"mtbf (.+)", phrase)) and not mtbf:
            mtbf.append((_seconds(match[1], text), _absent(returns, None, text)))
        else:
            raise ValueError(f"the faults {text!r} are not understood; use {_ACCEPTED}")
    return Faults(tuple(dies), tuple(ranks), *(mtbf[0] if mtbf else ()))


def _absent(returns: str, died_s: float | None, text: str) -> float | None:
    """From "back at 60s", where it is known when they died, or "back after 20s"; None from nothing."""
    if not returns.strip():
        return None
    match = re.fullmatch(r" *back (at|after) (.+)", returns)
    if match is None or (match[1] == "at" and died_s is None):
        raise ValueError(f"the faults {text!r} are not understood; use {_ACCEPTED}")
    absent_s = _seconds(match[2], text) - (died_s or 0.0) * (match[1] == "at")
    if absent_s <= 0:
        raise ValueError(f"the faults {text!r} have a worker come back before it has died; use a later moment")
    return absent_s


def _seconds(words: str, text: str) -> float:
    try:
        return parse_seconds(words.replace(" ", ""))
    except ValueError as error:
        raise ValueError(f"the faults {text!r} cannot be used: {error}") from None
