"""The methods: one file a paper. ``registry.py`` lists them; here they are found by their names."""

from __future__ import annotations

import difflib

from offbeat.method import Card, Method, Paper
from offbeat.strategies import registry
from offbeat.strategies.registry import *  # noqa: F403

METHODS: dict[str, Card] = {name: make().card for name, make in vars(registry).items() if not name.startswith("_")}
DEFAULT = next(iter(METHODS))  # for those who name none, wherever that is: the registry's first line


def named(words: str, /, *more: str, **settings: object) -> Method:
    """The method that words stand for, as on the command line: ``ob.named("local_sgd:period=8,codec=int8")``.

    Further settings may follow, in words (``"period=8"``) or as arguments: ``ob.named("local_sgd", period=8)``.
    """
    if not isinstance(words, str):
        raise TypeError(f"{words!r} is not the name of a method; use one of {', '.join(METHODS)}")
    name, _, inline = words.partition(":")
    name = name.strip()
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no method is called {name!r}; {hint}there are {', '.join(METHODS)}")
    pairs = [pair for pair in inline.split(",") if pair.strip()]
    return METHODS[name].read([*pairs, *more], **settings)


def as_method(method: Method | str | None, strategy: Method | str | None = None) -> Method:
    """What an argument ``method`` stands for: a method, one in words, or, if there is none, the default.

    ``strategy`` is what was given under the argument's earlier name.
    """
    if method is not None and strategy is not None:
        raise ValueError(f"method={method} and strategy={strategy} are two names of one argument; give method alone")
    given = strategy if method is None else method
    if given is None:
        return METHODS[DEFAULT].make()
    if isinstance(given, str):
        return named(given)
    if not isinstance(given, Method):
        raise TypeError(_no_method(given))
    return given


def _no_method(given: object) -> str:
    paper = getattr(given, "paper", None)
    if isinstance(paper, Paper):  # what ``@method`` made of a function
        ours = paper.name in METHODS and METHODS[paper.name].make is given
        call = f"ob.{paper.name}" if ours else paper.name
        return f"{call} is the function that makes the method; call it: {call}()"
    return f"{given!r} is not a method; use one such as ob.local_sgd(period=8), in words 'local_sgd:period=8'"


STRATEGIES, strategy = METHODS, named  # their earlier names

__all__ = ["DEFAULT", "METHODS", "STRATEGIES", "as_method", "named", "strategy"]
__all__ += METHODS
