"""A worker has no thread of ours: its process is the user's, whatever the method."""

from __future__ import annotations

import threading
import warnings

import pytest
from torch.nn import functional as F

import offbeat as ob
from tests.support.moments import at
from tests.support.nets import PATIENCE_S, batch, loss, net, sgd
from tests.support.scenarios import Call, Turns, in_turn, over

pytestmark = pytest.mark.live

SIZE, STEPS = 2, 4
METHODS = {name: ob.strategy(name) for name in ob.STRATEGIES}
METHODS |= {
    "eager, late": ob.eager(late=1),
    "eager, nodes": ob.eager(per_node=2),
    "wagma, late": ob.wagma(late=1),
    "wagma, correct": ob.wagma(merge="correct"),
    "wagma, moments": ob.wagma(moments=1),
    "ad_psgd, moments": ob.ad_psgd(moments=1),
}
LONG = ("eager", "eager, late", "wagma, correct", "wagma, moments", "ad_psgd")


def threads(rank: int, name: str) -> set[str]:
    """The names of all that there are between two steps, and when a step has just been submitted."""
    model, found = net(), set[str]()

    def look() -> None:
        found.update(thread.name for thread in threading.enumerate())

    attach = ob.attach(sgd(model), model, METHODS[name], patience_s=PATIENCE_S)
    with warnings.catch_warnings(), attach as optimizer, at("submitted", look):
        warnings.filterwarnings("ignore", "[0-9]+ samples of this worker were never used")
        for t in range(STEPS):
            optimizer.zero_grad()
            if name == "nonblocking":
                for x, y in optimizer.micro_batches(batch(rank, t)):
                    F.mse_loss(model(x), y).backward()
            else:
                loss(model, rank, t).backward()
            look()
            optimizer.step()
            look()
    return found


CASES = [*((name, "shm") for name in METHODS), *((name, "long") for name in LONG)]


@pytest.fixture(scope="module")
def ran() -> Turns[tuple[str, str]]:
    return in_turn({(name, way): Call(over, (way, threads, name)) for name, way in CASES}, SIZE)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_in_the_middle_of_a_run_a_worker_has_no_thread_of_ours(
    ran: Turns[tuple[str, str]], name: str, way: str
) -> None:
    for found in ran[name, way]:
        assert "MainThread" in found
        assert not {one for one in found if one.startswith("offbeat-")}
