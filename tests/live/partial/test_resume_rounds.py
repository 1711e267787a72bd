"""A run that goes on from a checkpoint goes on with its rounds: groups, full rounds, codecs' draws fall as before."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.live.attached.attach_jobs import PATIENCE_S, distance, flat, loss, net, sgd
from tests.support import forge
from tests.support.forge import Job

pytestmark = pytest.mark.live

STEPS, STOPS, SIZES = 11, (3, 5, 7), (3, 4)
CODED = ob.codec.qsgd(8)

# Nobody is late in any of these: every round waits for all, so that the result does not depend on timing.
ALONE = (
    ob.eager("everyone"),
    ob.eager("everyone", sync_every=4),
    ob.eager("everyone", sync_every=4, catch_up="every_step"),
    ob.eager("everyone", codec=CODED),
    ob.eager("everyone", sync_every=None, catch_up="every_step", codec=CODED),
    ob.eager("everyone", sync="bounded", staleness=2),
    ob.eager("everyone", stale="fade"),
    ob.eager("first", sync_every=1),
    *(
        ob.wagma(2, tau, "everyone", merge=merge, catch_up=catch_up, codec=codec)
        for tau in (None, 4)
        for merge in ("paper", "correct")
        for catch_up in ("current", "every_step")
        for codec in (None, CODED)
    ),
    ob.wagma(2, None, "everyone", sync="bounded", staleness=2),
    ob.wagma(1, 4, "everyone"),
)
IN_NODES = (
    ob.eager("everyone", sync_every=4, per_node=2),
    ob.eager("everyone", per_node=2, codec=CODED),
    ob.wagma(1, 3, "everyone", per_node=2),
    ob.wagma(2, None, "everyone", per_node=2, codec=CODED),
    ob.wagma(1, 3, "everyone", merge="correct", per_node=2),
    ob.wagma(1, 3, "everyone", catch_up="every_step", per_node=2),
)
CASES = {size: {str(s): s for s in (*ALONE, *(IN_NODES if size % 2 == 0 else ()))} for size in SIZES}
UNLIKE = ob.wagma(2, None, "everyone")


def _run(rank: int, strategy: ob.Strategy, begin: int, end: int, saved: Any = None) -> tuple[torch.Tensor, Any]:
    """The weights at the end of these steps, and the state before ``finish``."""
    model = net(seed=0 if saved is None else 99)
    with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for t in range(begin, end):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    return flat(model), torch.load(file, weights_only=True)


def resumed(rank: int, size: int) -> dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]]:
    """Every case: what a run without a break ends with, and one that was stopped."""
    ob.init()
    keep = ob.attach(sgd(other := net()), other, ob.allreduce())
    out = {}
    for name, strategy in CASES[size].items():
        whole, _ = _run(rank, strategy, 0, STEPS)
        for stop in STOPS:
            _, saved = _run(rank, strategy, 0, stop)
            out[name, stop] = whole, _run(rank, strategy, stop, STEPS, saved)[0]
    keep.finish()
    return out


def numbers_that_differ(rank: int) -> dict[str, torch.Tensor]:
    """The same weights from states that know the rounds on some ranks only, or on none."""
    ob.init()
    keep = ob.attach(sgd(other := net()), other, ob.allreduce())
    out = {"whole": _run(rank, UNLIKE, 0, STEPS)[0]}
    for name, behind in (("alike", ()), ("some are behind", (0, 2)), ("none is known", (0, 1, 2))):
        _, saved = _run(rank, UNLIKE, 0, 5)
        if rank in behind:
            saved[1]["offbeat"].pop("rounds", None)
        out[name] = _run(rank, UNLIKE, 5, STEPS, saved)[0]
    keep.finish()
    return out


PLAN: dict[Any, Job] = {
    **{size: Job(__name__, "resumed", size, (size,)) for size in SIZES},
    "unlike": Job(__name__, "numbers_that_differ", 3),
}


@pytest.fixture(scope="module")
def told() -> dict[Any, list[forge.Outcome]]:
    return dict(zip(PLAN, forge.run(list(PLAN.values())), strict=True))


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in SIZES for name in CASES[size]])
def test_a_run_that_goes_on_ends_with_the_bits_of_one_that_was_never_stopped(told: Any, size: int, name: str) -> None:
    for out in forge.values(told[size]):
        for stop in STOPS:
            whole, parts = out[name, stop]
            assert torch.equal(whole, parts), f"stopped after {stop} steps: {distance(whole, parts)}"


def test_ranks_that_know_different_numbers_of_rounds_go_on_from_the_largest(told: Any) -> None:
    for out in forge.values(told["unlike"]):
        assert torch.equal(out["alike"], out["whole"])
        assert torch.equal(out["some are behind"], out["whole"])


def test_a_state_that_knows_no_rounds_is_still_loaded(told: Any) -> None:
    outs = forge.values(told["unlike"])
    assert all(torch.equal(out["none is known"], outs[0]["none is known"]) for out in outs)
    assert not torch.equal(outs[0]["none is known"], outs[0]["whole"])
