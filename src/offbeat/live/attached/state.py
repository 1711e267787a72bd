"""A run as plain data, for checkpoints that ``torch.load(weights_only=True)`` accepts; and its model.

Three things are kept apart: what the strategy remembers, what it has reported, and what the runtime has left over.
"""

from __future__ import annotations

import ast
import dataclasses
import io
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.live.attached.shards import is_sharded
from offbeat.method.facts import Reported
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy
from offbeat.tensors.vector import Vec


@dataclass(frozen=True)
class Left:
    """What the runtime needs to go on: how many exchanges and partial rounds there have been, the gradients that this
    worker owes its channel, and how many samples wait to be cut."""

    exchanges: int = 0
    rounds: int = 0
    owed: Vec | None = None
    waiting: int = 0


def saved(strategy: Strategy, me: Replica, left: Left) -> dict[str, Any]:
    """Everything that is needed to go on from here."""
    return {
        "strategy": str(strategy),
        "step": me.t,
        "exchanges": left.exchanges,
        "rounds": left.rounds,
        "owed": _plain(left.owed),
        "waiting": left.waiting,
        "rank": me.rank,
        "size": me.size,
        "memory": {name: _plain(value) for name, value in vars(me.memory).items()},
        "reported": {**dataclasses.asdict(me.reported), "samples_used": [*me.reported.samples_used], "talking": None},
    }


def restore(own: dict[str, Any], strategy: Strategy, me: Replica) -> Left:
    """Put back what the strategy had; refuse what another one had. Answers what was left over."""
    if missing := {"strategy", "step", "exchanges", "owed", "waiting", "memory", "reported"} - own.keys():
        raise ValueError(
            f"this state has no {', no '.join(sorted(missing))}: it was saved by another version of Offbeat; load the "
            "model alone, and begin anew from there"
        )
    if own["strategy"] != str(strategy):
        raise ValueError(
            f"{_difference(own['strategy'], str(strategy))}; attach the same to go on exactly, or take the optimizer's "
            'state alone: optimizer.load_state_dict({k: v for k, v in state.items() if k != "offbeat"})'
        )
    me.t = int(own["step"])
    vars(me.memory).clear()
    for name, value in own["memory"].items():
        setattr(me.memory, name, _live(value, me))
    told = {**own["reported"], "samples_used": tuple(own["reported"]["samples_used"])}
    # What a run counts of itself is not another's: older states held the talking of theirs.
    me.reported = Reported(**{**told, "talking": me.reported.talking})
    rounds = own.get("rounds", 0)  # older states did not know their rounds
    return Left(own["exchanges"], rounds, _live(own["owed"], me), own["waiting"])


def _difference(saved: str, attached: str) -> str:
    """What differs between two methods, each as its call."""
    theirs, ours = _call(saved), _call(attached)
    if theirs is None or ours is None or theirs[0] != ours[0]:
        name = saved.partition("(")[0]
        return f"the state was saved with {name}, but {attached.partition('(')[0]} is attached"
    keys = [key for key in {**theirs[1], **ours[1]} if theirs[1].get(key) != ours[1].get(key)]
    then, now = (
        ", ".join(f"{key}={settings[key]}" if key in settings else f"no {key}" for key in keys)
        for settings in (theirs[1], ours[1])
    )
    return f"the state was saved with {then}, but {ours[0]} is attached with {now}"


def _call(text: str) -> tuple[str, dict[str, str]] | None:
    """A method's name and settings, as they are written; None where they are written otherwise."""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    return call.func.id, {str(one.arg): ast.unparse(one.value) for one in call.keywords}


def of_shard(plain: dict[str, Any], shard: int) -> dict[str, Any]:
    """A state that ``torch.distributed.checkpoint`` keeps beside those of the other shards of an island.

    Under a name of its own, since of what has one name it keeps one rank's; and as bytes, since whoever loads it has
    vectors of other lengths, or none, where the run stood when it was saved.
    """
    packed = io.BytesIO()
    torch.save(plain, packed)
    return {f"shard-{shard}": packed.getvalue()}


def whole_of_shard(own: dict[str, Any], shard: int) -> dict[str, Any]:
    """The inverse."""
    if not isinstance(packed := own.get(f"shard-{shard}"), bytes):
        there = ", ".join(sorted(own)) or "nothing"
        raise ValueError(
            f"this rank holds shard {shard} of its island, and the state holds {there}; load the state that this rank "
            "has saved, from a run with islands of the same size"
        )
    return torch.load(io.BytesIO(packed), weights_only=True)  # type: ignore[no-any-return]


def full(model: nn.Module, keeps: bool) -> dict[str, Any]:
    """What ``model.state_dict()`` names, in copies, and what is sharded gathered; nothing on ranks that keep nothing.

    Where a tensor is sharded all ranks of the island come here, and what is gathered leaves the device at once: a model
    is sharded since it is too large for one.
    """
    state = model.state_dict(keep_vars=True)  # with them, tied weights are the same object
    in_host_memory = any(map(is_sharded, state.values()))
    copies = dict[int, Tensor | None]()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if id(value) not in copies:
            whole = value.full_tensor() if is_sharded(value) else value
            where = "cpu" if in_host_memory else value.device
            copies[id(value)] = whole.detach().to(where, copy=True) if keeps else None
        state[name] = copies[id(value)]
    return state if keeps else {}


def _plain(value: Any) -> Any:
    if isinstance(value, Vec):
        return {"vec": [p.detach().clone() for p in value.parts], "used": None if value.used is None else [*value.used]}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a method remembers {value!r}, which cannot be saved; use numbers, None, vectors, lists of these")


def _live(value: Any, me: Replica) -> Any:
    if isinstance(value, dict):
        device = me.x.parts[0].device if me.x.parts else "cpu"
        used = value.get("used")
        return Vec([p.to(device) for p in value["vec"]], used=None if used is None else tuple(used))
    return [_live(v, me) for v in value] if isinstance(value, list) else value
