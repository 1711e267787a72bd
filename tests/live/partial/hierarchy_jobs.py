"""The jobs of the live tests of nodes: ranks that act as one worker between nodes (see partial_jobs for the model)."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

import offbeat as ob
from offbeat.method.effects import Channel, Got, GradMix, Open
from offbeat.method.replica import Replica
from offbeat.rounds.rules import Rules
from offbeat.runs.trace import Round
from tests.live.partial import partial_jobs

PAIRS = {
    "first": ob.eager(per_node=2),
    "every step": ob.eager(per_node=2, catch_up="every_step", sync_every=3),
    "late": ob.eager(per_node=2, late=1, sync_every=4),
    "bounded": ob.eager(per_node=2, sync="bounded", staleness=2),
    "correct": ob.wagma(per_node=2, tau=4, merge="correct"),
    "wagma, late": ob.wagma(per_node=2, tau=None, late=1),
    "wagma": ob.wagma(per_node=2, tau=3),
    "wagma, coded": ob.wagma(per_node=2, tau=4, codec=ob.codec.qsgd(8)),
}


def all_pairs(rank: int, size: int, batches: Sequence[int], average_at: Sequence[int]) -> dict[str, partial_jobs.Seen]:
    """Every case with random lateness."""
    keep = partial_jobs.held()
    out = {}
    for name, strategy in PAIRS.items():
        late = partial(partial_jobs._choice, random.Random(f"{name} {rank}"))
        out[name] = partial_jobs.counted(rank, size, strategy, batches, late, average_at)
    keep.finish()
    return out


def failing(rank: int, name: str, how: str, who: int) -> None:
    partial_jobs.CASES[name] = PAIRS[name]
    partial_jobs.failing(rank, name, how, who)


def in_lockstep(rank: int) -> list[torch.Tensor]:
    """A small network on data of each rank's own, with momentum: its weights after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights, late = [], random.Random(rank // 2)
    with ob.attach(inner, model, ob.eager(per_node=2, sync_every=None), patience_s=120) as optimizer:
        for step in range(20):
            torch.randn(100, 100).mm(torch.randn(100, 100 * (1 + late.choice((0, 40))))).sum()  # one node is late
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
            model(x).square().mean().backward()
            optimizer.step()
            weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return weights


def contributors(rank: int) -> tuple[dict[int, dict[int, int]], list[Round]]:
    """A strategy of a user's own: what its results say of who contributed, and what the trace says."""
    said: dict[int, dict[int, int]] = {}

    async def body(me: Replica) -> None:
        def look(results: list[Got]) -> None:
            said.update({got.version: dict(got.contributors) for got in results})

        channel = Channel("mine", ob.topology.everyone(2), Rules(ob.waiting.first, "carry", 7), look, per_node=2)
        await Open(channel, None)
        async for t in me.own_steps(2):
            g = await GradMix(ob.topology.nodes(4, 2)(0))
            assert g is not None
            look(await channel.mix(g, t))
        async for got in channel.rest(lambda: None):
            look([got])

    model, late = nn.Linear(3, 1), random.Random(rank // 2)
    mine = dataclasses.replace(ob.eager(), body=body)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, mine, patience_s=120) as optimizer:
        for _ in range(30):
            time.sleep(late.choice((0.0, 0.0, 0.01)))
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    return said, optimizer.trace.rounds


def beside_allreduce(rank: int, size: int) -> list[torch.Tensor]:
    """One node of all, nodes in step with one another, and allreduce: what they end with."""
    out = []
    for strategy in (ob.allreduce(), ob.eager(per_node=size), ob.eager("everyone", per_node=size // 2)):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy, patience_s=120) as optimizer:
            for step in range(8):
                optimizer.zero_grad()
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
                model(x).square().mean().backward()
                optimizer.step()
        out.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return out
