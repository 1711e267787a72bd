"""The one runner: every method of an experiment in every case, each at the rate that the same search has found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from offbeat import delays
from offbeat.delays import Seconds
from offbeat.experiments.bench import Bench
from offbeat.experiments.experiment import Case, Experiment, Size
from offbeat.experiments.figures import Figures
from offbeat.experiments.workloads import Workload
from offbeat.runs.result import Run
from offbeat.sim import Network, simulate
from offbeat.strategies import named

TUNING_SEED, FURTHER = 101, 2  # the first of the search's seeds; how often it goes on where the best rate is at an end
SAMPLED_STEPS = 200  # of which the mean step of each worker is taken


@dataclass(frozen=True)
class Found:
    """All figures of a method in a case, one for each seed; ``tried``: the search's losses, by rate."""

    figures: tuple[Figures, ...]
    tried: Mapping[float, float]

    @property
    def rate(self) -> float | None:
        return self.figures[0].rate


@dataclass(frozen=True)
class Trial:
    """One run to be made. ``label``: what the method is called in the experiment."""

    method: str
    case: Case
    size: Size
    seed: int
    rate: float | None = None
    folder: Path | None = None
    label: str = ""

    @property
    def title(self) -> str:
        rate = "" if self.rate is None else f", rate {self.rate:g}"
        return f"{self.case.name}: {self.label}{rate}, seed {self.seed}"

    def run(self) -> Figures:
        case, size, workload = self.case, self.size, self.size.workload
        start = partial(
            simulate,
            named(self.method),
            workers=case.workers,
            seed=self.seed,
            compute_s=self.compute_s,
            delays=case.delays,
            rounds=False,
        )
        if not case.learns:
            by_time = case.ends == "time"
            done = start(
                None,
                steps=None if by_time else size.timed_steps,
                seconds=size.timed_steps * case.step_s if by_time else None,
                network=case.network,
                parameters=_parameters(case),
            )
            waiting = done.wait_fraction if by_time else _waiting(done)  # nobody is done early
            return Figures(self.seed, None, done.seconds, waiting, done.wire_bytes, sum(done.gradients))
        assert workload is not None
        assert self.rate is not None
        task = workload.task(self.seed, size.batch, self.rate, size.steps, self.folder)
        by_samples, gradients = case.ends == "samples", size.steps * case.workers
        length_s = never_waiting(self, gradients) if by_samples else size.steps * case.step_s
        done = start(
            workload.watched(task, self.seed, size.batch, self.folder),
            network=_scaled(case, 4 * sum(p.numel() for p in task.build(0).parameters())),
            samples=gradients if by_samples else None,
            seconds=None if by_samples else length_s,
            watch_s=length_s / size.points,
        )
        assert task.evaluate is not None
        assert done.model is not None
        judged = task.evaluate(done.model)
        score = None
        if workload.score is not None:
            counted = workload.score[1]
            score = judged["score"] if counted is None else counted(workload.place(self.folder), done.model)
        return Figures(
            self.seed,
            self.rate,
            done.seconds,
            _waiting(done),
            done.wire_bytes,
            sum(done.gradients),
            _number(judged["loss"]),
            judged.get("accuracy"),
            None if workload.reached else _number(done.metrics["loss"]),
            _curve(done, "loss"),
            score,
            _curve(done, "reached"),
        )

    @property
    def compute_s(self) -> Seconds:
        case, workload = self.case, self.size.workload
        if case.by_content:
            assert workload is not None
            return workload.seconds(case.step_s, self.seed, self.size.batch, self.folder)
        return case.step_s if case.compute_s is None else case.compute_s


