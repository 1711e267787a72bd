"""Delays in words, as the command line has them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from offbeat.basics.units import parse_seconds
from offbeat.delays.distribution import Distribution
from offbeat.delays.kinds import (
    Exponential,
    LogNormal,
    Pareto,
    RandomRanks,
    Rotating,
    constant,
    stalls,
    total,
)
from offbeat.delays.measured import trace
from offbeat.delays.profiles import PROFILES, profile

_TIME = r"(-?[0-9]*\.?[0-9]+(?: ?[a-zµ]+)?)"  # one without a unit is read, so that it can be said
_NUMBER = r"(-?[0-9]*\.?[0-9]+)"
_FORMS: tuple[tuple[str, Callable[..., Distribution]], ...] = (
    (rf"(-?[0-9]+) ranks? {_TIME}", lambda k, t: RandomRanks(int(k), _s(t))),
    (rf"ranks? ([0-9]+(?: ?, ?[0-9]+)*) {_TIME}", lambda r, t: constant(_s(t), map(int, r.split(",")))),
    (rf"{_NUMBER} ?% {_TIME}", lambda p, t: stalls(float(p) / 100, _s(t))),
    (rf"{_TIME} ?\.\. ?{_TIME} rotating", lambda t, u: Rotating(_s(t), _s(u))),
    (rf"exponential {_TIME}", lambda t: Exponential(_s(t))),
    (rf"lognormal {_TIME} {_NUMBER}", lambda t, sigma: LogNormal(_s(t), float(sigma))),
    (rf"pareto {_TIME} {_NUMBER}", lambda t, alpha: Pareto(_s(t), float(alpha))),
    (rf"({'|'.join(PROFILES)})(?: {_TIME})?", lambda name, t: profile(name, None if t is None else _s(t))),
)
_ACCEPTED = (
    "none, '2 ranks 320ms', 'rank 3 30ms', 'ranks 1,3 30ms', '10% 100ms', '50ms..400ms rotating', "
    "'exponential 100ms', 'lognormal 100ms 0.5' or 'pareto 100ms 1.8', several joined by +; a file of times, "
    f"'mine.csv'; or a profile, 'bytedance-se' or 'bytedance-se 300ms', of {', '.join(PROFILES)}"
)


def parse(text: str) -> Distribution | None:
    """The delays a phrase stands for, such as ``2 ranks 320ms`` or ``10% 100ms + rank 3 30ms``; ``none`` is None.

    A name of ``PROFILES`` stands for it, with its median if one is given: ``bytedance-se 300ms``. What ends in ``.csv``
    is a file for ``trace``.
    """
    if text.strip().lower() == "none":
        return None
    parts = [_parse_one(part, text) for part in text.split("+")]
    return parts[0] if len(parts) == 1 else total(*parts)


def _parse_one(part: str, text: str) -> Distribution:
    if part.strip().lower().endswith(".csv"):
        return trace(part.strip())
    phrase = " ".join(part.lower().replace("μ", "µ").split())
    for pattern, make in _FORMS:
        if match := re.fullmatch(pattern, phrase):
            try:
                return make(*match.groups())
            except ValueError as error:
                raise ValueError(f"the delay {text!r} cannot be used: {error}") from None
    close = difflib.get_close_matches(phrase.partition(" ")[0], PROFILES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"the delay {text!r} is not understood; {hint}use {_ACCEPTED}")


def _s(text: str) -> float:
    """A duration; a negative one is read, so that whoever uses it can say what is wrong with it."""
    return -parse_seconds(text[1:]) if text.startswith("-") else parse_seconds(text)
