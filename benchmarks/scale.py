"""1,024 simulated workers with real gradients, three kinds of step times, every method at its own best learning rate.

    python benchmarks/scale.py [--workers 1024] [--units 60] [--seeds 3] [--processes 2] [--json FILE]

Virtual time is counted in units of a median step. Each method is first tried with every learning rate on one seed; the
rate with the lowest final loss of the mean model is then used for all seeds. "To rival" is the share of the run after
which a method's loss falls below the final loss of the best method that is not ours.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from functools import partial

import torch
from harness import Report, arguments, median

import offbeat as ob

RATES = (0.2, 0.4, 0.8, 1.6, 3.2)
KINDS = {
    "tail": ob.delays.bimodal(1.0, 4.0, 0.02),
    "lognormal": ob.delays.lognormal(1.0, 0.5),
    "pareto": ob.delays.pareto(0.68, 1.8, 20.0),
}
NAMES = {"tail": "2 % of steps take 4×", "lognormal": "log-normal, σ = 0.5", "pareto": "Pareto, α = 1.8, cut at 20×"}
RIVALS = {
    "allreduce": ob.allreduce(),
    "local_sgd(1)": ob.local_sgd(period=1),
    "local_sgd(10)": ob.local_sgd(period=10),
    "dpsgd ring": ob.dpsgd(),
    "sgp": ob.sgp(),
    "ad_psgd": ob.ad_psgd(),
    "eager solo (paper)": ob.eager(wait="first", catch_up="every_step", apply="latest"),
    "eager majority (paper)": ob.eager(wait="majority", catch_up="every_step", apply="latest"),
    "wagma (paper)": ob.wagma(catch_up="every_step"),
}
OURS = {
    "eager ½, K = 20": ob.eager(wait=0.5, sync="bounded", staleness=20),
    "eager ¼, K = 20": ob.eager(wait=0.25, sync="bounded", staleness=20),
    "eager ¾, K = 20": ob.eager(wait=0.75, sync="bounded", staleness=20),
    "wagma ½, K = 20": ob.wagma(wait=0.5, sync="bounded", staleness=20),
    "wagma ½, K = 20, correct": ob.wagma(wait=0.5, sync="bounded", staleness=20, merge="correct"),
}


@dataclass(frozen=True)
class Outcome:
    name: str
    kind: str
    rate: float
    seed: int
    loss: float
    accuracy: float
    gradients: int
    curve: tuple[tuple[float, float], ...]  # (time, loss of the mean model)


def run(job: tuple[str, str, float, int], workers: int, units: float, batch: int, points: int) -> Outcome:
    """One run; the mean of all replicas is evaluated ``points`` times on the way."""
    torch.set_num_threads(1)
    name, kind, rate, seed = job
    task = ob.tasks.digits(batch=batch, lr=rate)
    strategy = {**RIVALS, **OURS}[name]
    done = ob.simulate(
        strategy,
        task,
        workers=workers,
        seconds=units,
        seed=seed,
        compute_s=KINDS[kind],
        network=ob.Network(latency_s=1e-4, bandwidth_Bps=1e12),
        rounds=False,
        watch_s=units / points,
    )
    curve = [(at, _finite(metrics["loss"])) for at, metrics in done.curve if at < units]
    curve.append((units, _finite(done.metrics["loss"])))
    return Outcome(
        name, kind, rate, seed, curve[-1][1], float(done.metrics["accuracy"]), sum(done.gradients), tuple(curve)
    )


def _finite(loss: float) -> float:
    return loss if loss == loss else float("inf")


def reached(curve: tuple[tuple[float, float], ...], target: float) -> float:
    """When the loss falls below ``target``, between two looks in a straight line; infinity if never."""
    before, above = 0.0, float("inf")
    for at, loss in curve:
        if loss <= target:
            if above == float("inf") or above == loss:
                return at
            return before + (at - before) * (above - target) / (above - loss)
        before, above = at, loss
    return float("inf")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--units", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--points", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kinds", default="tail,lognormal,pareto")
    chosen = parser.parse_args()
    report = Report(f"scale: {chosen.workers} workers, {chosen.units:g} units of time", chosen)
    kinds = chosen.kinds.split(",")
    names = [*RIVALS, *OURS]
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        look = partial(run, workers=chosen.workers, units=chosen.units, batch=chosen.batch, points=1)
        search = [(n, k, r, 0) for k in kinds for n in names for r in RATES]
        best: dict[tuple[str, str], Outcome] = {}
        for outcome in pool.imap_unordered(look, search):
            key = (outcome.name, outcome.kind)
            if key not in best or outcome.loss < best[key].loss:
                best[key] = outcome
        again = [(n, k, best[n, k].rate, s) for k in kinds for n in names for s in range(chosen.seeds)]
        full = partial(run, workers=chosen.workers, units=chosen.units, batch=chosen.batch, points=chosen.points)
        outcomes = pool.map(full, again, chunksize=1)
    for kind in kinds:
        mine = {n: [o for o in outcomes if o.kind == kind and o.name == n] for n in names}
        final = {n: median([o.loss for o in found]) for n, found in mine.items()}
        rival = min(RIVALS, key=lambda n: final[n])
        report.row(f"{NAMES[kind]}: best rival {rival}", f"final loss {final[rival]:.4f}")
        for n in names:
            times = [reached(o.curve, final[rival]) for o in mine[n]]
            share = median(times) / chosen.units
            wanted = ("at most ⅓", 1 / 3) if kind == "pareto" else ("at most ½", 1 / 2)
            target, limit = ("", None) if n in RIVALS else wanted
            report.row(
                f"  {n} (rate {best[n, kind].rate})",
                f"loss {final[n]:.4f} acc {median([o.accuracy for o in mine[n]]):.3f} to rival {share:.2f}",
                target,
                None if limit is None else share <= limit,
                gradients=median([o.gradients for o in mine[n]]),
                curves=[o.curve for o in mine[n]],
                losses=[o.loss for o in mine[n]],
            )
    report.close()


if __name__ == "__main__":
    main()
