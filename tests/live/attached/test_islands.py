"""A sharded model: two islands of two ranks are two workers, whatever the method and whoever is late."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import offbeat as ob
from tests.support import islands
from tests.support.long import LONG, unless_long
from tests.support.scenarios import Call, Turns, in_turn, over
from tests.support.timed import BY_SPEED, IN_NODES, TIMED

pytestmark = pytest.mark.live

BATCHES = (10, 7)  # of each island
# On one host; a host for each rank; one island on one host, and the other on two.
WHERE = unless_long(("shm", "each"), ("shm", "each", "split"))
EVERY = {
    **{name: s for name, s in TIMED.items() if not s.facts.cuts_batches and name not in IN_NODES},
    "diloco, whole": ob.diloco(4),
    "local_sgd, with moments": ob.local_sgd(2, moments=1),
}
# An island does not know how its method is set: at every change each method is run with two settings.
FIRST = {s.name: name for name, s in reversed(EVERY.items())}
LAST = {s.name: name for name, s in EVERY.items()}
METHODS = {name: s for name, s in EVERY.items() if LONG or name in (FIRST[s.name], LAST[s.name])}
# Their chunks, stretches and fragments are those of a shard: as good as those of a whole model, but others.
CUT = {
    name
    for name, s in METHODS.items()
    if isinstance(s.settings.get("codec"), ob.codec.Codec) or s.settings.get("fragments", 1) != 1
}
CODED_BETWEEN_HOSTS = {name for name, s in METHODS.items() if s.settings.get("codec") == "auto"}
CUT = (CUT | {"qsgd"}) - {name for name in METHODS if METHODS[name].name == "decoupled"}  # whose are whole tensors


def train(rank: int, name: str, folder: str) -> Tensor:
    """A run with uneven data and late steps and, where that can be, averages in the middle."""
    work, island = islands.task(), rank // islands.OF
    model = islands.sharded(work.build(0))
    inner = work.optimizer(list(model.parameters()))
    optimizer = ob.attach(inner, model, METHODS[name], patience_s=120, record=Path(folder, name))
    assert (optimizer.rank, optimizer.size) == (island, 2)
    for step in range(BATCHES[island]):
        if step in (2, 5) and name not in BY_SPEED:
            optimizer.average()
        if (rank * 7 + step * 5) % 4 == 0:  # not the two of an island alike
            time.sleep(0.004)
        optimizer.zero_grad()
        work.value(model, work.take(rank, step)).backward()
        optimizer.step()
    optimizer.finish()
    assert [one.name for one in threading.enumerate() if one.name.startswith("offbeat")] == []
    return islands.weights(model)


Ran = tuple[Path, Turns[str]]


@pytest.fixture(scope="module", params=WHERE)
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    with tempfile.TemporaryDirectory() as folder:
        calls = {name: Call(over, (request.param, train, name, folder)) for name in METHODS}
        yield Path(folder), in_turn(calls, 4)


@pytest.mark.parametrize("name", METHODS)
def test_all_islands_end_with_one_model(ran: Ran, name: str) -> None:
    everyone = ran[1][name]
    assert all(torch.equal(one, everyone[0]) for one in everyone)


@pytest.mark.parametrize("name", sorted(set(METHODS) - CUT))
def test_two_islands_end_as_two_workers_with_whole_models_to_whom_the_same_happened(
    ran: Ran, name: str, request: pytest.FixtureRequest
) -> None:
    folder, turns = ran
    replayed = ob.replay(folder / name, islands.joined())
    is_coded = name in CODED_BETWEEN_HOSTS and request.node.callspec.params["ran"] == "each"
    assert (replayed.final - turns[name][0]).abs().max() < (0.01 if is_coded else 1e-9)


def test_every_method_that_takes_whole_batches_is_in_the_table() -> None:
    assert {s.name for s in METHODS.values()} == set(ob.STRATEGIES) - {"nonblocking"}
    assert {METHODS[name].name for name in set(METHODS) - CUT} >= set(ob.STRATEGIES) - {
        "nonblocking",
        "qsgd",
        "sparseloco",
    }
