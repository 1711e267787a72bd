"""The papers' experiments: what each claims, and one runner that tries it, in virtual time with real gradients."""

from __future__ import annotations

import difflib

from offbeat.experiments.bench import Bench
from offbeat.experiments.catalogue import EXPERIMENTS
from offbeat.experiments.experiment import Case, Claim, Experiment, Size
from offbeat.experiments.figures import Figures
from offbeat.experiments.judging import Verdict, judge
from offbeat.experiments.trying import Found, carry_out

__all__ = [
    "EXPERIMENTS",
    "Bench",
    "Case",
    "Claim",
    "Experiment",
    "Figures",
    "Found",
    "Size",
    "Verdict",
    "carry_out",
    "experiment",
    "judge",
]


def experiment(name: str) -> Experiment:
    """The experiment of this name; a ValueError lists the names that there are."""
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no experiment is called {name!r}; {hint}there are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
