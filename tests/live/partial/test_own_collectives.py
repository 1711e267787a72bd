"""The default group stays the script's, in the middle of training too: its collectives and our rounds never lock.

Rank 1 is slow, so the others are in the script's collective while it still has steps to take. A round that it needs
must then not wait for them. Where all of them are on their way, it does: what must be full stays full.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, hear, say
from tests.support.long import unless_long
from tests.support.nets import flat, loss, net, sgd, trained
from tests.support.scenarios import Call, Told, Turns, in_turn, scenario

pytestmark = pytest.mark.live

SIZE, STEPS, EVERY = 4, 9, 3
PATIENCE_S = 60.0  # bounds a hang
METHODS = {
    str(strategy): strategy
    for strategy in (
        ob.eager(),
        ob.eager(late=1),
        ob.eager(wait=0.5, sync="bounded", staleness=4),
        ob.eager(wait="everyone"),
        ob.eager(sync_every=2),
        ob.eager(wait="majority", catch_up="every_step"),
        ob.eager(sync_every=2, per_node=2),
        ob.wagma(tau=2),
        ob.wagma(wait=0.5),
        ob.wagma(tau=3, merge="correct"),
        ob.wagma(tau=2, late=1),
        ob.wagma(sync="bounded", staleness=3),
        ob.wagma(tau=2, moments=2),
        ob.ad_psgd(),
        ob.local_sgd(period=2),
    )
}
KINDS = (
    "all_reduce", "a wait for an asynchronous one", "barrier", "monitored_barrier", "all_gather_object",
    "a group of two", "messages around", "DDP of another model", "a checkpoint",
)  # fmt: skip
EVERYWHERE = unless_long(("all_reduce",), ("all_reduce", "DDP of another model"))
Meet = Callable[[int], None]


def _async_wait(rank: int) -> None:
    dist.all_reduce(torch.zeros(1), async_op=True).wait()


def _gathered(rank: int) -> None:
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, {"rank": rank})
    assert len(everyone) == SIZE


def _round_trip(rank: int) -> None:
    """Messages from one to the next, around."""
    token = torch.zeros(1)
    if rank:
        dist.recv(token, rank - 1)
    dist.send(token, (rank + 1) % SIZE)
    if not rank:
        dist.recv(token, SIZE - 1)


def meetings(folder: str) -> dict[str, Meet]:
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp, numbers = DistributedDataParallel(torch.nn.Linear(3, 1)), itertools.count()

    def of_two(rank: int) -> None:
        dist.all_reduce(torch.zeros(1), group=pair[rank // 2])

    def another_model(rank: int) -> None:
        ddp(torch.ones(2, 3)).sum().backward()

    def checkpoint(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # torch 2.6, of itself
            dcp.save(  # type: ignore[attr-defined]
                {"weight": torch.ones(4)}, checkpoint_id=Path(folder, str(next(numbers)))
            )

    return {
        "all_reduce": lambda rank: dist.all_reduce(torch.zeros(1)),
        "a wait for an asynchronous one": _async_wait,
        "barrier": lambda rank: dist.barrier(),
        "monitored_barrier": lambda rank: dist.monitored_barrier(),
        "all_gather_object": _gathered,
        "a group of two": of_two,
        "messages around": _round_trip,
        "DDP of another model": another_model,
        "a checkpoint": checkpoint,
    }


def table() -> list[tuple[str, str]]:
    """Every method beside the two kinds that are noticed in different ways, one of which in the longer run alone; a few
    beside the others."""
    few = [name for name in METHODS if METHODS[name].name in ("eager", "wagma")][1::3]
    return [(kind, name) for kind in KINDS for name in (METHODS if kind in EVERYWHERE else few)]


@functools.cache
def known(folder: str) -> dict[str, Meet]:
    """Made once in each group of processes, for all scenarios that it runs."""
    return meetings(folder)


def beside_own_collectives(rank: int, kind: str, name: str, folder: str) -> Tensor:
    model, meet = net(), known(folder)[kind]
    with ob.attach(sgd(model, momentum=0.0), model, METHODS[name], patience_s=PATIENCE_S) as optimizer:
        for t in range(STEPS):
            time.sleep(0.004 if rank == 1 else 0.0)
            optimizer.zero_grad()
            value = loss(model, rank, t)
            if t % EVERY == 1:  # in the middle of a step, as where a loss is logged in forward
                meet(rank)
            value.backward()
            optimizer.step()
            if t % EVERY == 2:
                meet(rank)
    return flat(model)


@scenario(SIZE)
def full_rounds(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Every round is full, so this is allreduce, whatever is logged in between and whoever is late."""
    want = trained(rank, ob.allreduce(), 30)
    out = []
    for strategy in (ob.eager(sync_every=1), ob.eager(wait="everyone"), ob.eager(sync_every=1, wait="majority")):
        model = net()
        with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
            for t in range(30):
                time.sleep(0.03 if rank == t % SIZE else 0.0)
                optimizer.zero_grad()
                loss(model, rank, t).backward()
                optimizer.step()
                dist.all_reduce(torch.zeros(1))
        out.append((flat(model), want))
    return out


