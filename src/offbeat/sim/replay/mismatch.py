"""What is said where a record is not of this run."""

from __future__ import annotations

from offbeat.runs.order import Event


class Mismatch(ValueError):
    """A record that is not of this run."""


def refuse(rank: int, event: Event, instead: str) -> Mismatch:
    what, number = event
    return Mismatch(
        f"the record cannot be followed: at rank {rank} it says {what!r} of {number}, but {instead}; "
        "it is damaged, or of another task or other settings"
    )
