"""Storms: runs in virtual time that are drawn from a seed, in which workers die and come back, and what must hold then.

A storm is any method with any settings, one to nine workers, and some kinds of faults, not all of them. Every sample
has a coordinate of its own, in which its gradient is −1; one more coordinate, the *ballast*, begins at 1 and has no
gradient. So the weights say what became of every sample, and a mean whose parts do not sum to 1 moves the ballast.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.delays.faults import Death, Faults, Parting
from offbeat.sim import simulation
from offbeat.sim.fleet import Fleet
from offbeat.sim.workers import Worker
from offbeat.sim.world import Deadlock, World
from offbeat.tensors.vector import Vec
from tests.support import methods

STEP_S = 0.1
MOST_STEPS = 24
EVENTS_PER_STEP = 3_000  # of a worker; one that needs more goes on for ever
CLOSE = 1e-9
LATE_S = 1.5  # by when a round that began before has ended

KINDS = ("host", "parts", "one", "one, back", "rank 0", "several", "several, back", "again", "mtbf", "mtbf, back")
LATENESS = ("none", "none", "1 rank 50ms", "rank 0 90ms", "lognormal 30ms 1", "exponential 40ms", "30% 100ms")

# Sums of gradients that all apply alike: what is in one replica is in all. Means of weights: what is in one may have
# any share in another, but never more than 1. Of the others only the ballast is known.
SUMS = ("allreduce", "eager", "msync", "ringmaster")
MEANS = ("local_sgd", "dasgd", "adaptive", "dpsgd", "sgp", "wagma", "self_clocked")


class Broken(AssertionError):
    """A promise was."""


@dataclass(frozen=True)
class Storm:
    """``fates``: the kinds of faults that were drawn, for the count."""

    name: str
    settings: Mapping[str, Any]
    workers: int
    steps: int
    faults: str
    lateness: str = "none"
    latency_s: float = 1e-4
    bandwidth_Bps: float = 1e9
    seed: int = 0
    hosts: int | None = None
    fates: tuple[str, ...] = field(default=(), compare=False)

    @property
    def method(self) -> ob.Strategy:
        return ob.strategy(self.name, **self.settings)

    @property
    def events(self) -> Faults:
        found = ob.delays.faults.parse(self.faults)
        return Faults() if found is None else found

    def __str__(self) -> str:
        return (
            f"{self.method}, {self.workers} workers, {self.steps} steps, late: {self.lateness}, "
            f"{self.latency_s:g} s a message; {self.faults}"
        )


def drawn(number: int) -> Storm:
    """The storm of a seed."""
    draw = random.Random(number)
    workers, steps = draw.randint(1, 9), draw.randint(1, MOST_STEPS)
    name = draw.choice([*ob.STRATEGIES, *["eager"] * 6])  # what is owed is the most that can be lost, or count twice
    while True:
        try:
            made = methods.drawn(name, workers, lambda options: draw.choice(list(options)))
            break
        except ValueError:
            continue
    settings = dict(made.settings)
    settings.update({key: 1 for key in settings if key == "per_node"})  # where no death is taken
    if settings.get("codec") is not None:
        settings["codec"] = draw.choice([None, None, None, "bf16", "int8", "qsgd8"])
    faults, fates = Faults(), list[str]()
    hosts = draw.choice([None, 1, 2, 2, 3, 4])
    hosts = None if hosts is None or hosts > workers else hosts
    for kind in draw.sample(KINDS, draw.randint(1, 3)):
        more = _joined(faults, _of_kind(kind, workers, steps, hosts or workers, draw))
        try:
            more.check(workers, number, hosts)
        except ValueError:
            continue
        fates += [kind] if more != faults else []
        faults = more
    return Storm(
        name,
        settings,
        workers,
        steps,
        str(faults) or "none",
        draw.choice(LATENESS),
        draw.choice([0.0, 1e-4, 0.01, 0.05]),
        draw.choice([1e9, 1e9, 2e4]),
        number,
        hosts,
        tuple(fates),
    )


def _of_kind(kind: str, workers: int, steps: int, hosts: int, draw: random.Random) -> Faults:
    def moment(longest_s: float) -> float:
        """Some at the very moments at which steps are over."""
        at_s = draw.random() * longest_s
        return round(round(at_s / STEP_S) * STEP_S, 3) if draw.random() < 0.3 else round(at_s, 3)

    at_s, absent_s = moment(STEP_S * steps * 1.2), max(0.001, moment(STEP_S * 6))
    who = draw.randrange(workers)
    match kind:
        case "host":
            return Faults(hosts=(Death(draw.randrange(hosts), at_s, draw.choice([None, absent_s, absent_s])),))
        case "parts":
            sides = draw.sample(range(hosts), hosts)
            first, last = draw.randint(1, hosts), draw.randint(1, hosts)
            one, other = tuple(sides[:first]), tuple(sides[first : first + last])
            return Faults(parts=(Parting(one, other, at_s, absent_s),)) if other else Faults()
        case "one":
            return Faults(dies=(Death(who, at_s),))
        case "one, back":
            return Faults(dies=(Death(who, at_s, absent_s),))
        case "rank 0":
            return Faults(dies=(Death(0, at_s, draw.choice([None, absent_s])),))
        case "several":
            return Faults(ranks=(Death(draw.randint(1, workers), at_s),))
        case "several, back":
            return Faults(ranks=(Death(draw.randint(1, workers), at_s, absent_s),))
        case "again":  # it dies as it comes back, or soon after
            soon_s = at_s + absent_s + draw.choice([0.0, 0.001, 0.05, 0.15])
            return Faults(dies=(Death(who, at_s, absent_s), Death(who, round(soon_s, 3), absent_s)))
        case "mtbf":
            return Faults(mtbf_s=round(0.05 + moment(STEP_S * steps), 3))
        case _:
            return Faults(mtbf_s=round(0.05 + moment(STEP_S * steps), 3), mtbf_absent_s=absent_s)


def _joined(one: Faults, other: Faults) -> Faults:
    mtbf = one if other.mtbf_s is None else other
    hosts, parts = one.hosts + other.hosts, one.parts + other.parts
    return Faults(one.dies + other.dies, one.ranks + other.ranks, mtbf.mtbf_s, mtbf.mtbf_absent_s, hosts, parts)


def without_each(storm: Storm) -> Sequence[Storm]:
    """It, each time without one of its faults."""
    parts = storm.faults.split(" + ")
    if storm.faults == "none":
        return []
    return [
        replace(storm, faults=" + ".join(parts[:k] + parts[k + 1 :]) or "none", fates=()) for k in range(len(parts))
    ]


# Counting.


class _Slots(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count + 1, dtype=torch.float64))
        with torch.no_grad():
            self.w[-1] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.w[x]


@dataclass
class Counts:
    """What was seen of a run. A sample is its slot: ``(rank * MOST_STEPS + batch) * rows + row``."""

    workers: int
    rows: int
    begun: dict[int, float] = field(default_factory=dict)  # samples, and when
    made: set[int] = field(default_factory=set)  # samples whose gradient its worker has had
    died: int = 0  # faults that came in time
    died_coming: int = 0  # back
    returned: int = 0
    due_back: list[tuple[float, int]] = field(default_factory=list)
    now_s: Callable[[], float] = lambda: 0.0

    @property
    def slots(self) -> int:
        return self.workers * MOST_STEPS * self.rows

    def of(self, rank: int, batch: int) -> range:
        first = (rank * MOST_STEPS + batch) * self.rows
        return range(first, first + self.rows)

    def begin(self, samples: range) -> None:
        if twice := self.begun.keys() & samples:
            raise Broken(f"{self.named(min(twice))} was begun twice")
        self.begun.update(dict.fromkeys(samples, self.now_s()))

    def named(self, slot: int) -> str:
        rank, batch = divmod(slot // self.rows, MOST_STEPS)
        return f"batch {batch} of rank {rank}"

    def task(self) -> ob.Task:
        return ob.Task(
            model=lambda: _Slots(self.slots),
            loss=lambda output, _: -output.mean(),
            batch=lambda rank, batch: (torch.tensor(self.of(rank, batch)), torch.zeros(self.rows)),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        )


class _Counting(Fleet):
    """Gradients without autograd, and how often each replica has taken each sample."""

    counts: Counts

    def __init__(self, task: ob.Task, workers: int, seed: int) -> None:
        super().__init__(task, workers, seed)
        self.applied = torch.zeros(workers, self.counts.slots + 1, dtype=torch.int8)

    def _evaluate(self, keys: Any, batch: list[Tensor]) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        slots = batch[0]
        grads = torch.zeros(len(keys), self.counts.slots + 1, dtype=torch.float64)
        grads.scatter_(1, slots, -1.0 / slots.shape[1])
        return {"w": grads}, torch.zeros(len(keys), dtype=torch.float64), {}

    def ask(self, rank: int, step: int) -> None:
        super().ask(rank, step)
        self.counts.begin(self.counts.of(rank, step))

    def gradient(self, rank: int) -> Vec:
        step = self._due.get(rank)
        if step is not None:
            self.counts.made.update(self.counts.of(rank, step))
        return super().gradient(rank)

    def union(self, rank: int, pieces: list[tuple[int, int, int, int]]) -> Vec:
        for batch, lo, hi, _ in pieces:
            self.counts.begin(self.counts.of(rank, batch)[lo:hi])
            self.counts.made.update(self.counts.of(rank, batch)[lo:hi])
        return super().union(rank, pieces)

    def update(self, rank: int, g: Vec) -> None:
        self.applied[rank] += (g.parts[0] != 0).to(torch.int8)
        super().update(rank, g)

    def take_over(self, rank: int, other: int) -> int:
        self.applied[rank] = self.applied[other]
        return super().take_over(rank, other)


class _Watched(World):
    """Looks at all replicas after every event."""

    storm: Storm
    counts: Counts
    fleet: _Counting

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._left = EVENTS_PER_STEP * self.storm.workers * (self.storm.steps + 5)
        step, self.counts.now_s = self.env.step, lambda: float(self.env.now)

        def stepped() -> None:
            step()
            self._left -= 1
            if not self._left:
                raise Broken(f"it goes on for ever: {self.env.now:g} s, and no end")
            self._look_at_all()

        self.env.step = stepped  # type: ignore[method-assign]

    def run(self) -> None:
        super().run()
        self._look_at_all()
        if is_a_sum(self.storm):
            rows = self.fleet.X[0][self._living()]
            if not bool((rows == rows[:1]).all()):
                raise Broken(f"replicas differ at the end, by {float((rows - rows[0]).abs().max()):g}")

    def die(self, rank: int, is_cut: bool = False) -> None:
        worker = self.workers[rank]
        self.counts.died += not worker.ended and worker.away_s is None
        self.counts.died_coming += not worker.ended and worker.away_s is not None
        super().die(rank, is_cut)

    def _comes_back(self, rank: int) -> None:
        if self.workers[rank].is_dead:
            self.counts.due_back.append((float(self.env.now), rank))
        super()._comes_back(rank)

    def _revive(self, rank: int, member: Worker) -> None:
        self.counts.returned += 1
        super()._revive(rank, member)

    def _living(self) -> list[int]:
        return [w.rank for w in self.workers if not w.is_dead]

    def _look_at_all(self) -> None:
        if not is_exact(self.storm):
            return
        living, now = self._living(), self.env.now
        weights = self.fleet.X[0][living]
        if self.storm.name != "sgp":  # which holds ω times them now and then
            off = (weights[:, -1] - 1.0).abs()
            if not float(off.max()) <= CLOSE:
                rank = living[int(off.argmax())]
                raise Broken(
                    f"at {now:g} s the parts of a mean at rank {rank} sum to {float(weights[:, -1][int(off.argmax())])}"
                )
        if self.storm.name in MEANS or is_a_sum(self.storm):
            twice = self.fleet.applied[living].amax(dim=0)
            if int(twice.max()) > 1:
                raise Broken(f"at {now:g} s {self.counts.named(int(twice.argmax()))} was applied twice")
            low, high = float(weights[:, :-1].min()), float(weights[:, :-1].max())
            if low < -CLOSE or (high > 1 + CLOSE and self.storm.name != "sgp"):
                slot = int((weights[:, :-1] if high > 1 + CLOSE else -weights[:, :-1]).amax(dim=0).argmax())
                raise Broken(
                    f"at {now:g} s {self.counts.named(slot)} counts {high if high > 1 + CLOSE else low:g} times"
                )


def is_exact(storm: Storm) -> bool:
    """Whether nothing is rounded on its way."""
    return storm.settings.get("codec") is None and storm.name not in ("qsgd", "sparseloco")


def is_a_sum(storm: Storm) -> bool:
    """Whether all replicas apply the same sums of gradients, each once."""
    if storm.name == "nonblocking":
        return is_exact(storm) and storm.settings["over"] == "allreduce"
    return is_exact(storm) and storm.name in SUMS and storm.settings.get("apply") != "latest"


# A run, and what must hold.


def run(storm: Storm) -> tuple[ob.Run, Counts]:
    """The storm, watched; ``Broken`` where something does not hold."""
    method = storm.method
    counts = Counts(storm.workers, 4 if method.facts.cuts_batches else 1)
    fleets = list[_Counting]()

    class TheFleet(_Counting):
        def __init__(self, *args: Any) -> None:
            self.counts = counts
            super().__init__(*args)
            fleets.append(self)

    class TheWorld(_Watched):
        def __init__(self, *args: Any, **how: Any) -> None:
            self.storm, self.counts, self.fleet = storm, counts, fleets[-1]
            super().__init__(*args, **how)

    with mock.patch.object(simulation, "Fleet", TheFleet), mock.patch.object(simulation, "World", TheWorld):
        try:
            ran = ob.simulate(
                method,
                counts.task(),
                storm.workers,
                storm.steps,
                seed=storm.seed,
                compute_s=STEP_S,
                delays=ob.delays.parse(storm.lateness),
                network=ob.Network(latency_s=storm.latency_s, bandwidth_Bps=storm.bandwidth_Bps, hosts=storm.hosts),
                faults=storm.faults,
            )
        except Deadlock as error:
            raise Broken(f"a {error}") from error
    _judge(storm, ran, counts, fleets[-1])
    return ran, counts


def _judge(storm: Storm, ran: ob.Run, counts: Counts, fleet: _Counting) -> None:
    absent = {one.rank for one in ran.absences}
    living = [rank for rank in range(storm.workers) if rank not in dict(ran.died)]
    if len(ran.absences) != counts.died:
        raise Broken(f"{counts.died} deaths were injected, and {len(ran.absences)} are told of")
    if not ran.final.isfinite().all():
        raise Broken("the weights are not finite")
    for rank in range(storm.workers):
        if rank not in absent and ran.gradients[rank] != storm.steps:
            raise Broken(f"rank {rank} never died and took {ran.gradients[rank]} of {storm.steps} steps")
    for due_s, rank in counts.due_back:
        there = any(one.rank == rank and (one.back_s is None or one.back_s >= due_s) for one in ran.absences)
        if not there:
            raise Broken(f"rank {rank} came back at {due_s:g} s, and nobody tells of it")
    if abs(float(ran.final[-1]) - 1.0) > CLOSE and is_exact(storm):
        raise Broken(f"the parts of a mean sum to {float(ran.final[-1])}")
    if not is_exact(storm):
        return
    dropped = {slot for rank, batch in ran.lost for slot in counts.of(rank, batch)}
    cut = {slot for one in ran.absences if one.lost is not None for slot in counts.of(one.rank, one.lost)}
    if is_a_sum(storm):
        found = {slot for slot in range(counts.slots) if bool(fleet.applied[living[0], slot])}
        # What a bell has cut short is begun again. In a round that dies with its worker nothing has been handed in.
        wanted = counts.made if storm.name == "nonblocking" else counts.begun.keys() - dropped - cut
        _equal(counts, "applied and not lost", found, wanted)
        if dropped & cut:
            raise Broken(f"{len(dropped & cut)} samples are said to be lost twice")
        for rank in living:
            if not torch.equal(fleet.applied[rank], fleet.applied[living[0]]):
                raise Broken(f"ranks {living[0]} and {rank} have applied other samples")
        if storm.name not in ("msync", "nonblocking") and storm.settings.get("stale") != "fade":
            for slot in found:
                divisor = 1.0 / float(ran.final[slot])
                least, most = _alive(storm, ran, counts.begun[slot])
                least = 1 if storm.name == "allreduce" else least  # which divides by those who have data
                if abs(divisor - round(divisor)) > 1e-6 or not least <= round(divisor) <= most:
                    said = f"1/{divisor:g}, and {least} to {most} can have been alive"
                    raise Broken(f"{counts.named(slot)}, begun at {counts.begun[slot]:g} s, counts {said}")
    elif storm.name in MEANS:
        kept = {slot for slot in counts.made if slot // counts.rows // MOST_STEPS not in absent}
        gone = {slot for slot in kept if float(ran.final[slot]) < 1e-9}
        if gone and storm.settings.get("xi") not in (0.0, 1.0):  # which leave own steps out
            raise Broken(f"{len(gone)} samples of workers that never died are in no weights: {sorted(gone)[:5]}")


def _alive(storm: Storm, ran: ob.Run, since_s: float) -> tuple[int, int]:
    """The fewest and the most that can have been counted in a round from then on. Who has died is counted in one more
    round, which may have to wait for a while; who is on its way back already is.
    """
    away = [(one.died_s, math.inf if one.back_s is None else one.back_s) for one in ran.absences]
    moments = [since_s, *(at_s for one in away for at_s in one if at_s > since_s)]
    least = min(storm.workers - sum(died_s <= at_s <= back_s for died_s, back_s in away) for at_s in moments)
    gone = {one.rank for one in ran.absences if one.died_s + LATE_S < since_s and one.back_s is None}
    return max(1, least), storm.workers - len(gone)


def _equal(counts: Counts, what: str, found: Set[int], wanted: Set[int]) -> None:
    def said(slots: Set[int]) -> str:
        return ", ".join(sorted({counts.named(slot) for slot in slots})[:6])

    if missing := wanted - found:
        raise Broken(f"{what}: missing are {said(missing)}")
    if more := found - wanted:
        raise Broken(f"{what}: too many are {said(more)}")


def digest(ran: ob.Run) -> str:
    """Of everything that two equal runs have in common."""
    return f"{ran.hash} {ran.gradients} {ran.lost} {ran.absences} {len(ran.trace.rounds)}"


def check(storm: Storm, twice: bool = True) -> Counter[str]:
    """Run it, and once more; what was injected. ``Broken`` where something does not hold."""
    ran, counts = run(storm)
    if twice and digest(ran) != digest(run(storm)[0]):
        raise Broken("the same seed gave another run")
    back = sum(one.back_s is not None for one in ran.absences)
    seen = {"runs": 1, "deaths": counts.died, "deaths while coming back": counts.died_coming, "returns": back}
    return Counter({**seen, **{f"with {one}": 1 for one in storm.fates}})


def shrunk(storm: Storm) -> Storm:
    """Without the faults that are not needed for it to break."""
    for smaller in without_each(storm):
        try:
            check(smaller)
        except Exception:
            return shrunk(smaller)
    return storm
