"""A run that goes on from a checkpoint goes on with its rounds: groups, full rounds, codecs' draws fall as before."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat as ob
from tests.support.counted import AT_MOST, Slots, now_and_then, once_each
from tests.support.forge import hear, say
from tests.support.long import LONG, every_or_in_turns
from tests.support.nets import PATIENCE_S, distance, flat, loss, net, sgd
from tests.support.scenarios import Call, Told, Turns, in_turn, scenario

pytestmark = pytest.mark.live

T = TypeVar("T")
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
    ob.decoupled(1, 3, "everyone"),
    ob.decoupled(3, 1, "everyone", "direct"),
    ob.self_clocked(1, None, "everyone", late=0),
)
IN_NODES = (
    ob.eager("everyone", sync_every=4, per_node=2),
    ob.eager("everyone", per_node=2, codec=CODED),
    ob.wagma(1, 3, "everyone", per_node=2),
    ob.wagma(2, None, "everyone", per_node=2, codec=CODED),
    ob.wagma(1, 3, "everyone", merge="correct", per_node=2),
    ob.wagma(1, 3, "everyone", catch_up="every_step", per_node=2),
)
CODING = tuple(ob.self_clocked(1, None, "everyone", late=0, codec=codec) for codec in ("auto", CODED))
ON_HOSTS = ", each on a host of its own"  # where all that is sent is coded
CASES: dict[int, dict[str, ob.Strategy]] = {
    size: {str(s): s for s in in_nodes} | {f"{s}{ON_HOSTS}": s for s in (*CODING, *in_nodes)}
    for size, in_nodes in zip(SIZES, ((), IN_NODES), strict=True)
}
for method, size in every_or_in_turns(ALONE, SIZES):
    CASES[size][str(method)] = method
UNLIKE = ob.wagma(2, None, "everyone")


def _read_back(model: torch.nn.Module, optimizer: ob.Attached) -> Any:
    """What is saved of them."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _run(
    rank: int, strategy: ob.Strategy, begin: int, end: int, saved: Any = None, saves: Sequence[int] = ()
) -> tuple[Tensor, dict[int, Any]]:
    """The weights at the end of these steps, and what was saved after some of them."""
    model, kept = net(seed=0 if saved is None else 99), {}
    with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for t in range(begin, end):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
            if t + 1 in saves:
                kept[t + 1] = _read_back(model, optimizer)
    return flat(model), kept


def resumed(rank: int, strategy: ob.Strategy, stops: Sequence[int]) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """What a run ends with that is left alone, one that is saved now and then, and those that go on from there."""
    whole, _ = _run(rank, strategy, 0, STEPS)
    again, saved = _run(rank, strategy, 0, STEPS, saves=stops)
    return whole, again, {stop: _run(rank, strategy, stop, STEPS, saved[stop])[0] for stop in stops}


def on_its_own(rank: int, function: Callable[..., T], *args: Any) -> T:
    """As if every rank had a host of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFBEAT_HOST", f"host {rank}")
        return function(rank, *args)


def called(name: str, *args: Any) -> Call:
    return Call(on_its_own, args) if ON_HOSTS in name else Call(args[0], args[1:])


def stops(size: int, number: int) -> Sequence[int]:
    """Each case is stopped at all of them in the longer run; else they take turns."""
    return STOPS if LONG else (STOPS[(number + size) % len(STOPS)],)


@scenario(3)
def numbers_that_differ(rank: int) -> dict[str, Tensor]:
    """The same weights from states that know the rounds on some ranks only, or on none."""
    out = {"whole": _run(rank, UNLIKE, 0, STEPS)[0]}
    for name, behind in (("alike", ()), ("some are behind", (0, 2)), ("none is known", (0, 1, 2))):
        _, saved = _run(rank, UNLIKE, 0, 5, saves=[5])
        if rank in behind:
            saved[5][1]["offbeat"].pop("rounds", None)
        out[name] = _run(rank, UNLIKE, 5, STEPS, saved[5])[0]
    return out


@scenario(2)
def saved_at_once(rank: int) -> list[float]:
    """How far what is owed right after a step is from the step's gradient, on rank 0; rank 1 comes later."""
    model, far = net(seed=0), []
    strategy = ob.eager("everyone", late=1, sync="barrier", sync_every=None)
    with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
        for t in range(5):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            if rank == 1 and t:
                hear(f"saved {t}")
            optimizer.step()
            if rank == 0 and t:  # only then has everybody opened the channel
                owed = optimizer.state_dict()["offbeat"]["owed"]["vec"][0]
                made = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
                far.append(float((owed - made).abs().max()))
                say(f"saved {t}")
    return far


# Where workers are late, a state that is to lose nothing is saved after an average, and before anybody goes on.
ONCE = {
    "all together": ob.self_clocked(),
    "pairs": ob.self_clocked(1, 2),
    "pairs that draw": ob.self_clocked(1, 2, draw=2),
    "groups of three, a quorum of one": ob.self_clocked(1, 3, "first", pause=0.0),
    "not late": ob.self_clocked(1, 2, late=0),
}
AFTER, END = 6, 13


