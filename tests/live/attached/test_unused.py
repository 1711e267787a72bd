"""Parameters that a step does not use: what nobody used is left alone, momentum and weight decay included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, hear, say
from tests.support.scenarios import Call, Turns, in_turn, over

pytestmark = pytest.mark.live

STEPS, PATIENCE_S, NEVER_S = 6, 120.0, 600.0
CODED = ob.codec.qsgd(8)
IN_STEP = (  # nobody is late, and the mean is that of all gradients
    ob.allreduce(),
    ob.eager("everyone"),
    ob.eager("everyone", catch_up="every_step"),
    ob.nonblocking(4, stop=NEVER_S),
    ob.nonblocking(4, over="server", stop=NEVER_S),
    ob.nonblocking(4, weighting="workers", stop=NEVER_S),
)
OTHERS = (
    ob.qsgd(),
    ob.eager(),
    ob.eager(late=1),
    ob.eager(stale="drop"),
    ob.eager(stale="fade"),
    ob.ringmaster(None),
    ob.eager(codec=CODED),
    ob.nonblocking(4, codec=CODED, stop=NEVER_S),
    ob.nonblocking(4, over="ring", stop=NEVER_S),
)
IN_NODES = (ob.eager("everyone", per_node=2), ob.eager(per_node=2, late=1), ob.eager(per_node=2, codec=CODED))
CASES = {
    **{size: {str(s): s for s in (*IN_STEP, *OTHERS)} for size in (1, 3)},
    4: {str(s): s for s in (ob.allreduce(), *IN_NODES)},
}
EXACT = {3: IN_STEP[1:], 4: IN_NODES[:1]}


class Net(nn.Module):
    """``all_use`` is used by every worker, ``some_use`` by one of them in its second step, ``nobody_uses`` never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all_use, self.some_use, self.nobody_uses = (nn.Linear(4, 4).double() for _ in range(3))

    def loss(self, x: Tensor, uses_some: bool) -> Tensor:
        y = self.all_use(x)
        return (self.some_use(y) if uses_some else y).square().mean()

    def copies(self) -> list[Tensor]:
        layers = (self.all_use, self.some_use, self.nobody_uses)
        return [torch.cat([p.detach().reshape(-1) for p in layer.parameters()]).clone() for layer in layers]


def made(strategy: ob.Strategy) -> tuple[Net, Any]:
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return model, ob.attach(inner, model, strategy, patience_s=PATIENCE_S)


def x(rank: int, t: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + t), dtype=torch.float64)


def trained(rank: int, strategy: ob.Strategy, size: int) -> list[list[Tensor]]:
    """Copies of the weights: at the beginning, after the first step, and at the end."""
    model, optimizer = made(strategy)
    seen = [model.copies()]
    with optimizer:
        for t in range(STEPS):
            uses_some = (rank, t) == (size - 1, 1)
            optimizer.zero_grad()
            if strategy.name == "nonblocking":
                for k, piece in enumerate(optimizer.micro_batches(x(rank, t))):
                    model.loss(piece, uses_some and k == 0).backward()
            else:
                pieces = x(rank, t).split(2)  # as many as nonblocking has
                torch.stack([model.loss(p, uses_some and k == 0) for k, p in enumerate(pieces)]).mean().backward()
            optimizer.step()
            if t == 0:
                seen.append(model.copies())
    return [*seen, model.copies()]


def late(rank: int, codec: bool) -> list[list[Tensor]]:
    """Rank 1 uses a layer in a step that comes too late; what it owes then goes with a step that does not use it."""
    model, optimizer = made(ob.eager(sync_every=None, codec=CODED if codec else None))
    seen = [model.copies()]

    def step(uses_some: bool, wait_for: str = "") -> None:
        optimizer.zero_grad()
        model.loss(x(rank, 0), uses_some).backward()
        if wait_for:
            hear(wait_for)
        optimizer.step()
        seen.append(model.copies())

    with optimizer:
        if rank == 0:
            for _ in range(3):
                step(False)
            say("three")
            hear("late")
            step(False)
        else:
            step(True, "three")
            step(False)
            say("late")
    return [*seen, model.copies()]


