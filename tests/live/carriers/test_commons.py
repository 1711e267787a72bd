"""Exchanges in step through shared memory: the same bits for all, and nobody is waited for who has given its share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.method import Axes, Begin, Body, Facts, Finish, Grad, Mix, Paper, Replica, Ticket, Vec, method, topology
from tests.support.forge import hear, say
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

LONG = 200_000  # numbers: more than everybody adds up by itself where all wait together
CARD = Paper(
    name="underway",
    full_name="a mix that is always under way",
    title="None",
    authors="Nobody",
    year=2026,
    venue="a test",
    arxiv="",
    axes=Axes(what="weights", when="every step", whom="everyone", wait="nobody", merge="mean, one step late"),
    laws=(),
    confidence="",
)


@method(CARD, Facts())
def underway() -> Body:
    async def body(me: Replica) -> None:
        ticket: Ticket[Vec] | None = None
        async for _ in me.steps():
            me.step(await Grad())
            if ticket is not None:
                me.x.copy_(await Finish(ticket))
            ticket = await Begin(Mix(me.x.clone(), topology.everyone(me.size)(0)))
        if ticket is not None:
            await Finish(ticket)

    return body


@scenario(2)
def one_is_held(rank: int) -> float:
    """Rank 1 begins a mix and then waits until rank 0 has taken its result."""
    model = nn.Module()
    model.w = w = nn.Parameter(torch.full((LONG,), float(rank)))
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, underway(), patience_s=60)
    for step in range(3):
        if rank == 1 and step == 1:
            hear("rank 0 is through", 40)
        optimizer.zero_grad()
        (w.sum() * 0.0).backward()
        optimizer.step()
        if rank == 0 and step == 1:
            say("rank 0 is through")
    optimizer.finish()
    return w[0].item()


def test_a_mix_that_was_begun_is_finished_without_those_who_have_given_their_share(told: Told) -> None:
    assert told(one_is_held) == [0.0, 0.0]  # attach makes all begin with rank 0's weights


@scenario(4)
def sums(rank: int) -> list[torch.Tensor]:
    """Means of vectors of many lengths, and of several kinds at once."""
    out = []
    for numel in (1, 17, 65_536, 65_537, 300_001):
        model = nn.Module()
        draw = torch.Generator().manual_seed(rank)
        model.a = nn.Parameter(torch.zeros(numel))
        model.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        model.c = nn.Parameter(torch.zeros(numel // 2 + 1, dtype=torch.bfloat16))
        parts = list(model.parameters())
        optimizer = ob.attach(torch.optim.SGD(parts, lr=1.0), model, ob.local_sgd(period=1), patience_s=120)
        assert set(optimizer.carriers) <= {"shm"}
        for p in parts:
            p.grad = torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)
        optimizer.step()
        out.append(torch.cat([p.detach().double() for p in parts]))
        optimizer.finish()
    return out


def test_all_get_the_bits_of_a_sum_in_the_order_of_the_ranks(told: Told) -> None:
    everyone = told(sums)
    for k, numel in enumerate((1, 17, 65_536, 65_537, 300_001)):
        total = None
        for rank in range(4):
            draw = torch.Generator().manual_seed(rank)
            sizes = ((numel, torch.float32), (3, torch.float64), (numel // 2 + 1, torch.bfloat16))
            parts = [-torch.randn(n, generator=draw, dtype=torch.float64).to(d) for n, d in sizes]
            wide = [p.to(torch.promote_types(p.dtype, torch.float32)) for p in parts]
            total = wide if total is None else [a + b for a, b in zip(total, wide, strict=True)]
        assert total is not None
        kinds = (torch.float32, torch.float64, torch.bfloat16)
        mean = torch.cat([(t / 4).to(d).double() for t, d in zip(total, kinds, strict=True)])
        for out in everyone:
            assert torch.equal(out[k], mean)
