"""The methods: one file a paper. ``registry.py`` lists them."""

from __future__ import annotations

import difflib

from offbeat.method import Card, Strategy
from offbeat.strategies import registry
from offbeat.strategies.registry import *  # noqa: F403

STRATEGIES: dict[str, Card] = {name: make().card for name, make in vars(registry).items() if not name.startswith("_")}


def strategy(name: str, **settings: object) -> Strategy:
    """The strategy called ``name``: ``ob.strategy("local_sgd", period=8)``."""
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no strategy is called {name!r}; {hint}there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name].make(**settings)


__all__ = ["STRATEGIES", "strategy"]
__all__ += STRATEGIES