def owed(rank: int) -> list[list[Tensor]]:
    """As ``late``, but rank 1 is saved when it owes the gradient, and goes on from there, with another run."""
    model, optimizer = made(ob.eager(sync_every=None))
    seen = [model.copies()]
    with optimizer:
        if rank == 0:
            for _ in range(2):
                optimizer.zero_grad()
                model.loss(x(rank, 0), False).backward()
                optimizer.step()
            say("two")
        else:
            model.loss(x(rank, 0), True).backward()
            hear("two")
            optimizer.step()
        saved = [{k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()]
        seen.append(model.copies())
        say(f"saved {rank}")
        hear(f"saved {1 - rank}")
    model, optimizer = made(ob.eager(sync_every=None))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with optimizer:
        optimizer.zero_grad()
        model.loss(x(rank, 1), False).backward()
        optimizer.step()
    return [*seen, model.copies()]


Ran = dict[int, Turns[str]]
EVERY = [(size, name) for size, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def ran() -> Ran:
    return {n: in_turn({k: Call(trained, (s, n)) for k, s in CASES[n].items()}, n, init=False) for n in CASES}


@pytest.mark.parametrize(("size", "name"), EVERY)
def test_what_nobody_uses_does_not_move(ran: Ran, size: int, name: str) -> None:
    for begin, _, end in ran[size][name]:
        assert torch.equal(begin[2], end[2])
        assert not torch.equal(begin[0], end[0])


@pytest.mark.parametrize(("size", "name"), [case for case in EVERY if "'drop'" not in case[1]])
def test_what_some_use_moves_on_all(ran: Ran, size: int, name: str) -> None:
    outs = ran[size][name]
    for begin, _, end in outs:
        assert not torch.equal(begin[1], end[1])
        assert torch.equal(end[1], outs[0][2][1])


# By these, a worker's first step may bring steps of others in which they use it.
AHEAD = ("eager(wait='first'", "ringmaster")


@pytest.mark.parametrize(("size", "name"), [case for case in EVERY if case[0] == 1 or not case[1].startswith(AHEAD)])
def test_what_some_will_use_does_not_move_before(ran: Ran, size: int, name: str) -> None:
    for begin, first, _ in ran[size][name]:
        assert torch.equal(begin[1], first[1])


@pytest.mark.parametrize(("size", "name"), [(size, str(s)) for size, cases in EXACT.items() for s in cases])
def test_what_some_use_takes_the_average_with_zeros_from_the_others(ran: Ran, size: int, name: str) -> None:
    for (*_, ours), (*_, reference) in zip(ran[size][name], ran[size]["allreduce()"], strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("coded", [False, True], ids=["late", "late, coded"])
def test_a_gradient_that_is_carried_still_knows_what_it_used(coded: bool) -> None:
    (outcomes,) = forge.run([Job(over, 2, ("each", late, True)) if coded else Job(late, 2, (False,))])
    (begin, *before, _, last), (_, at_first, then, other) = forge.values(outcomes)
    assert all(torch.equal(seen[1], begin[1]) for seen in before)
    assert torch.equal(at_first[1], begin[1])  # it came too late: the rounds before it did not use the layer
    assert not torch.equal(then[1], begin[1])
    assert torch.equal(last[1], other[1])
    assert torch.equal(last[2], begin[2])


def test_a_gradient_that_is_saved_still_knows_what_it_used() -> None:
    (outcomes,) = forge.run([Job(owed, 2)])
    for begin, stopped, end in forge.values(outcomes):
        assert torch.equal(stopped[1], begin[1])
        assert not torch.equal(end[1], begin[1])
        assert torch.equal(end[2], begin[2])
