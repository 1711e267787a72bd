"""Self-clocked averaging against its rivals: step times, messages, optimisers and numbers of workers, in virtual time.

    python benchmarks/study.py [--processes 2] [--stop-after SECONDS] [--keep FILE] [--json FILE]
    python benchmarks/study.py --only self-clocked --merge records/study.json --processes 16 --json FILE

Digits (hidden layer of 32, batch of 16 each), 100 median steps of virtual time. Step times: two profiles of everybody
late now and then, one of a worker in 16 that is 2.5 times slower for good, one of four speeds, Pareto, log-normal.
A message (one copy of the model on the wire) is free, or takes 0.5, 2 or 8 median steps; latency next to nothing;
all-reduces go by halving and doubling. SGD with momentum 0.9, or AdamW.

* *Cells.* All 24 pairs of step times i = 0 … 5 and message j = 0 … 3, each once. The other two factors follow from
  i and j by a rule that is fixed here: AdamW where i + ⌊j/2⌋ is odd; 8, 32 or 128 workers as ⌊i/2⌋ + j leaves 0, 1
  or 2 by 3. So every pair of levels of any two factors occurs. The fewest workers are run first, and among equals those
  with i + j even; where the time ends before the list does, what is left out is its end, cells of 128 workers.
* *Tuning.* Every method is tried on seed 0 with the same four learning rates of its optimiser, each twice the one
  before, and with twice or half the best while that lies at the end of those tried, three times at most. The rate with
  the lowest loss is kept.
* *Figures* are medians over the seeds 1, 2, 3, which the tuning has not seen. *Loss* is that of the mean of all
  replicas on held-out data, after the run's ending (what is under way when the time is over is let in), as in scale.py;
  *at time* is the same at the very moment, for methods whose late workers hold older weights a disadvantage.
* *Gradients*: the share of those that would have been taken if nobody ever waited. *MB*: sent by all workers.
* *To rival*: the share of the time after which the loss falls below the final loss of the cell's best rival (the one
  with the lowest median, which is chosen after the fact and so is a little lucky).
* *--merge*: rows of methods that are not run again come from a record, as they were; cells that it does not have are
  run with all methods.
* *Against the best rival*: "lower" or "higher" where that is so with every seed (same data, same step times, same first
  weights), "alike" where seeds disagree. *Within the spread*: the median is at or below the rival's median plus the
  larger range of the two over seeds. Smaller differences mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Report, arguments, median
from scale import reached

import offbeat as ob

TIMES = {
    "bytedance-se": ob.delays.profile("bytedance-se", 1.0),
    "bytedance-se-micro": ob.delays.profile("bytedance-se-micro", 1.0),
    "bytedance-ar": ob.delays.profile("bytedance-ar", 1.0),
    "async-diloco": ob.delays.profile("async-diloco", 1.0),
    "pareto": ob.delays.pareto(0.68, 1.8, 20.0),
    "lognormal": ob.delays.lognormal(1.0, 0.5),
}
MESSAGES = (0.0, 0.5, 2.0, 8.0)
OPTIMISERS = ("momentum", "AdamW")
WORKERS = (8, 32, 128)
RATES = {"momentum": (0.05, 0.1, 0.2, 0.4), "AdamW": (0.005, 0.01, 0.02, 0.04)}
UNITS, POINTS, HIDDEN, BATCH, FURTHER = 100.0, 40, 32, 16, 3

RIVALS = {
    "all-reduce": ob.allreduce(),
    "local SGD 8": ob.local_sgd(8),
    "DaSGD 8/4 correct": ob.dasgd(8, 4, merge="correct"),
    "AD-PSGD": ob.ad_psgd(),
    "SGP": ob.sgp(),
    "eager 1/2": ob.eager(wait=0.5, sync="bounded", staleness=20),
    "eager 1/2 late": ob.eager(wait=0.5, sync="bounded", staleness=20, late=1),
    "WAGMA 1/8 pairs correct": ob.wagma(wait=0.125, group=2, merge="correct", sync="bounded", staleness=20),
    "Ringmaster": ob.ringmaster(),
    "Decoupled": ob.decoupled(),
}
DEFAULT = "self-clocked"
OURS = {
    DEFAULT: ob.self_clocked(),
    "self-clocked period 1": ob.self_clocked(period=1),
    "self-clocked period 1 squares 4": ob.self_clocked(period=1, squares=4),
    "self-clocked pause 0": ob.self_clocked(pause=0.0),
    "self-clocked spread": ob.self_clocked("spread"),
    "self-clocked by a schedule": ob.self_clocked(meet="all", pause=0.0),
}
ALL = {**RIVALS, **OURS}


@dataclass(frozen=True)
class Cell:
    times: str
    message: float
    optimiser: str
    workers: int

    def __str__(self) -> str:
        cost = f"a message takes {self.message:g} steps" if self.message else "messages are free"
        return f"{self.times}, {cost}, {self.optimiser}, {self.workers} workers"


def design() -> list[Cell]:
    """The cells in the order in which they are run."""
    cells: list[tuple[int, int, Cell]] = []
    for i, times in enumerate(TIMES):
        for j, message in enumerate(MESSAGES):
            optimiser, workers = OPTIMISERS[(i + j // 2) % 2], WORKERS[(i // 2 + j) % 3]
            cells.append((workers, (i + j) % 2, Cell(times, message, optimiser, workers)))
    return [cell for *_, cell in sorted(cells, key=lambda c: c[:2])]


@dataclass(frozen=True)
class Job:
    """One run; with a curve and its share of gradients if it is one of the figures."""

    cell: Cell
    name: str
    rate: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    job: Job
    loss: float
    at_time: float
    accuracy: float
    share: float
    sent: int
    curve: tuple[float, ...]
    took_s: float


def run(job: Job) -> Outcome:
    torch.set_num_threads(1)
    began, cell, figure = time.perf_counter(), job.cell, job.seed > 0
    task = ob.tasks.digits(batch=BATCH, hidden=HIDDEN, lr=job.rate, momentum=0.9, seed=job.seed)
    if cell.optimiser == "AdamW":
        task = replace(task, optimizer=partial(torch.optim.AdamW, lr=job.rate))
    model_bytes = 4 * sum(p.numel() for p in task.model().parameters())
    bandwidth = model_bytes / cell.message if cell.message else 1e12
    points = POINTS if figure else 1
    done = ob.simulate(
        ALL[job.name],
        task,
        workers=cell.workers,
        seconds=UNITS,
        seed=job.seed,
        compute_s=TIMES[cell.times],
        network=ob.Network(latency_s=1e-4, bandwidth_Bps=bandwidth, algorithm="halving_doubling"),
        rounds=False,
        watch_s=UNITS / points,
    )
    seen = [_finite(metrics["loss"]) for _, metrics in done.curve][:points]
    last, accuracy = _finite(done.metrics["loss"]), float(done.metrics["accuracy"])
    share = sum(done.gradients) / nobody_waits(cell, job.seed) if figure else math.nan
    sent = done.wire_bytes
    at_time = seen[points - 1] if len(seen) == points else last
    del done
    gc.collect()
    curve = (*seen[: points - 1], last)
    return Outcome(job, last, at_time, accuracy, share, sent, curve, round(time.perf_counter() - began, 2))


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def nobody_waits(cell: Cell, seed: int) -> int:
    """How many gradients are begun in the time if every worker takes one after the other."""
    seconds = ob.delays.bind(TIMES[cell.times], seed=seed, workers=cell.workers, what="compute_s")
    count = 0
    for rank in range(cell.workers):
        now, step = 0.0, 0
        while now < UNITS:
            now += seconds(step, rank)
            step += 1
        count += step
    return count


class Search:
    """One method in one cell: which runs are still to be made, in the light of those that were."""

    def __init__(self, cell: Cell, name: str, seeds: int) -> None:
        self.cell, self.name, self.seeds = cell, name, seeds
        self.tried: dict[float, Outcome] = {}
        self.figures: dict[int, Outcome] = {}
        self._due, self._further, self._final = 0, 0, False

    @property
    def done(self) -> bool:
        return len(self.figures) == self.seeds

    @property
    def best(self) -> float:
        return min(self.tried, key=lambda rate: self.tried[rate].loss)

    @property
    def at_the_end(self) -> bool:
        return self.best in (min(self.tried), max(self.tried))

    def first(self) -> list[Job]:
        jobs = [Job(self.cell, self.name, rate, 0) for rate in RATES[self.cell.optimiser]]
        self._due = len(jobs)
        return jobs

    def after(self, outcome: Outcome) -> list[Job]:
        """Take the outcome of a run; the runs that follow from it."""
        job = outcome.job
        if job.seed:
            self.figures[job.seed] = outcome
            return []
        self.tried[job.rate] = outcome
        self._due -= 1
        if self._due:
            return []
        if self.at_the_end and self._further < FURTHER:
            self._further += 1
            self._due = 1
            factor = 0.5 if self.best == min(self.tried) else 2.0
            return [Job(self.cell, self.name, self.best * factor, 0)]
        return [Job(self.cell, self.name, self.best, seed) for seed in range(1, self.seeds + 1)]


class Recorded(Search):
    """One method in one cell, as a record has it: nothing is run."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(Cell(**row["cell"]), row["method"], len(row["losses"]))
        self.row = row
        self.tried = {float(rate): self._outcome(0, _number(loss)) for rate, loss in row["tuning"].items()}
        self.figures = {
            seed: self._outcome(seed, _number(loss), _number(row["at_time"][seed - 1]), row["share"], row["sent"])
            for seed, loss in enumerate(row["losses"], 1)
        }

    def _outcome(
        self, seed: int, loss: float, at_time: float = math.nan, share: Sequence[float] = (), sent: Sequence[int] = ()
    ) -> Outcome:
        job = Job(self.cell, self.name, self.row["rate"], seed)
        return Outcome(
            job, loss, at_time, math.nan, share[seed - 1] if share else math.nan, sent[seed - 1] if sent else 0, (), 0.0
        )

    def first(self) -> list[Job]:
        return []


