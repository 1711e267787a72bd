"""A mean of what the workers of a run have measured: what they say for it, and who has a part in it.

The first host's server decides, when it hears what completes a mean; so each mean is the same on all. A worker that is
dead by then has a part only if it had said something; one that comes back has a part from the first mean on that was
not decided by then. What a twin has from its member, the member has said: it counts as said, but not twice.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

SAYS, DECIDED = "mean/", "decided_mean/"


def said_by(number: int, rank: int) -> str:
    """The fact with which a worker says something for a mean."""
    return f"{SAYS}{number % 2}/{rank}"


def words(number: int, rank: int, numbers: Sequence[float]) -> str:
    return json.dumps([number, rank, [*numbers]])


def decided(facts: Mapping[str, str], number: int, size: int, dead: Collection[int]) -> tuple[str, str] | None:
    """The fact that tells this mean, if nobody is waited for who is not dead or without data."""
    found = dict[int, list[float]]()
    for rank in range(size):
        its_number, who, numbers = json.loads(facts.get(said_by(number, rank), "[-1, -1, []]"))
        if its_number == number and who == rank:
            found[rank] = numbers
        elif its_number < number and rank not in dead and f"done/{rank}" not in facts:
            return None
    if not found:
        return None
    return f"{DECIDED}{number % 2}", json.dumps([number, _mean(found)])


def _mean(found: dict[int, list[float]]) -> list[float] | str:
    """Or why there is none."""
    first, many = next((rank, len(numbers)) for rank, numbers in found.items())
    for rank, numbers in found.items():
        if len(numbers) != many:
            return (
                f"mean() was given {many} numbers on rank {first} and {len(numbers)} on rank {rank}; give equally many"
            )
    return [sum(column) / len(found) for column in zip(*found.values(), strict=True)]


def known(facts: Mapping[str, str], number: int) -> list[float] | None:
    """That mean, once it has been told."""
    its_number, found = json.loads(facts.get(f"{DECIDED}{number % 2}", "[-1, []]"))
    if its_number != number:
        return None
    if isinstance(found, str):
        raise ValueError(found)
    return list(found)