@dataclass
class Counted:
    """The counting model at the end of a run, what coding lost of it on this rank, and the rounds there were."""

    final: Tensor
    lost: Tensor
    rounds: int
    coded: bool


def counted_twice(rank: int, size: int, strategy: ob.Strategy) -> tuple[Counted, Counted]:
    """A run that is saved on its way, and one that goes on from there; everybody is late now and then."""
    late, saved, out = random.Random(f"{strategy} {rank}"), None, []
    for begin in (0, AFTER):
        model = Slots(size * AT_MOST)
        optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, strategy, patience_s=PATIENCE_S)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for step in range(begin, END):
            time.sleep(now_and_then(late, step))
            optimizer.zero_grad()
            model.loss(rank, step).backward()
            optimizer.step()
            if step + 1 == AFTER:
                optimizer.average()
                saved = _read_back(model, optimizer)
                dist.barrier()
        optimizer.finish()
        kept = optimizer.state_dict()["offbeat"]["memory"]["lost"]
        w = model.w.detach().clone()
        lost = torch.zeros_like(w) if kept is None else kept["vec"][0]
        out.append(Counted(w, lost, len(optimizer.trace.rounds), kept is not None))
    return out[0], out[1]


Ran = dict[int, Turns[str]]


@pytest.fixture(scope="module")
def ran() -> Ran:
    return {
        n: in_turn(
            {k: called(k, resumed, s, stops(n, number)) for number, (k, s) in enumerate(CASES[n].items())},
            n,
            init=False,
        )
        for n in SIZES
    }


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in SIZES for name in CASES[size]])
def test_a_run_that_goes_on_ends_with_the_bits_of_one_that_was_never_stopped(ran: Ran, size: int, name: str) -> None:
    for whole, _, stopped in ran[size][name]:
        for stop, parts in stopped.items():
            assert torch.equal(whole, parts), f"stopped after {stop} steps: {distance(whole, parts)}"


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in SIZES for name in CASES[size]])
def test_a_run_that_is_saved_goes_on_as_if_nobody_had_looked(ran: Ran, size: int, name: str) -> None:
    assert all(torch.equal(whole, saved) for whole, saved, _ in ran[size][name])


@scenario(3)
def in_the_middle_of_a_period(rank: int) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    return resumed(rank, ob.self_clocked(3, None, "everyone", late=0), STOPS)


def test_a_run_that_goes_on_in_the_middle_of_a_period_hands_in_when_it_would_have(told: Told) -> None:
    """Up to rounding: what was learned before comes with its worker's weights, not as a part of what is handed in."""
    for whole, _, stopped in told(in_the_middle_of_a_period):
        for stop, parts in stopped.items():
            assert distance(whole, parts) < 1e-6, f"stopped after {stop} steps"


@pytest.fixture(scope="module")
def went_on() -> Ran:
    cases = {f"{name}{where}": s for name, s in ONCE.items() for where in ("", ON_HOSTS)}
    return {n: in_turn({k: called(k, counted_twice, n, s) for k, s in cases.items()}, n, init=False) for n in SIZES}


@pytest.mark.parametrize("where", ["", ON_HOSTS], ids=["one host", "hosts"])
@pytest.mark.parametrize(("size", "name"), [(size, name) for size in SIZES for name in ONCE])
def test_a_run_that_goes_on_from_an_average_applies_every_sample_exactly_once(
    went_on: Ran, size: int, name: str, where: str
) -> None:
    """What coding has lost since, and nobody has sent yet, counted in."""
    for runs in zip(*went_on[size][f"{name}{where}"], strict=True):
        assert all(torch.equal(one.final, runs[0].final) for one in runs)
        assert any(one.rounds for one in runs)
        assert all(one.coded == bool(where) for one in runs)
        applied = size * runs[0].final + torch.stack([one.lost for one in runs]).sum(0)
        assert torch.allclose(applied, once_each((END,) * size), rtol=0, atol=1e-9)


def test_ranks_that_know_different_numbers_of_rounds_go_on_from_the_largest(told: Told) -> None:
    for out in told(numbers_that_differ):
        assert torch.equal(out["alike"], out["whole"])
        assert torch.equal(out["some are behind"], out["whole"])


def test_a_state_that_knows_no_rounds_is_still_loaded(told: Told) -> None:
    outs = told(numbers_that_differ)
    assert all(torch.equal(out["none is known"], outs[0]["none is known"]) for out in outs)
    assert not torch.equal(outs[0]["none is known"], outs[0]["whole"])


def test_a_state_that_is_saved_right_after_a_step_owes_what_that_step_handed_in(told: Told) -> None:
    assert told(saved_at_once)[0] == [0.0] * 4
