"""A strategy's memory as plain data, for checkpoints that ``torch.load(weights_only=True)`` accepts."""

from __future__ import annotations

from typing import Any

from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy
from offbeat.tensors.vector import Vec


def saved(strategy: Strategy, me: Replica, exchanges: int, rounds: int) -> dict[str, Any]:
    """Everything a strategy needs to go on from here: also how many exchanges and partial rounds there have been."""
    return {
        "strategy": str(strategy),
        "step": me.t,
        "exchanges": exchanges,
        "rounds": rounds,
        "rank": me.rank,
        "size": me.size,
        "memory": {name: _plain(value) for name, value in vars(me.memory).items()},
    }


def restore(own: dict[str, Any], strategy: Strategy, me: Replica) -> tuple[int, int]:
    """Put a saved memory back; refuse one of another strategy. Answers the numbers of the next exchange and round."""
    if own["strategy"] != str(strategy):
        raise ValueError(
            f"the state belongs to {own['strategy']}, but {strategy} is attached; attach the same strategy"
        )
    me.t = int(own["step"])
    vars(me.memory).clear()
    for name, value in own["memory"].items():
        setattr(me.memory, name, _live(value, me))
    return int(own["exchanges"]), int(own.get("rounds", 0))  # older states did not know their rounds


def _plain(value: Any) -> Any:
    if isinstance(value, Vec):
        return {"vec": [p.detach().clone() for p in value.parts], "used": None if value.used is None else [*value.used]}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"a strategy remembers {value!r}, which cannot be saved; use numbers, None, vectors, lists of these"
    )


def _live(value: Any, me: Replica) -> Any:
    if isinstance(value, dict):
        device = me.x.parts[0].device if me.x.parts else "cpu"
        used = value.get("used")
        return Vec([p.to(device) for p in value["vec"]], used=None if used is None else tuple(used))
    return [_live(v, me) for v in value] if isinstance(value, list) else value
