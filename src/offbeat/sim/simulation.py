"""``simulate``: a method in virtual time; and ``replay``: a recorded run once more, in its own order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat import delays as delays_
from offbeat.basics import checks, draw
from offbeat.delays import Seconds
from offbeat.delays.faults import Faults
from offbeat.delays.faults import parse as parse_faults
from offbeat.method.replica import Replica
from offbeat.method.strategy import Method
from offbeat.runs.order import About, Order, Told, digest, sampled
from offbeat.runs.result import Run
from offbeat.runs.trace import Trace
from offbeat.sim.clock import Clock, Decides
from offbeat.sim.fleet import Fleet
from offbeat.sim.network import Network
from offbeat.sim.observing import Observer
from offbeat.sim.replay.mismatch import Mismatch
from offbeat.sim.replay.recorded import Recorded
from offbeat.sim.workers import Work
from offbeat.sim.world import Deadlock, World
from offbeat.strategies import as_method
from offbeat.tasks.task import Task
from offbeat.tensors.houses import mean_of_hosts
from offbeat.tensors.vector import Vec


def simulate(
    method: Method | str | None = None,
    task: Task | None = None,
    workers: int = 8,
    steps: int | None = None,
    *,
    samples: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    compute_s: Seconds = 0.1,
    delays: Seconds | None = None,
    network: Network | None = None,
    parameters: int = 1_000_000,
    spans: bool = False,
    rounds: bool = True,
    watch_s: float | None = None,
    record: str | Path | None = None,
    faults: Faults | str | None = None,
    strategy: Method | str | None = None,
) -> Run:
    """Run ``method`` on ``workers`` simulated workers, in virtual time.

    One of ``steps``, ``samples`` and ``seconds`` ends the run.

    Args:
        method: A method, or its name in words, ``"wagma:tau=5"``. The default is that of ``ob.attach``.
        task: What is learned. ``None`` simulates time alone.
        workers: How many there are.
        steps: The gradients of each worker.
        samples: The gradients of all workers together. A worker that is free takes the next one, and a task's schedule
            follows the steps of all.
        seconds: The virtual time at the end.
        seed: The seed of weights, delays and every random choice.
        compute_s: A step's computation: a number, a distribution (``ob.delays``) or a function of (step, rank).
        delays: What is added to it, before the computation; the same kinds of values.
        network: The links between workers.
        parameters: Without a task: how many float32 numbers the model has.
        spans: Whether ``run.trace`` keeps each worker's timeline, and over time the loss, the spread of the replicas
            and the period of adaptive averaging.
        rounds: Whether ``run.trace`` keeps the rounds.
        watch_s: How often, in virtual time, the mean of all replicas is evaluated, for ``run.curve``.
        record: A folder for the order of events, for ``ob.replay``.
        faults: Who dies when, and who comes back, in words: ``"rank 3 dies at 40s, back at 60s"``, ``"mtbf 300s, back
            after 30s"``. The others go on. Whole hosts die, too, ``"host 1 dies at 40s"``, or cannot hear each other,
            ``"hosts 0 and 1 part at 40s, for 20s"``: one side goes on, and the other stops meanwhile.
        strategy: Another name of ``method``.
    """
    method = as_method(method, strategy)
    if task is not None and not isinstance(task, Task):
        raise TypeError(f"{task!r} is not a task; use ob.Task(…), ob.tasks.digits(), or None for time alone")
    checks.workers(workers)
    if record is not None and task is None:
        raise ValueError("a run without a task has no weights that a replay could end with; give it a task")
    if record is not None and task is not None and task.scheduler is not None and samples is not None:
        raise ValueError(
            f"the schedule of task {task.name!r} follows the steps of all workers where the run ends by samples="
            f"{samples}, and a replay does not know them; give steps=, or leave out record"
        )
    if record is not None and faults is not None:
        raise ValueError("a run in which workers die cannot be replayed; leave out record, or faults")
    faults = parse_faults(faults) if isinstance(faults, str) else faults
    if faults is not None:
        faults.check(workers, seed, None if network is None else network.hosts)
    told = [Told() for _ in range(workers)] if record is not None else None
    scene = _Scene(
        method,
        task,
        workers,
        seed,
        steps if samples is None else samples // workers,
        delays_.bind(compute_s, seed=seed, workers=workers, what="compute_s"),
        delays_.bind(delays, seed=seed, workers=workers, what="delays"),
        network or Network(),
        parameters,
        shared=samples is not None,
        faults=faults,
    )
    gradients = steps * workers if steps is not None else samples
    run = _run(scene, _ending(steps, samples, seconds), gradients, spans, rounds, watch_s, lambda _: Clock(told))
    if record is not None and told is not None and task is not None:
        for own, taken in zip(told, run.gradients, strict=True):
            own.gradients = taken
        model = digest(p for p in task.build(seed).parameters() if p.requires_grad)
        about = About(str(method), method.written(), workers, seed, scene.steps, model, task.name, hosts=scene.hosts)
        Order(about, tuple(told), sampled(run.final)).write(Path(record))
    return run


def replay(
    order: Order, method: Method, task: Task, compute_s: Seconds, network: Network | None, spans: bool, rounds: bool
) -> Run:
    """Run what a record tells once more, in its own order."""
    about, gradients = order.about, [own.gradients for own in order.told]
    scene = _Scene(
        method,
        task,
        about.workers,
        about.seed,
        about.steps,
        delays_.bind(compute_s, seed=about.seed, workers=about.workers, what="compute_s"),
        delays_.bind(None, seed=about.seed, workers=about.workers, what="delays"),
        replace(network or Network(), hosts=about.hosts),
    )

    def more(rank: int, taken: int, now_s: float) -> bool:
        return taken < gradients[rank]

    def decider(fleet: Fleet | None) -> Decides:
        assert fleet is not None, "a record has a task"
        return Recorded(order.told, lambda: _equalise(fleet, range(about.workers), about.homes), about.homes)

    try:
        return _run(scene, more, sum(gradients), spans, rounds, None, decider)
    except Deadlock as error:
        raise Mismatch(f"the record cannot be followed to its end: {error}") from None


@dataclass(frozen=True)
class _Scene:
    """What is run, and on what."""

    method: Method
    task: Task | None
    workers: int
    seed: int
    steps: int | None
    compute_s: Callable[[int, int], float]
    delay_s: Callable[[int, int], float]
    network: Network
    parameters: int = 0
    shared: bool = False
    faults: Faults | None = None

    @property
    def hosts(self) -> int:
        return self.workers if self.network.hosts is None else min(self.network.hosts, self.workers)


def _run(
    scene: _Scene,
    more: Callable[[int, int, float], bool],
    gradients: int | None,
    spans: bool,
    rounds: bool,
    watch_s: float | None,
    decider: Callable[[Fleet | None], Decides],
) -> Run:
    method, task, workers, seed = scene.method, scene.task, scene.workers, scene.seed
    trace = Trace(keep_spans=spans, keep_rounds=rounds)
    fleet = Fleet(task, workers, seed) if task is not None else None
    replicas = [_replica(fleet, rank, scene) for rank in range(workers)]
    retired: dict[int, Vec] = {}
    observer = Observer(fleet, replicas, trace, gradients) if fleet and spans else None
    seen = observer or fleet
    work = Work(
        scene.compute_s,
        scene.delay_s,
        ask=fleet.ask if fleet else lambda rank, step: None,
        gradient=seen.gradient if seen else lambda rank: replicas[rank].x,
        rows=fleet.rows if fleet else lambda rank, step: 32,
        union=seen.union if seen else lambda rank, pieces: replicas[rank].x,
    )
    decides = decider(fleet)

    def twin(rank: int, other: int) -> tuple[Replica, float]:
        nbytes = fleet.take_over(rank, other) if fleet else replicas[other].model.nbytes
        me = replicas[rank] = _replica(fleet, rank, scene)
        me.go_on_as(replicas[other])
        return me, scene.network.send_s(other, rank, nbytes)

    world = World(
        replicas,
        method.body,
        more,
        work,
        scene.network,
        trace,
        retired=lambda rank: retired.__setitem__(rank, replicas[rank].x.clone()),
        decides=decides,
        twin=twin,
    )
    if fleet is not None and scene.shared:
        # Those that were begun: in step, as many as each worker has taken, as nobody begins all of the next before.
        fleet.steps_of_the_job = lambda: sum(w.taken - w.missed for w in world.workers) // workers
    if observer is not None:
        observer.now = lambda: float(world.env.now)
        observer.step = lambda rank: world.workers[rank].taken - 1
    if scene.faults is not None:
        world.befall(scene.faults.events(workers, seed, scene.hosts), scene.faults.is_endless)
    curve: list[tuple[float, Mapping[str, float]]] = []
    if watch_s is not None and fleet is not None and task is not None and task.evaluate is not None:
        world.every(watch_s, lambda now_s: curve.append((now_s, _evaluated(task, fleet.mean_model(), seed))))
    with draw.seeded(seed), contextlib.closing(world):
        world.run()
        living = [w.rank for w in world.workers if not w.is_dead]
        if fleet:
            _equalise(fleet, living, decides.homes)
        model = fleet.model(living[0]) if fleet else None
        if observer is not None and fleet is not None:
            observer.close(fleet.losses())
        return Run(
            method=str(method),
            workers=workers,
            seed=seed,
            seconds=max(w.finished_s for w in world.workers),
            finished_s=tuple(w.finished_s for w in world.workers),
            wait_s=tuple(world.wait_s),
            gradients=tuple(w.taken - w.missed for w in world.workers),
            wire_bytes=world.bytes_sent,
            curve=tuple(curve),
            lost=tuple((r, t) for p in world.partials.values() for r, t in p.lost if t < world.workers[r].taken),
            weights=torch.stack([_flat(retired[rank]) for rank in range(workers)]),
            final=_flat(replicas[living[0]].x),
            losses=fleet.losses() if fleet else torch.zeros(0, dtype=torch.float64),
            trace=trace,
            talking=tuple(me.reported.talking for me in replicas if me.reported.talking is not None),
            model=model,
            metrics=_evaluated(task, model, seed) if task is not None and model is not None else {},
            absences=world.absences,
        )


def _evaluated(task: Task, model: nn.Module, seed: int) -> dict[str, float]:
    """The task's word on a model; what is drawn for it comes from the seed alone."""
    if task.evaluate is None:
        return {}
    draw.reseed(seed, draw.cuda_of(model.parameters()))
    return dict(task.evaluate(model))


