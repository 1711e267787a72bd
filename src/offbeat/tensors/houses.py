"""Sums among workers of several hosts: the rule that both worlds follow.

Each host adds up what its own members of a block give, in the order of the ranks. Then the hosts add up their sums, in
the order of the hosts' first workers in the run. A host whose members give nothing gives nothing.

With a codec the hosts' sums are coded, in two phases (`offbeat.tensors.stretches`), for which the hosts stand in the
order of their first members in the block. A host codes on behalf of its first member in the block: the draws are keyed
by that rank, and what is lost is that rank's to send next time. What leaves no host is not coded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbeat.tensors.codec import Codec, sent_to
from offbeat.tensors.stretches import Stretches, coded_mean, shares
from offbeat.tensors.sums import mean
from offbeat.tensors.vector import Vec


def numbered(homes: Sequence[str]) -> tuple[int, ...]:
    """The number of each rank's host, by the names of all ranks' hosts; numbers are in the order of the first ranks."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(home, len(numbers)) for home in homes)


def together(ranks: Sequence[int], homes: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """These ranks by the hosts they are on, in the order of each host's first; ``homes`` are those of all ranks.

    Where no homes are known, each rank has a host of its own.
    """
    found: dict[object, list[int]] = {}
    for rank in ranks:
        found.setdefault(homes[rank] if homes else rank, []).append(rank)
    return tuple(map(tuple, found.values()))


def mean_of_hosts(
    given: Mapping[int, Vec],
    ranks: Sequence[int],
    homes: Sequence[int],
    divisor: float,
    codec: Codec | None = None,
    key: tuple[int, int] = (0, 0),
    lost: Mapping[int, Vec | None] | None = None,
) -> Vec | None:
    """The sum of what some of a block's ``ranks`` have ``given``, divided; None if nobody gives anything.

    ``homes``: the numbers of all ranks' hosts, none where they are not known. ``key``: the run's seed and the sum's
    number. ``lost``: what coding has lost before, of each rank that keeps it.
    """
    houses = together(ranks, homes)
    gives = {house[0]: [given[r] for r in house if r in given] for house in houses}
    sums = {first: vecs[0] if len(vecs) == 1 else mean(vecs, 1) for first, vecs in gives.items() if vecs}
    if not sums:
        return None
    if (sent := sent_to(codec, len(houses) - 1)) is not None:
        stretches = Stretches(next(iter(sums.values())), sent, len(houses))
        return coded_mean(shares(sums, list(gives), stretches, *key, lost), divisor)
    in_order = sorted(sums, key=lambda first: homes[first]) if homes else list(sums)
    return mean([sums[first] for first in in_order], divisor)
