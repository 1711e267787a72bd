"""Workloads that come with Offbeat: small, embedded, the same on every machine."""

import difflib
from collections.abc import Callable

from offbeat.tasks.digits import digits
from offbeat.tasks.regression import optimum, regression
from offbeat.tasks.task import Task

__all__ = ["TASKS", "digits", "named", "optimum", "regression"]

TASKS: dict[str, Callable[..., Task]] = {"digits": digits, "regression": regression}


def named(name: str) -> Task:
    """The task of this name, with its default settings."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no task is called {name!r}; {hint}use one of: {', '.join(TASKS)}")
    return TASKS[name]()
