"""Data, loops and records for live tests of micro-batches: four workers, each with samples that have numbers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat as ob
from tests.support.nets import PATIENCE_S, flat, flat_grad, net

SIZE, ROWS, LR = 4, 8, 0.1
EVERYBODY: dict[str, Any] = {"stop": SIZE}  # the bell waits for all, so nobody is ever late
ONE_EACH: dict[str, Any] = {"stop": 1e-9}  # a deadline that is always over: one micro-batch a round
FORMS = ("allreduce", "server", "ring", "matcha")


def samples(rank: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples ``lo`` to ``hi`` of a rank: inputs, targets, and their numbers."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(500, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    return x[lo:hi], y[lo:hi], torch.arange(lo, hi)


def loader(rank: int, count: int, rows: int = ROWS, start: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    return (samples(rank, start + k * rows, start + (k + 1) * rows) for k in range(count))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def attached(strategy: ob.Strategy, **settings: Any) -> tuple[nn.Module, ob.Attached]:
    model = net()
    return model, ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S, **settings)


def learn(model: nn.Module, piece: Any) -> None:
    F.mse_loss(model(piece[0]), piece[1]).backward()


class Pace:
    """What a worker does besides learning: before the k-th micro-batch of round r, and when it is through the round."""

    def before(self, r: int, k: int, rows: int) -> None:
        """Nothing."""

    def through(self, r: int) -> None:
        """Nothing."""


class Sleeps(Pace):
    """Sleeps ``seconds(r, rows)`` before each micro-batch."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self._seconds = seconds

    def before(self, r: int, k: int, rows: int) -> None:
        time.sleep(self._seconds(r, rows))


class Held(Pace):
    """Workers that are held in a round until another one is through it: an order of events, whatever the machine does.

    ``held(r)`` tells who is held in round r, each before which of its micro-batches; never all of them. When another
    worker is through, the bell is on its way; from one micro-batch to the next it is given more time to come.
    """

    def __init__(self, rank: int, name: str, held: Callable[[int], Mapping[int, int]]) -> None:
        self._rank, self._held = rank, held
        self._folder = Path(os.environ["JOB_FOLDER"], name)
        self._folder.mkdir(exist_ok=True)

    def before(self, r: int, k: int, rows: int) -> None:
        first = self._held(r).get(self._rank)
        if first is None or k < first:
            return
        others = [self._folder / f"{r}-{rank}" for rank in range(SIZE) if rank != self._rank]
        while not any(file.exists() for file in others):
            time.sleep(0.001)
        time.sleep(min(0.02 * 8 ** (k - first), 0.5))

    def through(self, r: int) -> None:
        (self._folder / f"{r}-{self._rank}").touch()


def train(
    rank: int,
    strategy: ob.Strategy,
    batches: int = 6,
    pace: Pace | None = None,
    rows: int = ROWS,
    **settings: Any,
) -> dict[str, Any]:
    """A run over a loader. The log: weights before, numbers of the samples, weights after, how many pieces at most."""
    model, optimizer = attached(strategy, **settings)
    pace = pace or Pace()
    log, micro = [], []
    with optimizer:
        for r, batch in enumerate(optimizer.batches(loader(rank, batches, rows))):
            before, seen = flat(model), []
            pieces = optimizer.micro_batches(batch)
            micro.append(optimizer.me.reported.micro_batches)
            most = len(pieces)
            for k, piece in enumerate(pieces):
                assert torch.equal(flat(model), before), "the weights changed within a round"
                pace.before(r, k, len(piece[0]))
                learn(model, piece)
                seen.append(piece[2].tolist())
            pace.through(r)
            optimizer.step()
            log.append((before, seen, flat(model), most))
    return {"log": log, "final": flat(model), "used": optimizer.samples_used, "micro": micro}


def reference(rounds: list[list[tuple[int, int, int]]]) -> Tensor:
    """One process on the union of everybody's samples; a round is a list of (rank, from, to)."""
    model = net()
    optimizer = sgd(model)
    for parts in rounds:
        x, y = (torch.cat(column) for column in zip(*(samples(*part)[:2] for part in parts), strict=True))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return flat(model)


def all_of(rounds: int, rows: int = ROWS, ranks: Any = range(SIZE)) -> list[list[tuple[int, int, int]]]:
    return [[(k, r * rows, (r + 1) * rows) for k in ranks] for r in range(rounds)]


def gradient(weights: torch.Tensor, parts: list[tuple[int, list[int]]]) -> torch.Tensor:
    """The gradient at ``weights`` of one process on the samples of all ``parts`` (rank, numbers)."""
    model = net()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    xs, ys = zip(*(tuple(column[n] for column in samples(rank, 0, 500)[:2]) for rank, n in parts), strict=True)
    F.mse_loss(model(torch.cat(xs)), torch.cat(ys)).backward()
    return flat_grad(model)


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def by_round(runs: list[dict[str, Any]]) -> list[list[tuple[int, Any, list[int], Any]]]:
    """Of each round, of each rank that had data: its rank, weights before, samples, weights after."""
    rounds = max(len(run["log"]) for run in runs)
    return [
        [
            (rank, run["log"][r][0], joined(run["log"][r][1]), run["log"][r][2])
            for rank, run in enumerate(runs)
            if r < len(run["log"])
        ]
        for r in range(rounds)
    ]


def follows_the_union(runs: list[dict[str, Any]]) -> None:
    """Every update is that of one process with all samples that were finished in its round."""
    for parts in by_round(runs):
        assert all(torch.equal(before, parts[0][1]) for _, before, _, _ in parts)
        step = gradient(parts[0][1], [(rank, numbers) for rank, _, numbers, _ in parts])
        for _, before, _, after in parts:
            torch.testing.assert_close(after, before - LR * step, rtol=1e-9, atol=1e-11)