def _replica(fleet: Fleet | None, rank: int, scene: _Scene) -> Replica:
    size, seed, steps, hosts = scene.workers, scene.seed, scene.steps, scene.hosts
    if fleet is None:
        phantom = Vec((), 4 * scene.parameters)
        return Replica(rank, size, phantom, Vec(()), lambda g: None, list, seed, steps, hosts=hosts)
    return Replica(
        rank,
        size,
        fleet.x[rank],
        fleet.buffers[rank],
        lambda g: fleet.update(rank, g),
        lambda: fleet.groups(rank),
        seed,
        steps,
        lambda: fleet.tick(rank),
        states=lambda: fleet.states(rank),
        slots=fleet.layout.slots,
        hosts=hosts,
    )


class _ending:
    """One of three endings; counts the gradients begun where they are what ends the run."""

    def __init__(self, steps: int | None, samples: int | None, seconds: float | None) -> None:
        given = {"steps": steps, "samples": samples, "seconds": seconds}
        named = [f"{name}={value}" for name, value in given.items() if value is not None]
        if len(named) != 1:
            said = " and ".join(named) or "none of them"
            raise ValueError(f"a run ends by one of steps=, samples= or seconds=, but {said} was given")
        for name, value in given.items():
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value} cannot end a run; use 0 or more")
        self._steps, self._samples, self._seconds = steps, samples, seconds

    def __call__(self, rank: int, taken: int, now_s: float) -> bool:
        if self._steps is not None:
            return taken < self._steps
        if self._seconds is not None:
            return now_s < self._seconds
        assert self._samples is not None
        self._samples -= 1
        return self._samples >= 0


def _equalise(fleet: Fleet, living: Sequence[int], homes: Sequence[int]) -> None:
    """Make all replicas equal: the mean of weights and floating buffers, the maximum of integer ones, of the living.

    Replicas that are equal already are left alone: the mean of equal numbers may round.
    """
    for table in (fleet.X, fleet.B):
        for part in table:
            own = part[living] if len(living) < len(part) else part
            if not bool((own == own[:1]).all()):
                rows = {rank: Vec((part[rank],)) for rank in living}
                total = mean_of_hosts(rows, living, homes, len(living))
                assert total is not None, "everybody gives its weights"
                part.copy_(total.parts[0].expand_as(part))
    for part in fleet.N:
        own = part[living] if len(living) < len(part) else part
        part.copy_(own.amax(dim=0, keepdim=True).expand_as(part) if part.numel() else part)


def _flat(x: Vec) -> Tensor:
    return torch.cat([p.detach() for p in x.parts]) if x.parts else torch.zeros(0)
