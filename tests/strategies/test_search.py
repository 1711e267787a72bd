"""A search for what nobody has thought of: any method, any of its settings, odd networks, delays, endings and nodes.

A model with one slot for each sample and learning rate 1 shows what became of each: the gradient of a sample is −1 in
its own slot, whatever the weights are, so sums over all workers change only by what they learn. Settings are drawn from
the signatures (``methods``), so that what is added later is searched too.

``make long`` searches fifty times as long.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat as ob
from offbeat.basics import draw
from offbeat.method.effects import Batch, Done
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy
from tests.support.long import unless_long
from tests.support.methods import CHOICES, a_method, settings_of

EXAMPLES = unless_long(4, 200)  # for each setting of a method
STEPS, ROWS = 26, 4  # of one worker, and of a batch, at most: so many samples have a slot


class Slots(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def forward(self, slots: Tensor) -> Tensor:
        return self.w[slots]


@dataclass(frozen=True)
class Case:
    """One run of the search."""

    strategy: Strategy
    workers: int
    end: dict[str, Any]
    compute_s: tuple[str, int]
    delay_s: tuple[str, int]
    network: tuple[Any, ...]
    seed: int

    @property
    def rows(self) -> int:
        return ROWS if self.strategy.name == "nonblocking" else 1

    def samples(self, rank: int, step: int) -> int:
        """Batches are uneven where they are cut."""
        return 1 + draw.below(self.rows, self.seed, rank, step)

    def slot(self, rank: int, step: int, row: int = 0) -> int:
        return (rank * STEPS + step) * self.rows + row

    def batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        slots = torch.tensor([self.slot(rank, step, row) for row in range(self.samples(rank, step))])
        return slots, torch.zeros(len(slots))

    def run(self) -> tuple[ob.Run, Seen]:
        count = self.workers * STEPS * self.rows
        task = ob.Task(
            lambda: Slots(count), lambda out, y: -out.mean(), self.batch, lambda p: torch.optim.SGD(p, lr=1.0)
        )
        watched, seen = witnessed(self.strategy)
        run = ob.simulate(
            watched, task, self.workers, **self.end, seed=self.seed, compute_s=pace(*self.compute_s, self.seed),
            delays=pace(*self.delay_s, self.seed + 1), network=net(*self.network),
        )  # fmt: skip
        return run, seen


def pace(kind: str, number: int, seed: int) -> Callable[[int, int], float]:
    """Seconds of a step; with ties, with none, with one that is always slow, with heavy tails."""

    def seconds(step: int, rank: int) -> float:
        u = draw.uniform(seed, step, rank)
        if kind == "nothing":
            return 0.0
        if kind == "even":
            return 0.1
        if kind == "ties":
            return [0.05, 0.05, 0.1, 0.25][int(4 * u)]
        if kind == "one is slow":
            return 0.9 if rank == number % 4 else 0.1
        if kind == "by rank":
            return 0.05 * (1 + (rank * 7 + number) % 5)
        if kind == "heavy tail":
            return 0.03 * (1 - u) ** -1.2
        return 0.02 + 0.2 * u

    return seconds


def net(latency_s: Any, bandwidth_Bps: Any, algorithm: Any) -> ob.Network:
    """Words mean a network whose links differ."""
    latency = (lambda i, j: 0.002 * ((3 * i + 5 * j) % 7)) if latency_s == "uneven" else latency_s
    bandwidth = (lambda i, j: 1e4 * (1 + (i + 2 * j) % 5)) if bandwidth_Bps == "uneven" else bandwidth_Bps
    return ob.Network(latency, bandwidth, algorithm)


@dataclass
class Seen:
    """What the workers did, each at its end."""

    me: dict[int, Replica] = field(default_factory=dict)
    last: dict[int, Tensor] = field(default_factory=dict)  # weights when the method was through, nothing averaged yet
    done: dict[int, dict[int, Done]] = field(default_factory=lambda: defaultdict(dict))  # round → rank → its part


def witnessed(strategy: Strategy) -> tuple[Strategy, Seen]:
    seen = Seen()

    @types.coroutine
    def body(me: Replica):
        inner, answer = strategy.body(me), None
        seen.me[me.rank] = me
        try:
            while True:
                effect = inner.send(answer)
                answer = yield effect
                if isinstance(effect, Batch) and answer is not None:
                    seen.done[effect.r][me.rank] = dataclasses.replace(answer, total=answer.total.clone())
        except StopIteration:
            seen.last[me.rank] = me.x.parts[0].clone()
        finally:
            inner.close()

    return dataclasses.replace(strategy, body=body), seen


KINDS = ["even", "ties", "one is slow", "by rank", "heavy tail", "any"]


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    workers = draw(st.sampled_from([8, 6, 4, 9, 5, 3, 2, 7, 8, 6, 4, 1]))  # most can make up nodes
    end = draw(
        st.builds(lambda n: {"steps": n}, st.integers(0, 6))
        | st.builds(lambda n: {"samples": n}, st.integers(0, STEPS - 1))
        | st.builds(lambda s: {"seconds": s}, st.floats(0.01, 0.45))
    )
    return Case(
        draw(a_method(name, workers)),
        workers,
        end,
        (draw(st.sampled_from(KINDS if "seconds" in end else [*KINDS, "nothing"])), draw(st.integers(0, 9))),
        (draw(st.sampled_from(["nothing", "nothing", *KINDS])), draw(st.integers(0, 9))),
        (
            draw(st.sampled_from([0.0, 1e-4, 0.01, 0.08, "uneven"])),
            draw(st.sampled_from([math.inf, 1e12, 1e5, "uneven"])),
            draw(st.sampled_from(["ring", "halving_doubling"])),
        ),
        draw(st.integers(0, 999)),
    )


@pytest.mark.parametrize("name", ob.STRATEGIES)
def test_any_method_with_any_settings_ends_with_everything_in_its_place(name: str) -> None:
    @given(case=cases(name))
    @settings(max_examples=EXAMPLES * (1 + len(settings_of(name))), suppress_health_check=list(HealthCheck))
    def search(case: Any) -> None:
        check(case)

    search()


def check(case: Case) -> None:
    run, seen = case.run()
    assert set(seen.last) == set(range(case.workers)), "everybody has come to the end"
    check_counts(case, run, seen)
    check_replicas(case, seen)
    check_staleness(case, run)
    again, _ = case.run()
    assert again.hash == run.hash


def test_every_setting_of_every_method_is_drawn() -> None:
    assert set(CHOICES) == set(ob.STRATEGIES)
    for name in ob.STRATEGIES:
        assert list(CHOICES[name]) == settings_of(name), f"{name}: CHOICES names other settings than the method has"


# What is applied.


def check_counts(case: Case, run: ob.Run, seen: Seen) -> None:
    assert torch.isfinite(run.final).all()
    if case.strategy.name == "nonblocking":
        check_samples(case, run, seen)
        return
    whole = (run.final * case.workers + unsent(case, seen)).tolist()
    applied = {slot: times for slot, times in enumerate(whole) if abs(times) > 1e-9}
    due = {
        case.slot(rank, step): share(case, run, rank, step)
        for rank, taken in enumerate(run.gradients)
        for step in range(taken)
    }
    how = case.strategy.settings
    if case.strategy.name in ("msync", "ringmaster") or how.get("stale") == "drop":
        lost = {case.slot(rank, step) for rank, step in run.lost}
        assert lost <= set(due)
        due = {slot: times for slot, times in due.items() if slot not in lost}
    else:
        assert run.lost == ()
    assert set(applied) <= set(due), "nothing comes out of nothing"
    if conserves(case):
        assert set(applied) == set(due)
        assert all(abs(times - due[slot]) < 1e-6 for slot, times in applied.items()), (applied, due)
    if case.strategy.name == "eager" and not how["codec"]:  # what fades, or is passed over, counts for less
        assert all(-1e-9 <= times <= due[slot] + 1e-9 for slot, times in applied.items())


def share(case: Case, run: ob.Run, rank: int, step: int) -> float:
    """How many times a gradient counts that is averaged in step: P, or those of a node, over those who have data."""
    how: Any = case.strategy.settings
    together = {"allreduce": case.workers, "qsgd": case.workers}
    per_node: int = together.get(case.strategy.name, how.get("per_node", 1))
    first = rank // per_node * per_node
    return per_node / sum(taken > step for taken in run.gradients[first : first + per_node])


def unsent(case: Case, seen: Seen) -> Tensor | float:
    """What coding has lost of shared weights, on all workers together; the first rank of a node keeps it for all."""
    if case.strategy.name not in ("self_clocked", "wagma") or case.strategy.settings["codec"] is None:
        return 0.0
    per_node: Any = case.strategy.settings["per_node"]
    lost = [seen.me[rank // per_node * per_node].memory.lost for rank in range(case.workers)]
    return 0.0 if None in lost else torch.stack([vec.parts[0] for vec in lost]).sum(0)


def conserves(case: Case) -> bool:
    """Whether the method says that the sum over all workers, and of what is ``unsent``, changes by what they learn, and
    by nothing else."""
    how: Any = case.strategy.settings
    name = case.strategy.name
    coded = how.get("codec") is not None and case.workers > 1
    if "speed" in (how.get("pace"), how.get("period")) and case.workers > 1:  # who is slow counts for less
        return False
    if name == "eager":
        return how["stale"] != "fade" and how["apply"] == "queue" and not coded
    if name == "ringmaster":
        return not coded
    if name == "wagma":
        return how["merge"] == "correct" or how["late"] > 0
    if name == "dasgd":
        return (how["merge"] == "correct" or (how["delay"] == 0 and how["xi"] in (0.0, 1.0))) and not coded
    if name == "diloco":
        plain = how["outer_lr"] == 1.0 and how["outer_momentum"] == 0.0 and how["overlap"] == 0
        return plain and how["merge"] == 0.0 and not coded
    if name == "sparseloco":
        return how["outer_lr"] == 1.0 and not coded
    if name == "sgp":
        return how["graph"] in ("everyone", "complete", "ring", "exponential", "torus", "one_peer_exponential")
    if name in ("local_sgd", "adaptive"):
        return not coded
    return name in ("self_clocked", "allreduce", "dpsgd", "ad_psgd", "matcha")


def check_samples(case: Case, run: ob.Run, seen: Seen) -> None:
    """Every sample is learnt from at most once, in order, and each round applies just what was done in it."""
    how, P = case.strategy.settings, case.workers
    learnt = sum((d.total.parts[0] for part in seen.done.values() for d in part.values()), torch.zeros_like(run.final))
    for rank in range(P):
        stream = [case.slot(rank, step, row) for step in range(STEPS) for row in range(case.samples(rank, step))]
        used = sum(part[rank].samples for part in seen.done.values() if rank in part)
        assert torch.allclose(learnt[stream[:used]], torch.full((used,), -1.0, dtype=torch.float64))
        assert not learnt[stream[used:]].any()
        assert seen.me[rank].reported.samples_used[rank] == used
    if how["over"] not in ("allreduce", "server") or (how["codec"] and P > 1) or how["scale_lr"]:
        return
    expected = torch.zeros_like(run.final)
    for part in seen.done.values():
        given = [d for d in part.values() if d.samples]
        if how["weighting"] == "samples" and given:
            expected -= sum(d.total.parts[0] for d in given) / sum(d.samples for d in given)
        elif given:
            expected -= sum(d.total.parts[0] / d.samples for d in given) / len(given)
    torch.testing.assert_close(run.final, expected, rtol=1e-9, atol=1e-9)


# Who holds what, and how old it was.


def check_replicas(case: Case, seen: Seen) -> None:
    """Before the closing average: equal on all where the method says so, and within a node always."""
    how: Any = case.strategy.settings
    name = case.strategy.name
    equal = name in ("allreduce", "qsgd", "msync", "ringmaster") or (name == "eager" and how["apply"] == "queue")
    equal |= name == "nonblocking" and how["over"] in ("allreduce", "server")
    together = case.workers if equal else how.get("per_node", 1)
    for rank in range(case.workers):
        assert torch.equal(seen.last[rank], seen.last[rank // together * together])


def check_staleness(case: Case, run: ob.Run) -> None:
    name, versions = case.strategy.name, [r.version for r in run.trace.rounds]
    if name in ("eager", "msync", "ringmaster", "self_clocked", "wagma", "decoupled"):
        # Groups that are made as workers come run side by side, and end in another order than they began.
        assert (sorted(versions) if name == "self_clocked" else versions) == list(range(len(versions)))
    if case.strategy.name == "decoupled":
        assert all(age == 0 for r in run.trace.rounds for age in r.staleness.values())
    if case.strategy.name == "ringmaster":
        of: Any = case.strategy.settings
        R = {None: math.inf, "workers": case.workers // of["per_node"]}.get(of["threshold"], of["threshold"])
        assert all(age < R for r in run.trace.rounds for age in r.staleness.values())
    if case.strategy.settings.get("sync") == "bounded":
        how: Any = case.strategy.settings
        every = how["sync_every"] if case.strategy.name == "eager" else how["tau"]
        bound = how["staleness"] if how["staleness"] is not None else every
        assert all(age <= bound for r in run.trace.rounds for age in r.staleness.values())
