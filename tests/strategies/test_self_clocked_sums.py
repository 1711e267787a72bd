"""Self-clocked averaging loses nothing: all weights, and what coding lost of them, add up to the workers' own steps.

A model with one slot for each sample and learning rate 1: the gradient of a sample is minus its amount in its own slot,
so the sum of all workers' weights, and of what each of them has lost, holds that amount there if it counts once.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Generator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat as ob
from offbeat.method.replica import Replica
from tests.support.witness import AT_MOST, counting, one_hot, produced

INT8 = ob.codec.int8()
LEVEL = 1 / 127  # of int8, beside the largest amount
CODED = {
    "default": ob.self_clocked(),
    "int8": ob.self_clocked(codec=INT8),
    "all together": ob.self_clocked(1, None, 0.5, codec=INT8),
    "all wait for all": ob.self_clocked(1, None, "everyone", late=0, codec=INT8),
    "groups of three": ob.self_clocked(1, 3, "first", pause=0.0, codec=INT8),
    "drawing": ob.self_clocked(1, 2, draw=2, codec=ob.codec.bf16()),
    "two bits": ob.self_clocked(1, None, 0.5, codec=ob.codec.qsgd(2, 7)),
    "every second step": ob.self_clocked(2, 2, codec=ob.codec.qsgd(4, 7, "l2")),
    "in nodes": ob.self_clocked(per_node=2, codec=INT8),
}
ENDS: list[dict[str, Any]] = [{"steps": 7}, {"samples": 25}]


def amount(rank: int, step: int) -> float:
    return 1 / (1 + 2 * rank + 3 * step)


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a run comes to, slot by slot, of all workers together."""

    run: ob.Run
    weights: Tensor  # when the method is through, before the closing average
    lost: Tensor  # by coding, and not sent since
    due: Tensor  # the amounts of all samples that were computed

    @property
    def error(self) -> float:
        return float((self.weights + self.lost - self.due).abs().max())


def ended(strategy: ob.Strategy, workers: int, hosts: int | None = None, **end: Any) -> Ended:
    """A run with messages that take long, and workers that are late now and then."""
    x, lost = {}, {}

    @types.coroutine
    def body(me: Replica) -> Generator[Any, Any, None]:
        yield from strategy.body(me).__await__()
        x[me.rank] = me.x.parts[0].clone()
        lost[me.rank] = torch.zeros_like(x[me.rank]) if me.memory.lost is None else me.memory.lost.parts[0].clone()

    slots = workers * AT_MOST
    task = dataclasses.replace(
        counting(workers),
        batch=lambda rank, step: (amount(rank, step) * one_hot(rank * AT_MOST + step, slots)[None], torch.zeros(1)),
    )
    how: dict[str, Any] = {"network": ob.Network(0.03, hosts=hosts), "delays": ob.delays.exponential(0.2)}
    run = ob.simulate(dataclasses.replace(strategy, body=body), task, workers, **end, **how, seed=workers)
    due = torch.zeros(slots, dtype=torch.float64)
    for rank, step in produced(run):
        due[rank * AT_MOST + step] = amount(rank, step)
    per_node: Any = strategy.settings["per_node"]  # of a node, the first rank keeps what all have lost
    of_all = torch.stack([lost[rank // per_node * per_node] for rank in range(workers)]).sum(0)
    return Ended(run, torch.stack(list(x.values())).sum(0), of_all, due)


def fits(name: str, workers: int, end: dict[str, Any]) -> bool:
    """Where a node's ranks end at different steps, the last ones count for those who have no data."""
    per_node: Any = CODED[name].settings["per_node"]
    return per_node == 1 or (workers > per_node and workers % per_node == 0 and "samples" not in end)


CASES = [(name, n, end) for name in CODED for n in (2, 4, 9) for end in ENDS if fits(name, n, end)]
of_all_cases = pytest.mark.parametrize(("name", "workers", "end"), CASES, ids=str)


@cache
def coded(name: str, workers: int, end: int) -> Ended:
    return ended(CODED[name], workers, **ENDS[end])


@of_all_cases
def test_all_weights_and_what_coding_lost_hold_every_gradient_once(name: str, workers: int, end: Any) -> None:
    got = coded(name, workers, ENDS.index(end))
    assert got.error < 1e-12
    assert got.lost.any(), "something was lost"


@of_all_cases
def test_what_coding_lost_last_is_all_that_is_unpaid_at_the_end(name: str, workers: int, end: Any) -> None:
    got = coded(name, workers, ENDS.index(end))
    missing = got.due / workers - got.run.final
    torch.testing.assert_close(missing, got.lost / workers, rtol=0, atol=1e-12)
    if CODED[name].settings["codec"] in ("auto", INT8):
        assert missing.abs().max() < LEVEL


EVERY_NUMBER = [(workers, hosts) for workers in range(1, 34) for hosts in (1, None)]


@cache
def by_default(workers: int, hosts: int | None) -> Ended:
    return ended(ob.self_clocked(), workers, hosts, samples=3 * workers + 1)


@pytest.mark.parametrize(("workers", "hosts"), EVERY_NUMBER)
def test_every_number_of_workers_applies_every_gradient_once(workers: int, hosts: int | None) -> None:
    got = by_default(workers, hosts)
    assert sum(got.run.gradients) == 3 * workers + 1
    assert got.error < 1e-12
    assert bool(got.lost.any()) == (hosts is None and workers > 1), "what leaves a host is coded"


@pytest.mark.parametrize(("workers", "hosts"), EVERY_NUMBER)
def test_of_every_number_of_workers_nobody_waits(workers: int, hosts: int | None) -> None:
    assert sum(by_default(workers, hosts).run.wait_s) == 0.0
