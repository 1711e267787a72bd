"""Scenarios that a group of processes runs one after the other, and the claims that hear what came of each.

One that raises is told of by itself: the group ends, and the scenarios behind it run in a fresh one.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import pytest

from tests.support import forge
from tests.support.forge import Job, Outcome
from tests.support.long import unless_long

K = TypeVar("K")
T = TypeVar("T")
FOLLOWS_S = 5.0  # what the others have to say of it when one has raised, they say within this time


@dataclass(frozen=True)
class Call:
    """``function(rank, *args)``, on every rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Raised:
    """What became of a scenario that did not return on all ranks."""

    words: str


@dataclass
class Turns(Generic[K]):
    """What the scenarios of one group have returned, rank by rank; asked for one that raised, its error."""

    told: dict[K, list[Any] | Raised] = field(default_factory=dict)

    def __getitem__(self, key: K) -> list[Any]:
        out = self.told[key]
        assert not isinstance(out, Raised), f"scenario {key}: {out.words}"
        return out

    def keys(self) -> Iterable[K]:
        return self.told.keys()


EVERY_CARRIER = ("shm", "each", "hosts")
# A column of the tables of laws, countings and failures. Of hosts, those with several ranks show the most.
CARRIERS = unless_long(("shm", "hosts"), EVERY_CARRIER)


def over(rank: int, carrier: str, function: Callable[..., T], *args: Any) -> T:
    """Call ``function`` where vectors go this way; ``"hosts"``: as if every two ranks had a host of their own, and
    ``"each"`` as if each had; ``"split"``: as if the first three had one, and the others another; ``"long"``: through
    the host process, as if vectors were long; ``"peers"``: as if each rank had a GPU that reads the others' memory, and
    ``"apart"``: one that does not."""
    hosts = {"hosts": rank // 2, "each": rank, "split": int(rank >= 3)}
    with pytest.MonkeyPatch.context() as patch:
        if carrier in hosts:
            patch.setenv("OFFBEAT_HOST", f"host {hosts[carrier]}")
        elif carrier == "long":
            patch.setattr("offbeat.live.worker.channel_client.LONG_BYTES", 0)
            patch.setattr("offbeat.live.worker.weights_client.LONG_BYTES", 0)
        elif carrier in ("peers", "apart"):
            patch.setenv("OFFBEAT_GPUS", "each" if carrier == "apart" else carrier)
        else:
            patch.setenv("OFFBEAT_CARRIER", carrier)
        return function(rank, *args)


def in_turn(calls: Mapping[K, Call], size: int, timeout_s: float = 180.0, init: bool = True) -> Turns[K]:
    """Run them one after the other in one group of ``size`` processes, or as few groups as can be.

    The script makes the default process group, or with ``init=False`` Offbeat, and it lasts for all of them. One that
    does not return within ``timeout_s`` hangs.
    """
    left, turns = dict(calls), Turns[K]()
    while left:
        job = Job(_in_turn, size, (list(left.values()), init), timeout_s=timeout_s, outlives_s=FOLLOWS_S)
        (outcomes,) = forge.run([job])
        whole = min(len(outcome.noted) for outcome in outcomes)
        for number, key in enumerate(list(left)[: whole + 1]):
            turns.told[key] = [o.noted[number] for o in outcomes] if number < whole else _end_of(number, outcomes)
            del left[key]
        if not left and any(outcome.exit_code for outcome in outcomes):  # after the last one
            turns.told[key] = _end_of(whole, outcomes)
    return turns


def _end_of(number: int, outcomes: list[Outcome]) -> Raised:
    """How the scenario ended that some ranks have returned from and others have not; who ended first speaks first."""
    out = []
    for rank, outcome in sorted(enumerate(outcomes), key=lambda one: one[1].ended_s):
        if len(outcome.noted) > number:
            out.append(f"rank {rank} returned.")
        else:
            out.append(f"rank {rank}, {'hung' if outcome.hung else 'ended'} ({outcome.exit_code}):\n{outcome.stderr}")
    return Raised("\n".join(out)[-6000:])


def _in_turn(rank: int, calls: list[Call], init: bool) -> None:
    import torch
    import torch.distributed as dist

    import offbeat as ob

    if init:
        dist.init_process_group("gloo")
    model = torch.nn.Linear(1, 1)
    keep = None if init else ob.attach(torch.optim.SGD(model.parameters()), model, ob.local_sgd())
    for call in calls:
        try:
            value = call.function(rank, *call.args)
        except Exception:
            traceback.print_exc()
            os._exit(1)  # at once: to end in order, it would have to meet the others, who are elsewhere
        forge.note(value)
    if keep is None:
        dist.destroy_process_group()
    else:
        keep.finish()


# Scenarios beside their claims: functions of a test module.


def scenario(size: int) -> Callable[[Callable[[int], T]], Callable[[int], T]]:
    """Marks a function of a test module that is to run on every rank of a group of this size."""

    def mark(function: Callable[[int], T]) -> Callable[[int], T]:
        function.group_size = size  # type: ignore[attr-defined]
        return function

    return mark


class Told(Protocol):
    """The fixture: what a scenario of this module returned on each rank."""

    def __call__(self, scenario: Callable[[int], T]) -> list[T]: ...


def told_of(module: ModuleType) -> Told:
    """All scenarios of one size run when the first of them is asked for."""
    by_size: dict[int, Turns[str]] = {}
    marked = [one for one in vars(module).values() if hasattr(one, "group_size") and one.__module__ == module.__name__]

    def told(scenario: Callable[[int], T]) -> list[T]:
        size: int = scenario.group_size  # type: ignore[attr-defined]
        if size not in by_size:
            by_size[size] = in_turn({f.__name__: Call(f) for f in marked if f.group_size == size}, size)
        return by_size[size][scenario.__name__]

    return told
