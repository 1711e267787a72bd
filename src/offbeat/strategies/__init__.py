"""The methods: one file a paper. This table is the whole registry."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.method.paper import Paper
from offbeat.method.strategy import Strategy
from offbeat.strategies import ad_psgd as _ad_psgd
from offbeat.strategies import adaptive as _adaptive
from offbeat.strategies import allreduce as _allreduce
from offbeat.strategies import dasgd as _dasgd
from offbeat.strategies import diloco as _diloco
from offbeat.strategies import dpsgd as _dpsgd
from offbeat.strategies import eager as _eager
from offbeat.strategies import local_sgd as _local_sgd
from offbeat.strategies import matcha as _matcha
from offbeat.strategies import noloco as _noloco
from offbeat.strategies import nonblocking as _nonblocking
from offbeat.strategies import qsgd as _qsgd
from offbeat.strategies import sgp as _sgp
from offbeat.strategies import wagma as _wagma
from offbeat.strategies.ad_psgd import ad_psgd
from offbeat.strategies.adaptive import adaptive
from offbeat.strategies.allreduce import allreduce
from offbeat.strategies.dasgd import dasgd
from offbeat.strategies.diloco import diloco
from offbeat.strategies.dpsgd import dpsgd
from offbeat.strategies.eager import eager
from offbeat.strategies.local_sgd import local_sgd
from offbeat.strategies.matcha import matcha
from offbeat.strategies.noloco import noloco
from offbeat.strategies.nonblocking import nonblocking
from offbeat.strategies.qsgd import qsgd
from offbeat.strategies.sgp import sgp
from offbeat.strategies.wagma import wagma


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
        (_qsgd, qsgd),
        (_local_sgd, local_sgd),
        (_adaptive, adaptive),
        (_dasgd, dasgd),
        (_eager, eager),
        (_wagma, wagma),
        (_nonblocking, nonblocking),
        (_dpsgd, dpsgd),
        (_ad_psgd, ad_psgd),
        (_sgp, sgp),
        (_matcha, matcha),
        (_diloco, diloco),
        (_noloco, noloco),
    )
}


def strategy(name: str, **settings: object) -> Strategy:
    """The strategy called ``name``: ``ob.strategy("local_sgd", period=8)``."""
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no strategy is called {name!r}; {hint}there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name].make(**settings)


__all__ = [
    "STRATEGIES",
    "Card",
    "ad_psgd",
    "adaptive",
    "allreduce",
    "dasgd",
    "diloco",
    "dpsgd",
    "eager",
    "local_sgd",
    "matcha",
    "noloco",
    "nonblocking",
    "qsgd",
    "sgp",
    "strategy",
    "wagma",
]
