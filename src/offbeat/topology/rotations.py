"""Rounds of groups that rotate: who averages with whom, round after round, until all have heard of all.

A round is a list of groups, a group a list of workers 0 … P − 1, and the rounds repeat. `butterfly` and `rotation` are
the two ways to make them, `rounds` picks the one that fits. `matching` is a round of random pairs, drawn for each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from offbeat.basics import draw

Round = list[list[int]]


def usual_group(p: int) -> int:
    """About √P: the size of a group where none was asked for."""
    return 1 << ((p.bit_length()) // 2) if _is_power(p) else math.isqrt(p - 1) + 1


def rounds(p: int, group: int) -> tuple[Round, ...]:
    """One period of rounds for P workers in groups of at most ``group``."""
    return butterfly(p, group) if _is_power(p) and _is_power(group) else rotation(p, group)


def matching(p: int, seed: int, t: int) -> list[tuple[int, int]]:
    """The random pairs of round ``t``; with an odd number, one worker is in none."""
    order, half = draw.permutation(p, seed, t), p // 2
    return list(zip(order[:half], order[half : 2 * half], strict=True))


def butterfly(p: int, group: int) -> tuple[Round, ...]:
    """WAGMA's rounds, for powers of two: workers that differ only in this round's log₂ S bits are a group."""
    n, m = p.bit_length() - 1, group.bit_length() - 1
    period = n // math.gcd(n, m) if n else 1
    turns = []
    for t in range(period):
        mask = sum(1 << ((t * m + r) % n) for r in range(m))
        found: dict[int, list[int]] = {}
        for rank in range(p):
            found.setdefault(rank & ~mask, []).append(rank)
        turns.append(list(found.values()))
    return tuple(turns)


@lru_cache(maxsize=256)
def rotation(p: int, group: int) -> tuple[Round, ...]:
    """Rounds of groups for any P and S, such that every window of about ⌈log_S P⌉ + 1 rounds reaches everybody.

    Lay the workers out in a row and let every n-th form a group (n groups). If what one worker knows is an interval of
    the row, it meets that many groups at once; lay the groups out one after another, and all they know is an interval
    again, S times as long. This is the butterfly without powers of two. It loses a little where the row ends and where
    the rounds begin anew, so candidates that differ in where the row begins are tried until one is seen to be in time.
    """
    if group == 2:
        return _rotating_pairs(p)
    n = -(-p // group)
    least = next(k for k in range(p) if group**k >= p) if group > 1 else 1
    for attempt in range(40):
        made = _shuffles(p, n, least, attempt)
        if group == 1 or _all_reached(made, p, least + 1):
            return made
    return _shuffles(p, n, least, 0)


def _rotating_pairs(p: int) -> tuple[Round, ...]:
    if p % 2:
        # i meets 2^t − i modulo P. After n rounds it has heard from i + c and from c' − i for 2^(n−1) consecutive c,
        # hence from all after ⌈log₂ P⌉ + 1: with an odd number nothing is faster. Doubling is one-to-one modulo an
        # odd P, so it does not matter at which step one begins.
        period = next(k for k in range(1, p + 1) if pow(2, k, p) == 1)
        turns = [pow(2, t, p) for t in range(period)]
        return tuple([sorted({i, (d - i) % p}) for i in range(p) if i <= (d - i) % p] for d in turns)
    # Knödel's graph: even rank 2j meets the odd one of place j + 2^t − 1.
    half, turns = p // 2, [(1 << t) - 1 for t in range((p - 1).bit_length())]
    return tuple([sorted((2 * j, 2 * ((j + d) % half) + 1)) for j in range(half)] for d in turns)


def _shuffles(p: int, n: int, period: int, attempt: int) -> tuple[Round, ...]:
    order, turns = list(range(p)), list[Round]()
    for t in range(period):
        ends = [sum(p // n + (k < p % n) for k in range(r)) for r in range(n + 1)]
        teams = [order[r::n] if t else order[ends[r] : ends[r + 1]] for r in range(n)]
        turns.append([sorted(team) for team in teams])
        start = draw.below(p, p, n, period, attempt, t) if attempt else 0
        order = [rank for team in teams for rank in team]
        order = order[start:] + order[:start]
    return tuple(turns)


def _all_reached(turns: Sequence[Round], p: int, steps: int) -> bool:
    """Whether everybody has heard from everybody after so many rounds, whichever comes first."""
    for begin in range(len(turns)):
        known = [1 << rank for rank in range(p)]
        for step in range(steps):
            for team in turns[(begin + step) % len(turns)]:
                together = 0
                for rank in team:
                    together |= known[rank]
                for rank in team:
                    known[rank] = together
        if any(bits != (1 << p) - 1 for bits in known):
            return False
    return True


def _is_power(n: int) -> bool:
    return n & (n - 1) == 0
