"""The jobs of the live tests of partial rounds: what every rank does, and what it saw.

The counting model has one weight for each sample and learning rate 1. The gradient of a sample is −1 in its own slot,
so after a run each slot holds (times applied) / P.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.method.effects import Channel, Got, Grad, Open
from offbeat.method.replica import Replica
from offbeat.rounds.rules import Rules
from offbeat.runs.trace import Round
from tests.support.forge import hear, said, say

AT_MOST = 40  # steps of one worker
BATCHES = (10, 7, 0, 13, 5, 9, 1, 12, 8)

EAGER = {
    "first": ob.eager(),
    "majority": ob.eager("majority"),
    "two": ob.eager(2),
    "half": ob.eager(0.5, sync_every=None),
    "everyone": ob.eager("everyone"),
    "full rounds": ob.eager(sync_every=3),
    "every step": ob.eager(catch_up="every_step", sync_every=4),
    "every step, late": ob.eager("majority", catch_up="every_step", sync_every=4, late=1),
    "late": ob.eager(late=1, sync_every=5),
    "late quorum": ob.eager(3, late=1),
    "bounded": ob.eager(sync="bounded", staleness=2),
    "bounded, late": ob.eager(sync="bounded", staleness=2, late=1),
    "bounded, every step": ob.eager(0.25, catch_up="every_step", sync="bounded", staleness=3),
}
OTHERS = {
    "latest": ob.eager(apply="latest"),
    "dropped": ob.eager(stale="drop", sync_every=None),
    "dropped, late": ob.eager(stale="drop", sync_every=None, late=1),
    "coded": ob.eager(codec=ob.codec.qsgd(8)),
    "wagma": ob.wagma(tau=4),
    "wagma of two": ob.wagma(group=2, tau=None),
    "wagma, late": ob.wagma(tau=4, late=1),
    "wagma, every step": ob.wagma(tau=4, catch_up="every_step"),
    "wagma, correct": ob.wagma(tau=4, merge="correct"),
    "wagma, correct, every step": ob.wagma(group=2, tau=None, merge="correct", catch_up="every_step"),
    "wagma, quorum": ob.wagma(tau=4, wait=2),
    "wagma, bounded": ob.wagma(sync="bounded", staleness=2),
    "wagma, bounded, late": ob.wagma(sync="bounded", staleness=2, late=1),
    "wagma, coded": ob.wagma(tau=4, codec=ob.codec.qsgd(8)),
    "ad_psgd": ob.ad_psgd(),
    "ad_psgd on a ring": ob.ad_psgd("ring"),
}
CASES = {**EAGER, **OTHERS}


class Slots(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def loss(self, rank: int, step: int) -> Tensor:
        return -self.w[rank * AT_MOST + step]


@dataclass
class Seen:
    """What one rank saw of one run."""

    final: Tensor
    steps: int = 0
    lost: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    sockets: int = 0  # more than before
    averages: list[Tensor] = field(default_factory=list)


def sockets() -> set[str]:
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return {link for link in links if link.startswith("socket:")}


def sockets_left(before: set[str]) -> int:
    """Gloo closes its sockets in a thread of its own: look again for a while."""
    deadline = time.monotonic() + 60.0
    while (left := len(sockets() - before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def offbeat_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("offbeat")}


def held() -> Any:
    """Keeps the default group alive between runs, so that sockets can be compared."""
    model = nn.Linear(1, 1)
    return ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.local_sgd())


def counted(
    rank: int,
    size: int,
    strategy: ob.Strategy,
    batches: Sequence[int],
    sleep_s: Callable[[int], float],
    average_at: Sequence[int] = (),
    device: str = "cpu",
) -> Seen:
    """The counting model under ``strategy``; ``sleep_s(step)`` seconds late in each step."""
    before, threads = sockets(), offbeat_threads()
    model = Slots(size * AT_MOST).to(device)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, strategy, patience_s=120)
    averages = []
    for step in range(batches[rank]):
        time.sleep(sleep_s(step))
        optimizer.zero_grad()
        model.loss(rank, step).backward()
        optimizer.step()
        if step in average_at:
            optimizer.average()
            averages.append(model.w.detach().clone())
    optimizer.finish()
    seen = Seen(
        model.w.detach().cpu().clone(), batches[rank], optimizer.lost, optimizer.trace.rounds, averages=averages
    )
    seen.threads, seen.sockets = [t.name for t in offbeat_threads() - threads], sockets_left(before)
    return seen


def _choice(late: random.Random, step: int) -> float:
    return late.choice((0.0, 0.0, 0.004))


HELD_STEP = 2


def _held(rank: int, name: str, late: random.Random, step: int) -> float:
    """The same, but rank 0 stays in one step until rank 1 has taken five meanwhile; nobody may be waited for."""
    if (rank, step) == (0, HELD_STEP):
        say(f"{name}: held")
        hear(f"{name}: let go")
    elif (rank, step) == (1, 1):
        hear(f"{name}: held")
    elif (rank, step) == (1, 6):
        say(f"{name}: let go")
    return _choice(late, step)


def all_cases(
    rank: int, size: int, names: Sequence[str], batches: Sequence[int], device: str = "cpu"
) -> dict[str, Seen]:
    """Every named case on uneven data with random lateness; where late work is dropped, a rank is surely late once."""
    keep = held()
    out = {}
    for name in names:
        late = random.Random(f"{name} {rank}")
        sleep_s: Callable[[int], float] = partial(_choice, late)
        if name.startswith("dropped") and size > 1:
            sleep_s = partial(_held, rank, name, late)
        out[name] = counted(rank, size, CASES[name], batches, sleep_s, device=device)
    keep.finish()
    return out


def in_step(rank: int, size: int) -> dict[str, Tensor]:
    """Nobody is late and everybody waits for everybody: the partial methods beside allreduce."""
    keep = held()
    out = {}
    for name, strategy in {
        "allreduce": ob.allreduce(),
        "eager": ob.eager("everyone"),
        "eager, full": ob.eager(sync_every=1),
        "eager, every step": ob.eager("everyone", catch_up="every_step"),
        "wagma": ob.wagma(group=size, wait="everyone"),
        "wagma, full": ob.wagma(tau=1),
    }.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy, patience_s=120) as optimizer:
            for step in range(8):
                optimizer.zero_grad()
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
                model(x).square().mean().backward()
                optimizer.step()
            out[f"{name}: before the end"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()
        out[name] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    keep.finish()
    return out


def averaged(rank: int, size: int, names: Sequence[str]) -> dict[str, Seen]:
    """Two averages, at everybody's own steps 2 and 5; rank 0 is slow, and the last has nothing to do from the start."""
    keep = held()
    batches = (*[7] * (size - 1), 0)
    out = {}
    for name in names:
        slow = 0.02 if rank == 0 else 0.0
        out[name] = counted(rank, size, CASES[name], batches, lambda _, s=slow: s, average_at=(2, 5))
    keep.finish()
    return out


