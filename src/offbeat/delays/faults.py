"""Workers that die and come back, in virtual time: who, and when."""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.basics import draw
from offbeat.basics.units import format_seconds, parse_seconds

_ACCEPTED = (
    "'rank 3 dies at 40s', '2 ranks die at 40s', 'host 1 dies at 40s' or 'mtbf 300s', each with ', back after 30s' or "
    "without, or 'hosts 0 and 1 part at 40s, for 20s', several of them joined by +"
)
_DRAWN = 0x64696573


class Death(NamedTuple):
    """Of a rank, of a host, or of so many drawn ranks. ``absent_s``: they come back after so long; None: never."""

    who: int
    at_s: float
    absent_s: float | None = None


class Parting(NamedTuple):
    """The hosts of ``one`` side and those of the ``other`` cannot hear each other for a while. Whoever is on neither
    goes with the side that goes on: the one of more hosts that have workers, or else the one with the first of them.
    """

    one: tuple[int, ...]
    other: tuple[int, ...]
    at_s: float
    for_s: float

    def stop(self, living: Set[int]) -> tuple[int, ...]:
        """The side that stops, where these hosts have workers."""
        one, other = (sorted(living & set(side)) for side in (self.one, self.other))
        return self.one if (-len(other), other) < (-len(one), one) else self.other


class Event(NamedTuple):
    """``rank`` dies, or somebody is there in its place. ``is_cut``: its host was on the side that stops."""

    at_s: float
    rank: int
    is_back: bool
    is_cut: bool = False


class _Due(NamedTuple):
    """``kind``: "rank", "ranks", "host" or "mtbf", which die, "part", or "back"; ``number`` orders what is due at the
    same time.
    """

    at_s: float
    number: int
    kind: str
    of: Death | Parting