PAIRS = [
    (ob.eager(), ob.wagma(tau=2)),
    (ob.eager(sync_every=2), ob.wagma(tau=3)),
    (ob.wagma(tau=2), ob.eager(wait="everyone")),
    (ob.eager(sync_every=3, late=1), ob.eager(sync_every=2)),
    (ob.allreduce(), ob.eager(sync_every=2)),
    (ob.wagma(tau=2), ob.local_sgd(period=2)),
    (ob.ad_psgd(), ob.eager(sync_every=2)),
]


def two_optimizers(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """As in a GAN: one of them takes several steps for one of the other's, and workers differ in speed and order."""
    one, other = PAIRS[number]
    draw = random.Random(10 * number + rank)
    left, right = net(), net(1)
    first = ob.attach(sgd(left, momentum=0.0), left, one, patience_s=PATIENCE_S)
    second = ob.attach(sgd(right, momentum=0.0), right, other, patience_s=PATIENCE_S)
    for t in range(8):
        for model, optimizer in ((left, first), (left, first), (right, second)):
            time.sleep(draw.choice((0.0, 0.0, 0.01, 0.04)))
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
    first.finish()
    second.finish()
    return flat(left), flat(right)


def unnoticed(rank: int) -> None:
    """The others wait for rank 1 where nobody can see it; rank 1 waits for a full round, until it loses patience."""
    model = net()
    with ob.attach(sgd(model), model, ob.eager(sync_every=1), patience_s=3.0 if rank == 1 else PATIENCE_S) as optimizer:
        for t in range(3):
            if rank != 1 and t == 2:
                hear("rank 1 has ended")
            loss(model, rank, t).backward()
            try:
                optimizer.step()
            finally:
                if rank == 1 and t == 2:
                    say("rank 1 has ended")


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Turns[tuple[str, str]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return in_turn({case: Call(beside_own_collectives, (*case, folder)) for case in table()}, SIZE)


@pytest.mark.parametrize(("kind", "method"), table())
def test_a_collective_of_the_scripts_own_never_locks_and_all_end_equal(
    beside: Turns[tuple[str, str]], kind: str, method: str
) -> None:
    outs = beside[kind, method]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_rounds_that_must_be_full_stay_full_beside_them(told: Told) -> None:
    for out in told(full_rounds):
        for got, want in out:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def pairs() -> Turns[int]:
    return in_turn({number: Call(two_optimizers, (number,)) for number in range(len(PAIRS))}, 3)


@pytest.mark.parametrize("pair", range(len(PAIRS)), ids=lambda k: " and ".join(s.name for s in PAIRS[k]))
def test_two_attached_optimizers_do_not_lock(pairs: Turns[int], pair: int) -> None:
    outs = pairs[pair]
    for mine in outs:
        assert torch.equal(mine[0], outs[0][0])
        assert torch.equal(mine[1], outs[0][1])


def test_a_wait_that_nobody_can_see_ends_with_what_each_worker_was_doing() -> None:
    (outcomes,) = forge.run([Job(unnoticed, 3, timeout_s=120)])
    error = outcomes[1].error
    assert "waited 3 s for round 2 of 'eager'" in error
    for rank in (0, 2):
        assert f"rank {rank} is busy" in error