def _number(written: float | None) -> float:
    return math.inf if written is None else written


def recorded(path: str, left_out: str) -> dict[tuple[Cell, str], Recorded]:
    """The rows of a record, without those of methods whose name begins like that."""
    rows = [Recorded(row) for row in json.loads(Path(path).read_text())["rows"] if "tuning" in row]
    return {(r.cell, r.name): r for r in rows if r.name in ALL and not r.name.startswith(left_out)}


class Store:
    """Keeps every outcome in a file, so that a study that was interrupted goes on where it was."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self.kept: dict[Job, Outcome] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                saved = json.loads(line)
                job = Job(**{**saved["job"], "cell": Cell(**saved["job"]["cell"])})
                self.kept[job] = Outcome(**{**saved, "job": job, "curve": tuple(saved["curve"])})

    def add(self, outcome: Outcome) -> None:
        self.kept[outcome.job] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


def carry_out(
    searches: list[Search], processes: int, stop_after: float, store: Store, told: Callable[[Search], None]
) -> None:
    """Run what the searches ask for, earlier cells first, until all is done or the time is over."""
    began = time.monotonic()
    queue: list[tuple[int, int, int, Job]] = []
    by_key = {(s.cell, s.name): (place, s) for place, s in enumerate(searches)}
    count = 0

    def ask(jobs: list[Job]) -> None:
        nonlocal count
        for job in jobs:
            place, search = by_key[job.cell, job.name]
            if job in store.kept:
                take(store.kept[job])
                continue
            heapq.heappush(queue, (cells[search.cell], -job.seed, place * 1000 + count % 1000, job))
            count += 1

    def take(outcome: Outcome) -> None:
        _, search = by_key[outcome.job.cell, outcome.job.name]
        ask(search.after(outcome))
        if search.done and outcome.job.seed:
            told(search)

    cells = {cell: i for i, cell in enumerate(dict.fromkeys(s.cell for s in searches))}
    for search in searches:
        ask(search.first())
    running: dict[Future[Outcome], Job] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        while queue or running:
            in_time = time.monotonic() - began < stop_after
            while in_time and queue and len(running) < processes + 2:
                job = heapq.heappop(queue)[-1]
                running[pool.submit(run, job)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, error = running.pop(future), future.exception()
                if error is not None:
                    print(f"! {job.name}, {job.cell}, rate {job.rate:g}: {error!r}", flush=True)
                    nothing = Outcome(job, math.inf, math.inf, 0.0, math.nan, 0, (math.inf,) * POINTS, 0.0)
                    store.add(nothing)
                else:
                    store.add(future.result())
                take(store.kept[job])


def verdict(mine: Search, other: Search) -> str:
    apart = [mine.figures[s].loss - other.figures[s].loss for s in mine.figures]
    return "lower" if all(d < 0 for d in apart) else "higher" if all(d > 0 for d in apart) else "alike"


def losses(search: Search) -> list[float]:
    return [search.figures[s].loss for s in sorted(search.figures)]


def final(search: Search) -> float:
    return median(losses(search))


def within_spread(mine: Search, other: Search) -> bool:
    ranges = [max(losses(s)) - min(losses(s)) for s in (mine, other)]
    return final(mine) <= final(other) + max(ranges)


def best_rival(found: dict[str, Search]) -> Search:
    return min((s for n, s in found.items() if n in RIVALS), key=final)


def to_rival(search: Search, target: float) -> float:
    if isinstance(search, Recorded):  # the same rival: it is on record too
        return _number(search.row["to_rival"])
    return median([reached(o.curve, target) for o in search.figures.values()])


def table(report: Report, cell: Cell, found: dict[str, Search]) -> None:
    rival = best_rival(found)
    report.row("", "")
    report.row(f"{cell}", f"best rival {rival.name}, {final(rival):.4f}")
    report.row("  method, rate", "loss   (range)         at time  acc    gradients  MB      to rival  against rival")
    for name in sorted(found, key=lambda n: -final(found[n])):
        search = found[name]
        if isinstance(search, Recorded):
            report.row(**search.row)
            continue
        figures = list(search.figures.values())
        share = to_rival(search, final(rival))
        against = "" if name in RIVALS else verdict(search, rival)
        spread = f"({min(losses(search)):.3f} … {max(losses(search)):.3f})"
        report.row(
            f"{'→' if name == DEFAULT else ' '} {name}, {search.best:g}{' (end)' if search.at_the_end else ''}",
            f"{final(search):.4f} {spread:<16} {median([o.at_time for o in figures]):.4f}  "
            f" {median([o.accuracy for o in figures]):.3f}  {median([o.share for o in figures]):.2f}"
            f"     {median([o.sent / 1e6 for o in figures]):7.2f}    {'–' if math.isinf(share) else f'{share:.2f}'}"
            f"      {against}",
            cell=asdict(cell),
            method=name,
            rate=search.best,
            tuning={f"{rate:g}": _plain(search.tried[rate].loss) for rate in sorted(search.tried)},
            losses=[_plain(x) for x in losses(search)],
            at_time=[_plain(search.figures[s].at_time) for s in sorted(search.figures)],
            share=[round(search.figures[s].share, 4) for s in sorted(search.figures)],
            sent=[search.figures[s].sent for s in sorted(search.figures)],
            to_rival=_plain(share),
        )


def _plain(number: float) -> float | None:
    return round(number, 5) if math.isfinite(number) else None


def summary(report: Report, cells: dict[Cell, dict[str, Search]]) -> None:
    report.row("", "")
    report.row(f"summary of {len(cells)} cells", "each setting of self_clocked against each cell's best rival")
    report.row(
        "  setting", "within spread  lower/alike/higher  median to rival  least gradients  MB/AD-PSGD  loss/rival"
    )
    chronic = [c for c in cells if c.times in ("bytedance-ar", "async-diloco")]
    for name in OURS:
        pairs = [(found[name], best_rival(found)) for found in cells.values()]
        marks = [verdict(s, r) for s, r in pairs]
        times = [to_rival(s, final(r)) for s, r in pairs]
        share = min(o.share for s, _ in pairs for o in s.figures.values())
        sent = [found[name].figures[1].sent / found["AD-PSGD"].figures[1].sent for found in cells.values()]
        ratio = statistics.geometric_mean([final(s) / final(r) for s, r in pairs])
        slow = [to_rival(cells[c][name], final(best_rival(cells[c]))) for c in chronic]
        report.row(
            f"  {name}",
            f"{sum(within_spread(s, r) for s, r in pairs)} of {len(pairs)}       "
            f"{marks.count('lower')}/{marks.count('alike')}/{marks.count('higher')}             "
            f"{median(times):.3f}            {share:.3f}            {median(sent):.2f}        {ratio:.3f}",
            median_to_rival_where_some_are_slow_for_good=_plain(median(slow)) if slow else None,
            sent_over_ad_psgd=[round(s, 3) for s in sent],
        )
        if slow:
            report.row("    to rival where some are slow for good (ar, async-diloco)", f"{median(slow):.3f}")
    report.row("", "")
    report.row("  loss over the best rival's, median of seeds, by level (geometric mean)", "")
    levels: dict[str, Callable[[Cell], object]] = {
        "message": lambda c: c.message,
        "times": lambda c: c.times,
        "optimiser": lambda c: c.optimiser,
        "workers": lambda c: c.workers,
    }
    for what, level in levels.items():
        for value in dict.fromkeys(level(c) for c in cells):
            of = [found for c, found in cells.items() if level(c) == value]
            ratios = {
                n: statistics.geometric_mean([final(f[n]) / final(best_rival(f)) for f in of])
                for n in (*OURS, "AD-PSGD", "local SGD 8", "WAGMA 1/8 pairs correct")
            }
            report.row(
                f"  {what} {value} ({len(of)} cells)",
                "  ".join(f"{n} {r:.2f}" for n, r in ratios.items()),
                ratios=ratios,
            )
    report.row("", "")
    report.row(f"  {DEFAULT} against each rival", "lower/alike/higher  loss over the rival's (geometric mean)")
    for name in ALL:
        if name != DEFAULT:
            marks = [verdict(found[DEFAULT], found[name]) for found in cells.values()]
            ratio = statistics.geometric_mean([final(f[DEFAULT]) / final(f[name]) for f in cells.values()])
            counts = "/".join(str(marks.count(m)) for m in ("lower", "alike", "higher"))
            report.row(f"  {name}", f"{counts:<18}  {ratio:.3f}", ratio=round(ratio, 4))
    report.row("", "")
    report.row("  MB over AD-PSGD's, by message", "least … most over cells; in brackets MB per gradient over AD-PSGD's")
    for name in OURS:
        shown = []
        for message in sorted({c.message for c in cells}):
            of = [found for c, found in cells.items() if c.message == message]
            sent = [f[name].figures[1].sent / f["AD-PSGD"].figures[1].sent for f in of]
            taken = [f["AD-PSGD"].figures[1].share / f[name].figures[1].share for f in of]
            each = median([x * y for x, y in zip(sent, taken, strict=True)])
            shown.append(f"{message:g}: {min(sent):.2f} … {max(sent):.2f} ({each:.2f})")
        report.row(f"  {name}", "   ".join(shown))
    report.row("", "")
    wins: dict[str, list[str]] = {}
    for cell, found in cells.items():
        wins.setdefault(best_rival(found).name, []).append(str(cell))
    for name, where in sorted(wins.items(), key=lambda w: -len(w[1])):
        report.row(f"  best rival in {len(where)}: {name}", "; ".join(where))
    report.row("", "")
    above = {c: f for c, f in cells.items() if final(f[DEFAULT]) > final(best_rival(f))}
    report.row(f"  {DEFAULT}: median below the best rival's in", f"{len(cells) - len(above)} of {len(cells)}")
    ahead = sum(at_time(f[DEFAULT]) <= min(at_time(f[n]) for n in RIVALS) for f in cells.values())
    report.row("  the same by the loss at the very moment", f"{ahead} of {len(cells)}")
    for cell, found in above.items():
        rival = best_rival(found)
        report.row(
            f"  above: {cell}",
            f"{_losses(found[DEFAULT])} against {_losses(rival)} of {rival.name}: {verdict(found[DEFAULT], rival)}",
        )
    ends = [f"{s.name} in {c}" for c, f in cells.items() for s in f.values() if s.at_the_end]
    report.row(f"  best rate at the end of those tried: {len(ends)} of {len(cells) * len(ALL)}", "; ".join(ends))


def at_time(search: Search) -> float:
    return median([o.at_time for o in search.figures.values()])


def _losses(search: Search) -> str:
    return " ".join(f"{x:.3f}" for x in losses(search))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", type=int, default=24, help="so many, from the beginning of the list")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds after which no run is begun")
    parser.add_argument("--only", default="", metavar="NAME", help="with --merge: methods whose name begins like that")
    parser.add_argument("--merge", metavar="FILE", help="take what is not run again from this record")
    parser.add_argument("--keep", metavar="FILE", help="keep every run here, and go on from what it holds")
    chosen = parser.parse_args()
    report = Report(f"study: digits, {UNITS:g} median steps of time, {chosen.seeds} seeds", chosen)
    cells = design()[: chosen.cells]
    known = recorded(chosen.merge, chosen.only or DEFAULT) if chosen.merge else {}
    searches = [known.get((cell, name)) or Search(cell, name, chosen.seeds) for cell in cells for name in ALL]
    by_cell = {cell: {s.name: s for s in searches if s.cell == cell} for cell in cells}
    whole: dict[Cell, dict[str, Search]] = {}

    def told(search: Search) -> None:
        found = by_cell[search.cell]
        if search.cell not in whole and all(s.done for s in found.values()):
            whole[search.cell] = found
            table(report, search.cell, found)
            report.close()

    store = Store(chosen.keep)
    carry_out(searches, chosen.processes, chosen.stop_after, store, told)
    if whole:
        summary(report, whole)
    report.row("", "")
    took = sum(o.took_s for o in store.kept.values())
    report.row(f"  {len(store.kept)} runs", f"{took:.0f} s of one core")
    for cell in cells:
        if cell not in whole:
            report.row("  not run to its end, in no table", str(cell))
    report.close()


if __name__ == "__main__":
    main()
