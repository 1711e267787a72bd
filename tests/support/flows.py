"""A strategy of a user's own for live tests, whose messages show when they are torn."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from dataclasses import dataclass, field

import torch
from torch import nn

import offbeat as ob
from offbeat.method.effects import Channel, Got, Grad, Open
from offbeat.method.replica import Replica
from offbeat.rounds.rules import Rules


@dataclass
class Flow:
    """What one rank saw of one stretch of rounds."""

    numbers: int
    results: dict[int, float] = field(default_factory=dict)  # round → the number all its elements hold
    deposited: float = 0.0
    torn: int = 0
    warm_bytes: int = 0
    end_bytes: int = 0


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def echo(flow: Flow, rules: Rules) -> ob.Strategy:
    """Deposits a constant vector that tells rank and step; looks at every result."""

    async def body(me: Replica) -> None:
        def look(results: list[Got]) -> None:
            for got in results:
                low, high = torch.aminmax(got.value.parts[0])
                flow.torn += not torch.equal(low, high)
                flow.results[got.version] = float(low)

        x = me.x.zeros_like()
        channel = Channel("echo", ob.topology.everyone(me.size), rules, look)
        await Open(channel, None)
        async for t in me.own_steps():
            await Grad()
            number = 64.0 * (t % 97) + me.rank + 1
            for p in x.parts:
                p.fill_(number)
            flow.deposited += number
            look(await channel.mix(x, t))
        async for got in channel.rest(lambda: None):
            look([got])

    return dataclasses.replace(ob.eager(), body=body)


def flow_of(rank: int, numbers: int, steps: int, device: str = "cpu") -> Flow:
    """So many steps of everybody with random lateness, and messages of so many numbers."""
    flow, lateness = Flow(numbers), random.Random(f"{rank} {numbers}")
    model = nn.Module()
    model.p = nn.Parameter(torch.zeros(numbers, device=device))
    optimizer = ob.attach(
        torch.optim.SGD(model.parameters(), lr=1.0), model, echo(flow, Rules(ob.waiting.first, "carry", 25))
    )
    for step in range(steps):
        time.sleep(lateness.choice((0.0, 0.0, 0.001, 0.01)))
        optimizer.step()
        if step == steps // 3:
            flow.warm_bytes = resident_bytes()
    flow.end_bytes = resident_bytes()
    optimizer.finish()
    return flow
