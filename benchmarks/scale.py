"""1,024 simulated workers with real gradients, three kinds of step times, every method at its own best learning rate.

    python benchmarks/scale.py [--data digits|fashion] [--workers 1024] [--units 60] [--processes 2] [--json FILE]

Virtual time is counted in units of a median step. The network costs next to nothing: all-reduces go by halving and
doubling, 20 latencies of 0.0001 (a ring of 1,024 would spend a fifth of a step on its 2,046).

* *Tuning.* Every method, ours or not, is tried on seed 0 with the same learning rates, each twice the one before; with
  twice or half the best one while that lies at the end of those tried; then with √2 times more and less. The rate with
  the lowest final loss on held-out data is kept. Which of our settings is put forward is decided on seed 0, too.
* *Figures* are medians over the seeds 1, 2, …, which the tuning has not seen. Loss and accuracy are those of the mean
  of all replicas on held-out data: after the same time (``--units``), and in runs of their own after the same number of
  samples (half of what would be taken if every step had the median length), with the same learning rate.
* *Throughput* is the share of the gradients that would have been taken if nobody ever waited.
* *To rival* is the share of the time after which a method's loss falls below the best rival's final loss. "Nobody late"
  is all-reduce where every step takes exactly the median: what removing all waiting, and nothing else, could give.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import multiprocessing.pool
import sys
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from harness import Report, arguments, median
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat as ob
from offbeat.basics import draw

KINDS = {
    "tail": ob.delays.bimodal(1.0, 4.0, 0.02),
    "lognormal": ob.delays.lognormal(1.0, 0.5),
    "pareto": ob.delays.pareto(0.68, 1.8, 20.0),
    "none": ob.delays.constant(1.0),
}
NAMES = {"tail": "2 % of steps take 4×", "lognormal": "log-normal, σ = 0.5", "pareto": "Pareto, α = 1.8, cut at 20×"}
TARGETS = {"tail": ("at most ½", 1 / 2), "lognormal": ("at most ½", 1 / 2), "pareto": ("at most ⅓", 1 / 3)}
NOBODY_LATE = "nobody late"
RIVALS = {
    "all-reduce": ob.allreduce(),
    "local SGD 1": ob.local_sgd(period=1),
    "local SGD 10": ob.local_sgd(period=10),
    "D-PSGD ring": ob.dpsgd(),
    "SGP": ob.sgp(),
    "AD-PSGD": ob.ad_psgd(),
    "eager solo (paper)": ob.eager(wait="first", catch_up="every_step", apply="latest", grace=0),
    "eager majority (paper)": ob.eager(wait="majority", catch_up="every_step", apply="latest", grace=0),
    "WAGMA (paper)": ob.wagma(catch_up="every_step"),
}
_eager = partial(ob.eager, sync="bounded", staleness=20, grace=0)
_wagma = partial(ob.wagma, sync="bounded", staleness=20)
OURS = {
    "eager 1/2": _eager(wait=0.5),
    "eager 1/4": _eager(wait=0.25),
    "eager 1/2 fade": _eager(wait=0.5, stale="fade"),
    "eager 1/4 fade": _eager(wait=0.25, stale="fade"),
    "eager 1/8 fade": _eager(wait=0.125, stale="fade"),
    "WAGMA 1/2": _wagma(wait=0.5),
    "WAGMA 1/2 groups of 8": _wagma(wait=0.5, group=8),
    "WAGMA 1/2 correct": _wagma(wait=0.5, merge="correct"),
    "WAGMA 1/8 pairs correct": _wagma(wait=0.125, group=2, merge="correct"),
}
ALL = {**RIVALS, **OURS, NOBODY_LATE: ob.allreduce()}


@dataclass(frozen=True)
class Job:
    """One run: until ``units`` of time have passed, or ``samples`` gradients were taken if that is given."""

    name: str
    kind: str
    rate: float
    seed: int
    units: float
    workers: int
    batch: int
    momentum: float
    data: str
    folder: str
    points: int = 1
    samples: int | None = None


@dataclass(frozen=True)
class Outcome:
    job: Job
    loss: float
    accuracy: float
    gradients: int
    curve: tuple[float, ...]  # the loss after each of ``points`` equal parts of the time


def run(job: Job) -> Outcome:
    torch.set_num_threads(1)
    if job.data == "digits":
        task = ob.tasks.digits(batch=job.batch, lr=job.rate, momentum=job.momentum, seed=job.seed)
    else:
        task = fashion(job.batch, job.rate, job.momentum, job.seed, job.folder)
    done = ob.simulate(
        ALL[job.name],
        task,
        workers=job.workers,
        seconds=job.units if job.samples is None else None,
        samples=job.samples,
        seed=job.seed,
        compute_s=KINDS[job.kind],
        network=ob.Network(latency_s=1e-4, bandwidth_Bps=1e12, algorithm="halving_doubling"),
        rounds=False,
        watch_s=job.units / job.points if job.points > 1 else None,
    )
    seen = [_finite(metrics["loss"]) for _, metrics in done.curve][: job.points - 1]
    last, accuracy = _finite(done.metrics["loss"]), float(done.metrics["accuracy"])
    gradients = sum(done.gradients)
    del done
    gc.collect()  # a run's workers, trays and callbacks know each other, and 1,024 replicas are large
    return Outcome(job, last, accuracy, gradients, (*seen, last))


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


# Fashion-MNIST: Debian's package dataset-fashion-mnist, or the same four files in a folder of the user's.

FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def fashion(batch: int, rate: float, momentum: float, seed: int, folder: str) -> ob.Task:
    return ob.Task(
        model=lambda: nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)),
        loss=F.cross_entropy,
        batch=partial(_batch, batch, seed, folder),
        optimizer=partial(torch.optim.SGD, lr=rate, momentum=momentum),
        evaluate=partial(_evaluate, folder),
        name="fashion",
    )


@cache
def pictures(folder: str) -> tuple[Tensor, ...]:
    """Images (as bytes, since every process holds them) and labels, to train on and held out."""
    found = []
    for name in FILES:
        path = Path(folder) / f"{name}-ubyte.gz"
        if not path.exists():
            raise ValueError(
                f"Fashion-MNIST is not in {folder} ({path.name} is missing); "
                "apt-get install dataset-fashion-mnist brings it, or name its folder with --data-folder"
            )
        raw = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)
        of_images = "images" in name
        found.append(torch.from_numpy(raw[16:].reshape(-1, 784).copy() if of_images else raw[8:].astype(np.int64)))
    return tuple(found)


def _scaled(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.286) / 0.353  # mean and deviation of all pixels


def _batch(size: int, seed: int, folder: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    images, labels, _, _ = pictures(folder)
    generator = draw.generator(0xFA54, seed, rank, step)
    chosen = torch.randint(len(labels), (size,), generator=generator)
    return _scaled(images[chosen]), labels[chosen]


@torch.no_grad()
def _evaluate(folder: str, model: nn.Module) -> dict[str, float]:
    _, _, images, labels = pictures(folder)
    output = model(_scaled(images))
    right = (output.argmax(dim=1) == labels).double().mean().item()
    return {"loss": F.cross_entropy(output, labels).item(), "accuracy": right}


class Runner:
    """Runs jobs in a pool, and keeps their outcomes in a file: a study that was interrupted goes on where it was."""

    def __init__(self, pool: multiprocessing.pool.Pool, keep: str | None) -> None:
        self._pool, self._path = pool, Path(keep) if keep else None
        self._kept: dict[Job, Outcome] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                saved = json.loads(line)
                job = Job(**saved["job"])
                self._kept[job] = Outcome(**{**saved, "job": job, "curve": tuple(saved["curve"])})

    def run(self, jobs: list[Job]) -> list[Outcome]:
        for outcome in self._pool.imap_unordered(run, [j for j in jobs if j not in self._kept]):
            self._kept[outcome.job] = outcome
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
        return [self._kept[j] for j in jobs]


def tune(runner: Runner, jobs: list[Job], rates: tuple[float, ...]) -> dict[tuple[str, str], Outcome]:
    """The best outcome of each job over the learning rates: those given, further ones, and two next to the best."""
    tried: dict[tuple[str, str], dict[float, Outcome]] = {(j.name, j.kind): {} for j in jobs}

    def best(j: Job) -> float:
        found = tried[j.name, j.kind]
        return min(found, key=lambda rate: found[rate].loss)

    def attempt(wanted: list[Job]) -> None:
        for outcome in runner.run(wanted):
            tried[outcome.job.name, outcome.job.kind][outcome.job.rate] = outcome

    attempt([replace(j, rate=rate) for rate in rates for j in jobs])
    for _ in range(3):
        ends = [(j, min(tried[j.name, j.kind]), max(tried[j.name, j.kind])) for j in jobs]
        further = [replace(j, rate=low / 2) for j, low, _ in ends if best(j) == low]
        further += [replace(j, rate=high * 2) for j, _, high in ends if best(j) == high]
        attempt(further)
    attempt([replace(j, rate=round(best(j) * factor, 4)) for j in jobs for factor in (2**0.5, 2**-0.5)])
    return {key: min(found.values(), key=lambda o: o.loss) for key, found in tried.items()}


def nobody_waits(kind: str, seed: int, workers: int, units: float) -> int:
    """How many gradients are begun in that time if every worker takes one after the other."""
    seconds = ob.delays.bind(KINDS[kind], seed=seed, workers=workers, what="compute_s")
    count = 0
    for rank in range(workers):
        now, step = 0.0, 0
        while now < units:
            now += seconds(step, rank)
            step += 1
        count += step
    return count


def reached(curve: tuple[float, ...], target: float) -> float:
    """The share of the time after which the loss falls below ``target``, between two looks in a straight line."""
    above = math.inf
    for i, loss in enumerate(curve):
        if loss <= target:
            part = 1.0 if not math.isfinite(above) or above == loss else (above - target) / (above - loss)
            return (i + part) / len(curve)
        above = loss
    return math.inf


def table(
    report: Report, kind: str, names: list[str], best: dict[tuple[str, str], Outcome], outcomes: list[Outcome]
) -> None:
    of = {n: [o for o in outcomes if o.job.name == n and o.job.kind in (kind, "none")] for n in names}
    timed = {n: [o for o in of[n] if o.job.samples is None] for n in names}
    equal = {n: [o for o in of[n] if o.job.samples is not None] for n in names}
    final = {n: median([o.loss for o in timed[n]]) for n in names}
    rival = min((n for n in names if n in RIVALS), key=lambda n: final[n])
    ours = [n for n in names if n in OURS]
    chosen = min(ours, key=lambda n: best[n, kind].loss) if ours else ""
    report.row(f"{NAMES[kind]}: best rival {rival}", f"final loss {final[rival]:.4f}")
    report.row("  method, rate", "through-  equal time     equal samples  to rival")
    report.row("", "put       loss   acc     loss   acc     share")
    for n in sorted(names, key=lambda n: -final[n]):
        at = best[n, timed[n][0].job.kind].job.rate
        share = median([reached(o.curve, final[rival]) for o in timed[n]])
        most = [nobody_waits(o.job.kind, o.job.seed, o.job.workers, o.job.units) for o in timed[n]]
        through = median([o.gradients / m for o, m in zip(timed[n], most, strict=True)])
        target, limit = TARGETS[kind] if n == chosen else ("", None)
        report.row(
            f"{'→' if n == chosen else ' '} {n}, {at:g}",
            f"{through:4.2f}      {final[n]:.4f} {median([o.accuracy for o in timed[n]]):.3f}"
            f"   {median([o.loss for o in equal[n]]):.4f} {median([o.accuracy for o in equal[n]]):.3f}"
            f"   {'–' if math.isinf(share) else f'{share:.2f}'}",
            target,
            None if limit is None else share <= limit,
            rate=at,
            loss_when_tuned=round(best[n, timed[n][0].job.kind].loss, 5),
            losses=[round(o.loss, 5) for o in timed[n]],
            losses_at_equal_samples=[round(o.loss, 5) for o in equal[n]],
            curves=[[round(loss, 4) for loss in o.curve] for o in timed[n]],
        )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", choices=("digits", "fashion"), default="digits")
    parser.add_argument("--data-folder", default="/usr/share/datasets/fashion-mnist", help="Fashion-MNIST's four files")
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--units", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--momentum", type=float, default=0.0, help="of everybody's optimiser")
    parser.add_argument("--rates", default="0.2,0.4,0.8,1.6,3.2", help="the learning rates everybody begins with")
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sample-seeds", type=int, default=3, help="of these, how many also run to equal samples")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", metavar="FILE", help="keep every run here, and go on from what it holds")
    parser.add_argument("--kinds", default="tail,lognormal,pareto")
    parser.add_argument("--methods", default="", help=f"of: {', '.join(ALL)} (default: all)")
    chosen = parser.parse_args()
    if chosen.data == "fashion":
        try:
            pictures(chosen.data_folder)
        except ValueError as error:
            sys.exit(str(error))
    kinds, names = chosen.kinds.split(","), chosen.methods.split(",") if chosen.methods else list(ALL)
    if unknown := [n for n in names if n not in ALL] + [k for k in kinds if k not in NAMES]:
        sys.exit(
            f"nothing here is called {unknown[0]!r}; use methods of {', '.join(ALL)} and kinds of {', '.join(NAMES)}"
        )
    report = Report(f"scale: {chosen.data}, {chosen.workers} workers, {chosen.units:g} units of time", chosen)
    one = Job(
        "", "", 0.0, 0, chosen.units, chosen.workers, chosen.batch, chosen.momentum, chosen.data, chosen.data_folder
    )
    rates, half = tuple(float(r) for r in chosen.rates.split(",")), int(chosen.workers * chosen.units / 2)
    best: dict[tuple[str, str], Outcome] = {}
    outcomes: list[Outcome] = []
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        runner = Runner(pool, chosen.keep)
        for kind in kinds:
            # Those that wait least take the most gradients: begun first, they do not leave one process working alone.
            pairs = [(n, "none" if n == NOBODY_LATE else kind) for n in sorted(names, key=lambda n: n in RIVALS)]
            found = tune(runner, [replace(one, name=n, kind=k) for n, k in pairs if (n, k) not in best], rates)
            again = [replace(o.job, seed=s) for o in found.values() for s in range(1, chosen.seeds + 1)]
            full = [replace(j, points=chosen.points) for j in again]
            full += [replace(j, samples=half) for j in again if j.seed <= chosen.sample_seeds]
            outcomes += runner.run(full)
            best |= found
            table(report, kind, names, best, outcomes)
    report.close()


if __name__ == "__main__":
    main()
