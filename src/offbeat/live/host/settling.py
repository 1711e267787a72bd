"""What counts of hosts that are lost: decided in one place, the first host's process, by what the others hold.

A sum must divide alike on all hosts. A part of a lost host may have come to some of the others and not to all, and some
may have gone on with it. So the first host says to all who are left that it is gone. From then on they hear nothing
more of it, use nothing more of it, and say what they hold. A sum in which somebody has used it stays what it is: that
host passes it on to the others. Of all other sums a part counts if everybody holds it; else it is absent for all.

    B has A's part of round 8, averages and goes on; C has not   B passes on what round 8 came to
    B has A's part of round 9, and waits for C's; C has not      it is absent, for B and for C

What a name names is known to the servers of a channel alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Name = tuple[int, ...]


class Held(NamedTuple):
    """What one host says. ``held``: a channel, the name of a part there, and how many hosts of the channel are left.

    ``used``: a channel, and the name of what has gone on to workers of this host.
    """

    held: list[tuple[str, list[int], int]]
    used: list[tuple[str, list[int]]]


class Counts(NamedTuple):
    """What is decided. ``held``: parts that count. ``used``: sums that stay what they are, and who passes each on."""

    held: list[tuple[str, list[int]]]
    used: list[tuple[str, list[int], str]]

    def at(self, key: str, me: str) -> tuple[set[Name], dict[Name, bool]]:
        """What of it concerns one channel; of sums, whether this host is to pass them on."""
        held = {tuple(name) for at, name in self.held if at == key}
        return held, {tuple(name): giver == me for at, name, giver in self.used if at == key}


class Inquiry:
    """One question to all who are left, the first host before the others."""

    def __init__(self, number: int, asked: Sequence[str]) -> None:
        self.number, self._asked = number, tuple(asked)
        self._said: dict[str, Held] = {}

    def hear(self, host: str, held: Held) -> None:
        if host in self._asked:
            self._said[host] = held

    def is_over(self, left: Mapping[str, bool]) -> bool:
        """Whether all have answered who are still there."""
        return all(host in self._said or not left[host] for host in self._asked)

    def decided(self) -> Counts:
        holders = Counter[tuple[str, Name]]()
        wanted = dict[tuple[str, Name], int]()
        givers = dict[tuple[str, Name], str]()
        for host in self._asked:
            if (said := self._said.get(host)) is None:
                continue
            for key, name, left in said.held:
                holders[key, tuple(name)] += 1
                wanted[key, tuple(name)] = left
            for key, name in said.used:
                givers.setdefault((key, tuple(name)), host)
        return Counts(
            [(key, list(name)) for (key, name), count in holders.items() if count == wanted[key, name]],
            [(key, list(name), giver) for (key, name), giver in givers.items()],
        )
