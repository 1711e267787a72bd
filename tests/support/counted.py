"""The counting model between processes: what became of every sample, whoever was late.

It has one weight for each sample and learning rate 1. The gradient of a sample is −1 in its own slot, so after a run
each slot holds (times applied) / P.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.runs.trace import Round
from tests.support.forge import hear, say

AT_MOST = 40  # steps of one worker
BATCHES = (10, 7, 0, 13, 5, 9, 1, 12, 8)

EAGER = {
    "first": ob.eager(grace=0),
    "majority": ob.eager("majority", grace=0),
    "two": ob.eager(2),
    "half": ob.eager(0.5, sync_every=None),
    "everyone": ob.eager("everyone"),
    "full rounds": ob.eager(sync_every=3),
    "every step": ob.eager(catch_up="every_step", sync_every=4, grace=0),
    "every step, late": ob.eager("majority", catch_up="every_step", sync_every=4, late=1),
    "late": ob.eager(late=1, sync_every=5, grace=0),
    "late quorum": ob.eager(3, late=1),
    "bounded": ob.eager(sync="bounded", staleness=2, grace=0),
    "bounded, late": ob.eager(sync="bounded", staleness=2, late=1),
    "bounded, every step": ob.eager(0.25, catch_up="every_step", sync="bounded", staleness=3),
    "grace": ob.eager(),
    "grace, every step": ob.eager(catch_up="every_step", sync_every=4),
    "so much grace": ob.eager(grace=0.002, late=1),
    "of any age": ob.ringmaster(None),
}
OTHERS = {
    "latest": ob.eager(apply="latest"),
    "dropped": ob.eager(stale="drop", sync_every=None, grace=0),
    "dropped, late": ob.eager(stale="drop", sync_every=None, late=1),
    "dropped, if old": ob.ringmaster(2),
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
    "self-clocked": ob.self_clocked(codec=None),
    "self-clocked, drawing": ob.self_clocked(1, 2, draw=2, codec=None),
    "self-clocked, everyone": ob.self_clocked(1, None, "first", codec=None),
    "self-clocked, not late": ob.self_clocked(1, late=0, codec=None),
    "decoupled": ob.decoupled(2, quorum=2),
    "decoupled, quorum of one": ob.decoupled(quorum=1, merge="direct"),
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
    carriers: tuple[str, ...] = ()


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
        model.w.detach().cpu().clone(),
        batches[rank],
        optimizer.lost,
        optimizer.trace.rounds,
        averages=averages,
        carriers=optimizer.summary().carriers,
    )
    seen.threads, seen.sockets = [t.name for t in offbeat_threads() - threads], sockets_left(before)
    return seen


def now_and_then(late: random.Random, step: int) -> float:
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
    return now_and_then(late, step)


def one_case(rank: int, size: int, name: str, batches: Sequence[int], device: str = "cpu") -> Seen:
    """A case on uneven data with random lateness; where late work is dropped, a rank is surely late once."""
    late = random.Random(f"{name} {rank}")
    sleep_s: Callable[[int], float] = partial(now_and_then, late)
    if name.startswith("dropped") and size > 1:
        sleep_s = partial(_held, rank, name, late)
    return counted(rank, size, CASES[name], batches, sleep_s, device=device)


def once_each(batches: tuple[int, ...]) -> Tensor:
    """What the slots hold, times P, when every sample has been applied once."""
    slots = torch.zeros(len(batches), AT_MOST, dtype=torch.float64)
    for rank, count in enumerate(batches):
        slots[rank, :count] = 1.0
    return slots.reshape(-1)


def failing_early(rank: int, strategy: ob.Strategy, how: str, who: int) -> None:
    """Everybody trains for a long time; rank ``who`` raises or is killed early, in the middle of a step."""
    model = Slots(4 * AT_MOST)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, strategy)
    for step in range(100_000):
        if rank == who and step == 20:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the disk is full")
        time.sleep(0.001)
        optimizer.zero_grad()
        model.loss(rank, step % AT_MOST).backward()
        optimizer.step()