@dataclass(frozen=True)
class Faults:
    """Who dies when, and who comes back. The last worker never dies.

    - ``dies``: single ranks.
    - ``ranks``: so many drawn ones.
    - ``mtbf_s``: the mean time between two deaths, each of a drawn worker, at moments without memory.
    - ``hosts``: single hosts. Consecutive ranks are on a host, as many on each as on any other, or one more.
    - ``parts``: hosts that do not hear each other.
    """

    dies: tuple[Death, ...] = ()
    ranks: tuple[Death, ...] = ()
    mtbf_s: float | None = None
    mtbf_absent_s: float | None = None
    hosts: tuple[Death, ...] = ()
    parts: tuple[Parting, ...] = ()

    def check(self, workers: int, seed: int, hosts: int | None = None) -> None:
        """Refuse what cannot be with so many workers on so many ``hosts`` (None: each on one of its own)."""
        there = workers if hosts is None else min(hosts, workers)
        for host in [*(one.who for one in self.hosts), *(h for part in self.parts for h in part.one + part.other)]:
            if not 0 <= host < there:
                raise ValueError(f"host {host} cannot fail among {there} hosts; use 0 to {there - 1}")
        for part in self.parts:
            if both := set(part.one) & set(part.other):
                raise ValueError(f"host {min(both)} cannot part from itself; name it on one side")
        for rank, _, _ in self.dies:
            if not 0 <= rank < workers:
                raise ValueError(f"rank {rank} cannot die among {workers} workers; use 0 to {workers - 1}")
        away = set[int]()
        certain = Faults(self.dies, self.ranks, hosts=self.hosts, parts=self.parts)
        for event in certain._events(workers, seed, there, spares_the_last=False):
            (away.discard if event.is_back else away.add)(event.rank)
            if len(away) == workers:
                raise ValueError(f"all {workers} workers die; let one of them live")

    def events(self, workers: int, seed: int, hosts: int | None = None) -> Iterator[Event]:
        """In the order of time; without end where all who die at moments without memory come back."""
        return self._events(workers, seed, workers if hosts is None else hosts, spares_the_last=True)

    def _events(self, workers: int, seed: int, hosts: int, spares_the_last: bool) -> Iterator[Event]:
        numbers, draws, away = itertools.count(), itertools.count(), set[int]()
        home = [rank * hosts // workers for rank in range(workers)]
        cut_until_s: dict[int, float] = {}  # hosts that hear nobody
        due = [_Due(one.at_s, next(numbers), "rank", one) for one in self.dies]
        due += [_Due(one.at_s, next(numbers), "ranks", one) for one in self.ranks]
        due += [_Due(one.at_s, next(numbers), "host", one) for one in self.hosts]
        due += [_Due(part.at_s, next(numbers), "part", part) for part in self.parts]
        if self.mtbf_s is not None:
            due.append(_Due(self._until_next_s(seed, 0), next(numbers), "mtbf", Death(1, 0.0, self.mtbf_absent_s)))
        heapq.heapify(due)
        while due:
            at_s, number, kind, of = heapq.heappop(due)
            living = [rank for rank in range(workers) if rank not in away]
            if isinstance(of, Parting):
                stop, who = of.stop({home[rank] for rank in living}), 0
                absent_s: float | None = of.for_s
                cut_until_s |= {host: max(at_s + of.for_s, cut_until_s.get(host, 0.0)) for host in stop}
            else:
                who, _, absent_s = of
                stop = (who,)
            if kind == "back":
                if cut_until_s.get(home[who], 0.0) > at_s:  # it comes to a host that hears nobody yet
                    heapq.heappush(due, _Due(cut_until_s[home[who]], number, kind, of))
                    continue
                away.discard(who)
                yield Event(at_s, who, is_back=True)
                continue
            if kind in ("host", "part"):
                dying = [rank for rank in living if home[rank] in stop]
            elif kind == "rank":
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
                    yield Event(at_s, rank, is_back=False, is_cut=kind == "part")
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
        said += [f"host {who} dies at {format_seconds(at_s)}{_back(absent_s)}" for who, at_s, absent_s in self.hosts]
        said += [
            f"hosts {_listed(one)} and {_listed(other)} part at {format_seconds(at_s)}, for {format_seconds(for_s)}"
            for one, other, at_s, for_s in self.parts
        ]
        if self.mtbf_s is not None:
            said.append(f"mtbf {format_seconds(self.mtbf_s)}{_back(self.mtbf_absent_s)}")
        return " + ".join(said)


def _back(absent_s: float | None) -> str:
    return "" if absent_s is None else f", back after {format_seconds(absent_s)}"


def _listed(hosts: Sequence[int]) -> str:
    return ",".join(map(str, hosts))


def parse(text: str) -> Faults | None:
    """The faults that a phrase stands for, such as ``rank 3 dies at 40s, back at 60s`` or ``mtbf 300s, back after
    30s``; ``none`` is None.
    """
    if text.strip().lower() == "none":
        return None
    dies, ranks, mtbf = list[Death](), list[Death](), list[tuple[float, float | None]]()
    hosts, parts = list[Death](), list[Parting]()
    for part in text.split("+"):
        phrase, _, returns = " ".join(part.lower().replace("μ", "µ").split()).partition(",")
        if match := re.fullmatch(r"rank (\d+) dies at (.+)", phrase):
            at_s = _seconds(match[2], text)
            dies.append(Death(int(match[1]), at_s, _absent(returns, at_s, text)))
        elif match := re.fullmatch(r"(\d+) ranks? dies? at (.+)", phrase):
            at_s = _seconds(match[2], text)
            ranks.append(Death(int(match[1]), at_s, _absent(returns, at_s, text)))
        elif match := re.fullmatch(r"host (\d+) dies at (.+)", phrase):
            at_s = _seconds(match[2], text)
            hosts.append(Death(int(match[1]), at_s, _absent(returns, at_s, text)))
        elif match := re.fullmatch(r"hosts ([\d, ]+) and ([\d, ]+) part at ([^,]+), for (.+)", f"{phrase},{returns}"):
            one, other = (tuple(int(number) for number in re.findall(r"\d+", match[k])) for k in (1, 2))
            parts.append(Parting(one, other, _seconds(match[3], text), _seconds(match[4], text)))
        elif (match := re.fullmatch(r"mtbf (.+)", phrase)) and not mtbf:
            mtbf.append((_seconds(match[1], text), _absent(returns, None, text)))
        else:
            raise ValueError(f"the faults {text!r} are not understood; use {_ACCEPTED}")
    mtbf_s, mtbf_absent_s = mtbf[0] if mtbf else (None, None)
    return Faults(tuple(dies), tuple(ranks), mtbf_s, mtbf_absent_s, tuple(hosts), tuple(parts))


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