def carry_out(
    experiment: Experiment, size: Size, cases: Sequence[Case], folder: Path | None, bench: Bench
) -> dict[str, dict[str, Found]]:
    """Every method's figures, by case: runs are made on ``bench``, those of several methods at the same time.

    Rates are searched for once for each number of workers, in the first case that has so many.
    """
    if size.workload is not None:  # before the work, for their sentences
        size.workload.place(folder)
        if size.workload.check is not None:
            size.workload.check()

    def look(pair: tuple[str, int]) -> dict[str, Found]:
        label, workers = pair
        found: dict[str, Found] = {}
        tried: Mapping[float, float] = {}
        for case in (case for case in cases if case.workers == workers):
            trial = Trial(experiment.methods[label], case, size, 0, folder=folder, label=label)
            tried = tried or searched(trial, bench) if case.learns else tried
            rates = tried if case.learns else {}
            rate = best(rates) if rates else None
            count = size.seeds if case.learns else size.timed_seeds
            runs = bench.run([replace(trial, seed=seed, rate=rate) for seed in range(1, count + 1)])
            found[case.name] = Found(tuple(runs), rates)
        return found

    labels, counts = list(experiment.methods), dict.fromkeys(case.workers for case in cases)
    pairs = [(label, workers) for workers in counts for label in labels]
    found = dict(zip(pairs, bench.each(look, pairs), strict=True))
    return {case.name: {label: found[label, case.workers][case.name] for label in labels} for case in cases}


def searched(trial: Trial, bench: Bench) -> dict[float, float]:
    """The mean held-out loss of each rate: of the workload's, and further out while the best is at an end."""
    assert isinstance(trial.size.workload, Workload)
    seeds = range(TUNING_SEED, TUNING_SEED + trial.size.tuning_seeds)
    losses: dict[float, float] = {}

    def look(*rates: float) -> None:
        runs = bench.run([replace(trial, seed=seed, rate=rate) for rate in rates for seed in seeds])
        for rate in rates:
            losses[rate] = statistics.fmean(math.inf if r.loss is None else r.loss for r in runs if r.rate == rate)

    look(*trial.size.workload.rates)
    for _ in range(FURTHER):
        at = best(losses)
        if at not in (min(losses), max(losses)):
            break
        look(at / 2 if at == min(losses) else at * 2)
    return losses


def best(losses: Mapping[float, float]) -> float:
    return min(losses, key=lambda rate: losses[rate])


def never_waiting(trial: Trial, gradients: float) -> float:
    """How many seconds so many gradients take if every worker takes one after the other, whoever is late."""
    case = trial.case
    bind = partial(delays.bind, seed=trial.seed, workers=case.workers, what="a step")
    compute, late = bind(trial.compute_s), bind(case.delays)
    steps = range(SAMPLED_STEPS)
    means = [statistics.fmean(compute(t, rank) + late(t, rank) for t in steps) for rank in range(case.workers)]
    return gradients / sum(1.0 / mean for mean in means)


def _waiting(done: Run) -> float:
    """The share of the workers' time that is no computing: waiting, messages in the open, and being done early."""
    busy_s = sum(done.finished_s) - sum(done.wait_s)
    return 1.0 - busy_s / (done.workers * done.seconds) if done.seconds else 0.0


def _curve(done: Run, what: str) -> tuple[tuple[float, float], ...]:
    """Up to the end of the run, with what the final model has there; nothing where it was not looked at."""
    if what not in done.metrics:
        return ()
    seen = [(at_s, metrics[what]) for at_s, metrics in done.curve if at_s < done.seconds]
    return (*((at_s, value) for at_s, value in seen if math.isfinite(value)), (done.seconds, done.metrics[what]))


def _scaled(case: Case, own_bytes: int) -> Network:
    """The case's network, slower by as much as our model is smaller than the paper's."""
    if case.message_bytes is None:
        return case.network
    assert not callable(case.network.bandwidth_Bps)
    return replace(case.network, bandwidth_Bps=case.network.bandwidth_Bps * own_bytes / case.message_bytes)


def _parameters(case: Case) -> int:
    return 1_000_000 if case.message_bytes is None else round(case.message_bytes / 4)


def _number(loss: float) -> float | None:
    """None: it is not a number any more."""
    return loss if math.isfinite(loss) else None
