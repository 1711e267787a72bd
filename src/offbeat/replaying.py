"""``ob.replay``: a recorded run once more, in its own order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.delays import Seconds
from offbeat.method.strategy import Method
from offbeat.rounds import waiting
from offbeat.runs import order as orders
from offbeat.runs.result import Run
from offbeat.sim.network import Network
from offbeat.sim.simulation import replay as follow
from offbeat.strategies import METHODS, as_method
from offbeat.tasks.task import Task
from offbeat.tensors import codec


def replay(
    record: str | Path,
    task: Task,
    method: Method | str | None = None,
    *,
    compute_s: Seconds = 0.1,
    network: Network | None = None,
    spans: bool = False,
    rounds: bool = True,
    strategy: Method | str | None = None,
) -> Run:
    """Run once more what ``offbeat train --save DIR`` or ``ob.attach(…, record=DIR)`` has recorded, in its own order.

    Everything that was a matter of time follows the record: who was in which round, who was late, what each worker took
    when. So the replay ends with the weights of that run: bit for bit where sums have one order, else to rounding.

    Args:
        record: The folder of the record.
        task: The task that was trained.
        method: The method, only where the record cannot name all its settings, such as a codec of one's own.
        compute_s: A step's computation. The clock is virtual: this decides how long things take, and nothing else.
        network: The links between workers, which decide no more than that either.
        spans: Whether ``run.trace`` keeps each worker's timeline.
        rounds: Whether ``run.trace`` keeps the rounds.
        strategy: Another name of ``method``.
    """
    if not isinstance(task, Task):
        raise TypeError(f"{task!r} is not a task; use the one that was trained")
    order = orders.read(Path(record))
    about = order.about
    if about.cannot:
        raise ValueError(f"this run cannot be replayed: {about.cannot}")
    made = method_of(about) if method is None and strategy is None else as_method(method, strategy)
    if str(made) != about.method:
        raise ValueError(f"the record is of {about.method}, not of {made}; replay it with that method")
    if orders.digest(p for p in task.build(about.seed).parameters() if p.requires_grad) != about.model:
        raise ValueError(
            f"the record is of another task: with seed {about.seed}, the model of {task.name!r} begins with other "
            "weights; give the task that was trained"
        )
    return follow(order, made, task, compute_s, network, spans, rounds)


def apart(run: Run, record: str | Path) -> float:
    """The largest difference between the final weights of ``run`` and those of a record, where it keeps them."""
    kept, ours = orders.read(Path(record)).final, orders.sampled(run.final)
    return max((abs(a - b) for a, b in zip(kept, ours, strict=True)), default=0.0)


def method_of(about: orders.About) -> Method:
    """The method of a record, made anew from its settings."""
    name, settings = about.written["name"], about.written["settings"]
    if name not in METHODS:
        raise ValueError(f"the record is of {name!r}, which is no method of this Offbeat; give ob.replay(…, method=…)")
    try:
        return METHODS[name].make(**{key: _setting(value) for key, value in settings.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the settings of {about.method} cannot be read back ({error}); give ob.replay(…, method=…)"
        ) from None


def _setting(value: Any) -> Any:
    if isinstance(value, Mapping):
        name = str(value["name"])
        if name == "inf":
            return float(name)
        return waiting.rule(name) if name in ("first", "majority") else codec.parse(name)
    return tuple(_setting(one) for one in value) if isinstance(value, list) else value