OWED = ("first", "every step")  # here nobody waits for rank 0 in the last step before the stop


def resumed(rank: int, size: int, names: Sequence[str]) -> dict[str, tuple[Tensor, bool, str]]:
    """The counting model with a stop in the middle: what is owed then travels in the state.

    In the cases ``OWED`` rank 0 takes its last step before the stop when the others have taken theirs, each of them
    since rank 0 has begun it: a round has gone by, and there is none to come.
    """
    keep = held()
    out = {}
    for name in names:
        lateness, model, saved = random.Random(f"{name} {rank}"), Slots(size * AT_MOST), None
        said = ""
        for begin, end in ((0, 6), (6, 12 + rank)):
            resumed, model = model, Slots(size * AT_MOST)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = ob.attach(inner, model, CASES[name], patience_s=120)
            if saved is not None:
                model.load_state_dict(resumed.state_dict())
                optimizer.load_state_dict(saved)
            for step in range(begin, end):
                time.sleep(lateness.choice((0.0, 0.004)))
                last = saved is None and step == end - 1 and name in OWED
                if last and rank == 0:
                    say(f"{name}: begun")
                    for other in range(1, size):
                        hear(f"{name}: {other} through")
                elif last:
                    hear(f"{name}: begun")
                optimizer.zero_grad()
                model.loss(rank, step).backward()
                optimizer.step()
                if last:
                    say(f"{name}: {rank} through")
            if saved is None:
                optimizer.average()
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                stopped = copy.deepcopy(model)
                before = saved["offbeat"]["step"], optimizer.me.t
                try:
                    optimizer.load_state_dict(saved)
                except ob.OffbeatError as error:
                    said = str(error)
                assert before == (saved["offbeat"]["step"], optimizer.me.t)
            optimizer.finish()
            if begin == 0:
                model = stopped
        assert saved is not None
        owed = saved["offbeat"]["memory"]["owed"] is not None
        out[name] = model.w.detach().clone(), owed, said
    keep.finish()
    return out


def failing(rank: int, name: str, how: str, who: int) -> None:
    """Everybody trains for a long time; rank ``who`` fails early, in the middle of a step."""
    model = Slots(4 * AT_MOST)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, CASES[name])
    for step in range(100_000):
        if rank == who and step == 20:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the disk is full")
        time.sleep(0.001)
        optimizer.zero_grad()
        model.loss(rank, step % AT_MOST).backward()
        optimizer.step()


# A strategy of a user's own, whose messages show when they are torn.


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


def stress(rank: int, plan: Sequence[tuple[int, int]], device: str = "cpu") -> list[Flow]:
    """For each (numbers, steps): so many steps of everybody with random lateness."""
    keep = held()
    flows = []
    for numbers, steps in plan:
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
        flows.append(flow)
    keep.finish()
    return flows


# What a straggler costs the others.

NEVER = {
    "eager": ob.eager(sync_every=None),
    "eager, late": ob.eager(sync_every=None, late=1),
    "wagma": ob.wagma(tau=None),
    "ad_psgd": ob.ad_psgd(),
}


def beside_a_straggler(rank: int, size: int, names: Sequence[str], steps: int) -> dict[str, list[int]]:
    """Rank 1 stays in its second step until the others have taken ``steps`` meanwhile; how many these were."""
    keep, others = held(), [r for r in range(size) if r != 1]
    out = {}
    for name in names:
        model = nn.Linear(10, 10)
        optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, NEVER[name], patience_s=120)
        for step in range(2 if rank == 1 else steps + 2):
            if rank == 1 and step == 1:
                say(f"{name}: held")
                for other in others:
                    hear(f"{name}: rank {other} took {steps}")
            elif step == 1:
                hear(f"{name}: held")
            optimizer.zero_grad()
            model(torch.ones(1, 10)).sum().backward()
            optimizer.step()
            if rank != 1:
                say(f"{name}: rank {rank} took {step}")
        out[name] = [sum(said(f"{name}: rank {r} took {step}") for step in range(1, steps + 2)) for r in others]
        optimizer.finish()
    keep.finish()
    return out
