"""The methods: one file a paper. This table is the whole registry."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.paper import Paper
from offbeat.strategies import allreduce as _allreduce
from offbeat.strategies import local_sgd as _local_sgd
from offbeat.strategies.allreduce import allreduce
from offbeat.strategies.local_sgd import local_sgd
from offbeat.strategy import Strategy


@dataclass(frozen=True)
class Card:
    """A method in the registry: its paper, its factory, and its documentation."""

    paper: Paper
    make: Callable[..., Strategy]
    text: str


STRATEGIES: dict[str, Card] = {
    module.PAPER.name: Card(module.PAPER, make, module.__doc__ or "")
    for module, make in (
        (_allreduce, allreduce),
        (_local_sgd, local_sgd),
    )
}


def strategy(name: str, **settings: object) -> Strategy:
    """The strategy called ``name``: ``ob.strategy("local_sgd", period=8)``."""
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no strategy is called {name!r}; {hint}there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name].make(**settings)


__all__ = ["STRATEGIES", "Card", "strategy", *STRATEGIES]
