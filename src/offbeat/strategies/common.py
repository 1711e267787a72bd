"""Settings that every method with partial rounds shares."""

from __future__ import annotations

from typing import Literal

from offbeat import topology
from offbeat.method.effects import Grad, GradMix
from offbeat.method.replica import Replica
from offbeat.method.strategy import one_of, whole
from offbeat.rounds.rules import Absent, CatchUp, Rules
from offbeat.rounds.waiting import Wait

Sync = Literal["barrier", "bounded"]


def own_gradient(me: Replica, per_node: int) -> Grad | GradMix:
    """My gradient; where workers make up nodes, the mean of my node's."""
    return Grad() if per_node == 1 else GradMix(topology.nodes(me.size, per_node)(0))


def rules(
    method: str,
    wait: Wait,
    absent: Absent,
    every: int | None,
    every_name: str,
    catch_up: CatchUp,
    sync: Sync,
    staleness: int | None,
    late: int,
    fade: bool = False,
) -> Rules:
    """Check the settings and put them together."""
    if every is not None:
        whole(method, every_name, every, 1)
    one_of(method, "catch_up", catch_up, ("current", "every_step"))
    one_of(method, "sync", sync, ("barrier", "bounded"))
    if late not in (0, 1):
        raise ValueError(f"{method}: late is {late!r}, but a result can be 0 or 1 rounds late")
    if sync == "barrier":
        if staleness is not None:
            raise ValueError(f"{method}: staleness={staleness} bounds nothing with sync='barrier'; use sync='bounded'")
        return Rules(wait, absent, every, None, catch_up, late, fade)
    bound = staleness if staleness is not None else every
    if bound is None:
        raise ValueError(f"{method}: sync='bounded' needs a bound; give staleness=K")
    whole(method, "staleness", bound, 1 + late)
    return Rules(wait, absent, None, bound, catch_up, late, fade)
