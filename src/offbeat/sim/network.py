"""What a message costs: latency plus bytes over bandwidth, with each collective's algorithm spelled out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

PerLink = float | Callable[[int, int], float]
Algorithm = Literal["ring", "halving_doubling"]


@dataclass(frozen=True)
class Network:
    """Links between workers. ``latency_s`` and ``bandwidth_Bps`` are numbers, or functions of (from, to).

    - ``ring`` all-reduce of n bytes among P: 2(P − 1) rounds, in each of which every member passes n/P bytes to its
      neighbour; a round is as slow as the slowest link of the ring.
    - ``halving_doubling``: 2⌈log₂ P⌉ rounds, halving what is passed on the way in, doubling it on the way out; the
      same bytes, fewer latencies. A number of members that is no power of two costs one exchange before and after.
    - all-to-all of messages of m bytes: P − 1 rounds; in round k every member sends one to its k-th neighbour.
    - all-gather of messages of m bytes: P − 1 rounds along the ring, one message a round.
    - broadcast: down a binary tree, ⌈log₂ P⌉ messages one after the other.
    - point to point: a worker's messages leave one after the other through its own port.

    ``hosts``: on how many hosts the workers are, which some methods ask; if nothing is said, each is on its own. It
    changes no price.
    """

    latency_s: PerLink = 50e-6
    bandwidth_Bps: PerLink = 1.25e9
    algorithm: Algorithm = "ring"
    hosts: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.latency_s) and not self.latency_s >= 0:
            raise ValueError(f"a latency of {self.latency_s!r} s is impossible; use 0 or more")
        if not callable(self.bandwidth_Bps) and not self.bandwidth_Bps > 0:
            raise ValueError(f"a bandwidth of {self.bandwidth_Bps!r} bytes/s carries nothing; use a number above 0")
        if self.algorithm not in ("ring", "halving_doubling"):
            raise ValueError(f"no all-reduce is called {self.algorithm!r}; use 'ring' or 'halving_doubling'")
        if self.hosts is not None and not self.hosts >= 1:
            raise ValueError(f"workers cannot be on {self.hosts!r} hosts; use 1 or more, or leave it out")

    def latency(self, source: int, target: int) -> float:
        return self.latency_s(source, target) if callable(self.latency_s) else self.latency_s

    def send_s(self, source: int, target: int, nbytes: float) -> float:
        """One message, from the moment it leaves until it is there."""
        rate = self.bandwidth_Bps(source, target) if callable(self.bandwidth_Bps) else self.bandwidth_Bps
        return self.latency(source, target) + nbytes / rate

    def all_reduce_s(self, members: Sequence[int], nbytes: float) -> float:
        """From the moment the last member is there until all have the sum."""
        count = len(members)
        if count < 2:
            return 0.0
        if self.algorithm == "ring":
            return 2 * (count - 1) * self._slowest_on_ring(members, nbytes / count)
        rounds = int(math.log2(count))
        core = [members[i] for i in range(2**rounds)]
        total = sum(2 * self._slowest_pair(core, 2**k, nbytes / 2 ** (rounds - k)) for k in range(rounds))
        if count > 2**rounds:
            total += 2 * max(self.send_s(members[i], members[i - 2**rounds], nbytes) for i in range(2**rounds, count))
        return total

    def all_gather_s(self, members: Sequence[int], nbytes: float) -> float:
        """Every member's message of ``nbytes`` to every other."""
        return (len(members) - 1) * self._slowest_on_ring(members, nbytes) if len(members) > 1 else 0.0

    def all_to_all_s(self, members: Sequence[int], nbytes: float) -> float:
        """From every member a message of ``nbytes`` to every other, each another one."""
        count = len(members)
        if not callable(self.latency_s) and not callable(self.bandwidth_Bps):
            return (count - 1) * (self.latency_s + nbytes / self.bandwidth_Bps)
        return sum(
            max(self.send_s(a, members[(i + k) % count], nbytes) for i, a in enumerate(members))
            for k in range(1, count)
        )

    def broadcast_s(self, members: Sequence[int], nbytes: float) -> float:
        """The first member's message to all others."""
        depth = (len(members) - 1).bit_length()
        return depth * self._slowest_on_ring(members, nbytes) if depth else 0.0

    def _slowest_on_ring(self, members: Sequence[int], nbytes: float) -> float:
        if not callable(self.latency_s) and not callable(self.bandwidth_Bps):
            return self.latency_s + nbytes / self.bandwidth_Bps
        return max(self.send_s(a, members[(i + 1) % len(members)], nbytes) for i, a in enumerate(members))

    def _slowest_pair(self, members: Sequence[int], distance: int, nbytes: float) -> float:
        if not callable(self.latency_s) and not callable(self.bandwidth_Bps):
            return self.latency_s + nbytes / self.bandwidth_Bps
        return max(self.send_s(a, members[i ^ distance], nbytes) for i, a in enumerate(members))
