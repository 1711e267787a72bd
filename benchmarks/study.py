"""Self-clocked averaging against its rivals: step times, messages, optimisers, workers and tasks, in virtual time.

    python benchmarks/study.py [--processes 2] [--stop-after SECONDS] [--keep FILE] [--json FILE]
    python benchmarks/study.py --only self-clocked --merge records/study.json --processes 16 --json FILE
    python benchmarks/study.py --again self-clocked --merge records/study.json --keep FILE --json FILE
    python benchmarks/study.py --cells thousand,fashion,verses --data-folder DIR --processes 16
    python benchmarks/study.py --cells chronic --tuning-seeds 3 --seeds 5 --data-folder DIR --keep FILE --json FILE
    python benchmarks/study.py --cells quick --tuning-seeds 3 --seeds 5 --processes 16 --keep FILE --json FILE

Which cells there are, and which methods run in them, is said in cells.py: ``--cells`` names its designs. Digits (hidden
layer of 32) and Fashion-MNIST (the same) with a batch of 16 each, verses as in verses.py. Latency is next to nothing;
all-reduces go by halving and doubling. ``--data-folder`` holds the four files of Fashion-MNIST (Debian's package
dataset-fashion-mnist) and the verses.

* *Tuning.* Every method is tried on seed 0 with the same four learning rates of its task and optimiser, each twice the
  one before, and with twice or half the best while that lies at the end of those tried, three times at most. The rate
  with the lowest loss is kept. ``--tuning-seeds 3``: with three seeds each, by the lowest mean.
* *Figures* are medians over the seeds 1, 2, 3, which the tuning has not seen. *Loss* is that of the mean of all
  replicas on held-out data, after the run's ending (what is under way when the time is over is let in), as in scale.py;
  *at time* is the same at the very moment, for methods whose late workers hold older weights a disadvantage.
* *Gradients*: the share of those that would have been taken if nobody ever waited. *MB*: sent by all workers.
* *To rival*: the share of the time after which the loss falls below the final loss of the cell's best rival (the one
  with the lowest median, which is chosen after the fact and so is a little lucky).
* *--merge*: rows of methods that are not run again come from a record, as they were; cells and methods that it does not
  have are run. Where a new rival is the best, a record does not say when its loss was reached: ``--again`` runs the
  figures of these methods once more there, each at the rate that the record has found for it.
* *Against the best rival*: "lower" or "higher" where that is so with every seed (same data, same step times, same first
  weights), "alike" where seeds disagree. *Within the spread*: the median is at or below the rival's median plus the
  larger range of the two over seeds. Smaller differences mean nothing.
* *One held against another* (designs of equal samples, of few workers, of grace): the median over seeds of the loss
  over the other's with the same seed, with the least and the most.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import scale
import verses
from cells import CHRONIC, DEFAULT, DESIGNS, RIVALS, Cell, Design
from harness import Report, arguments, median
from scale import reached
from searching import TUNING, Place, Recorded, Retraced, Search, Store, carry_out, number, recorded

Cells = dict[Cell, dict[str, Search]]


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
    """Where no rival is run, the best of all stands for it."""
    return min([s for n, s in found.items() if n in RIVALS] or list(found.values()), key=final)


def to_rival(search: Search, found: dict[str, Search]) -> float:
    """NaN: a record does not say it, since another rival was the best then."""
    rival = best_rival(found)
    if not isinstance(search, Recorded):
        return median([reached(o.curve, final(rival)) for o in search.figures.values()])
    on_record: dict[str, Search] = {name: s for name, s in found.items() if isinstance(s, Recorded)}
    return number(search.row["to_rival"]) if best_rival(on_record) is rival else math.nan


def known(shares: list[float]) -> list[float]:
    return [share for share in shares if not math.isnan(share)]


def table(report: Report, cell: Cell, found: dict[str, Search]) -> None:
    rival = best_rival(found)
    report.row("", "")
    report.row(f"{cell}", f"best rival {rival.name}, {final(rival):.4f}")
    report.row("  method, rate", "loss   (range)         at time  acc    gradients  MB      to rival  against rival")
    for name in sorted(found, key=lambda n: -final(found[n])):
        search, share = found[name], to_rival(found[name], found)
        shown = "?" if math.isnan(share) else "–" if math.isinf(share) else f"{share:.2f}"
        behind = f"    {shown}      {'' if name in RIVALS else verdict(search, rival)}"
        if isinstance(search, Recorded):
            before = re.sub(r" {4}\S+ {6}\w*$", "", search.row["figure"])
            report.row(**{**search.row, "figure": before + behind, "to_rival": _plain(share)})
            continue
        figures = list(search.figures.values())
        spread = f"({min(losses(search)):.3f} … {max(losses(search)):.3f})"
        report.row(
            f"{'→' if name == DEFAULT else ' '} {name}, {search.best:g}{' (end)' if search.at_the_end else ''}",
            f"{final(search):.4f} {spread:<16} {median([o.at_time for o in figures]):.4f}  "
            f" {median([o.accuracy for o in figures]):.3f}  {median([o.share for o in figures]):.2f}"
            f"     {median([o.sent / 1e6 for o in figures]):7.2f}{behind}",
            cell=asdict(cell),
            method=name,
            rate=search.best,
            tuning={f"{rate:g}": _plain(search.tuned(rate)) for rate in sorted(search.tried)},
            losses=[_plain(x) for x in losses(search)],
            at_time=[_plain(search.figures[s].at_time) for s in sorted(search.figures)],
            share=[round(search.figures[s].share, 4) for s in sorted(search.figures)],
            sent=[search.figures[s].sent for s in sorted(search.figures)],
            to_rival=_plain(share),
        )


def _plain(number: float) -> float | None:
    return round(number, 5) if math.isfinite(number) else None


def summary(report: Report, title: str, cells: Cells) -> None:
    ran = next(iter(cells.values()))
    ours = [name for name in ran if name not in RIVALS]
    report.row("", "")
    report.row(f"{title}: summary of {len(cells)} cells", "each setting of self_clocked against each cell's best rival")
    report.row(
        "  setting", "within spread  lower/alike/higher  median to rival  least gradients  MB/AD-PSGD  loss/rival"
    )
    chronic = [c for c in cells if c.times in CHRONIC]
    for name in ours:
        pairs = [(found[name], best_rival(found)) for found in cells.values()]
        marks = [verdict(s, r) for s, r in pairs]
        times = known([to_rival(found[name], found) for found in cells.values()]) or [math.nan]
        share = min(o.share for s, _ in pairs for o in s.figures.values())
        sent = [found[name].figures[1].sent / found["AD-PSGD"].figures[1].sent for found in cells.values()]
        ratio = statistics.geometric_mean([final(s) / final(r) for s, r in pairs])
        slow = known([to_rival(cells[c][name], cells[c]) for c in chronic])
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
    shown = [name for name in ("AD-PSGD", "local SGD 8", "WAGMA 1/8 pairs correct") if name in ran]
    by_level(report, cells, [*ours, *shown])
    report.row("", "")
    report.row(f"  {DEFAULT} against each rival", "lower/alike/higher  loss over the rival's (geometric mean)")
    for name in ran:
        if name != DEFAULT:
            marks = [verdict(found[DEFAULT], found[name]) for found in cells.values()]
            ratio = statistics.geometric_mean([final(f[DEFAULT]) / final(f[name]) for f in cells.values()])
            counts = "/".join(str(marks.count(m)) for m in ("lower", "alike", "higher"))
            report.row(f"  {name}", f"{counts:<18}  {ratio:.3f}", ratio=round(ratio, 4))
    bytes_sent(report, cells, ours)
    where_rivals_win(report, cells)


def by_level(report: Report, cells: Cells, names: list[str]) -> None:
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
            ratios = {n: statistics.geometric_mean([final(f[n]) / final(best_rival(f)) for f in of]) for n in names}
            report.row(
                f"  {what} {value} ({len(of)} cells)",
                "  ".join(f"{n} {r:.2f}" for n, r in ratios.items()),
                ratios=ratios,
            )


def bytes_sent(report: Report, cells: Cells, names: list[str]) -> None:
    report.row("", "")
    report.row("  MB over AD-PSGD's, by message", "least … most over cells; in brackets MB per gradient over AD-PSGD's")
    for name in names:
        shown = []
        for message in sorted({c.message for c in cells}):
            of = [found for c, found in cells.items() if c.message == message]
            sent = [f[name].figures[1].sent / f["AD-PSGD"].figures[1].sent for f in of]
            taken = [f["AD-PSGD"].figures[1].share / f[name].figures[1].share for f in of]
            each = median([x * y for x, y in zip(sent, taken, strict=True)])
            shown.append(f"{message:g}: {min(sent):.2f} … {max(sent):.2f} ({each:.2f})")
        report.row(f"  {name}", "   ".join(shown))


def where_rivals_win(report: Report, cells: Cells) -> None:
    report.row("", "")
    wins: dict[str, list[str]] = {}
    for cell, found in cells.items():
        wins.setdefault(best_rival(found).name, []).append(str(cell))
    for name, where in sorted(wins.items(), key=lambda w: -len(w[1])):
        report.row(f"  best rival in {len(where)}: {name}", "; ".join(where))
    report.row("", "")
    above = {c: f for c, f in cells.items() if final(f[DEFAULT]) > final(best_rival(f))}
    report.row(f"  {DEFAULT}: median below the best rival's in", f"{len(cells) - len(above)} of {len(cells)}")
    ahead = sum(at_time(f[DEFAULT]) <= min(at_time(s) for n, s in f.items() if n in RIVALS) for f in cells.values())
    report.row("  the same by the loss at the very moment", f"{ahead} of {len(cells)}")
    for cell, found in above.items():
        rival = best_rival(found)
        report.row(
            f"  above: {cell}",
            f"{_losses(found[DEFAULT])} against {_losses(rival)} of {rival.name}: {verdict(found[DEFAULT], rival)}",
        )
    ends = [f"{s.name} in {c}" for c, f in cells.items() for s in f.values() if s.at_the_end]
    ran = sum(len(found) for found in cells.values())
    report.row(f"  best rate at the end of those tried: {len(ends)} of {ran}", "; ".join(ends))


def one_against_another(report: Report, title: str, design: Design, cells: Cells) -> None:
    report.row("", "")
    report.row(f"{title}: loss over the other's", "median (least … most over seeds), verdict")
    for cell, found in cells.items():
        for name, other in design.against.items():
            ratios = [a / b for a, b in zip(losses(found[name]), losses(found[other]), strict=True)]
            judged = name == DEFAULT and math.isfinite(design.target)
            report.row(
                f"  {cell}: {name} over {other}",
                f"{median(ratios):.4f} ({min(ratios):.4f} … {max(ratios):.4f}) {verdict(found[name], found[other])}",
                f"at most {design.target:g}" if judged else "",
                median(ratios) <= design.target if judged else None,
                cell=asdict(cell),
                ratios=[round(r, 5) for r in ratios],
            )


def at_time(search: Search) -> float:
    return median([o.at_time for o in search.figures.values()])


def _losses(search: Search) -> str:
    return " ".join(f"{x:.3f}" for x in losses(search))


def retraced(found: dict[str, Search], names: list[str]) -> dict[str, Search]:
    """The same, but that these are to be run again if a rival of which the record knows nothing is the best."""
    changed = all(s.done for s in found.values()) and not isinstance(best_rival(found), Recorded)
    return {n: Retraced(s) if changed and n in names and isinstance(s, Recorded) else s for n, s in found.items()}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tuning-seeds", type=int, default=1, choices=range(1, len(TUNING) + 1))
    parser.add_argument("--cells", default="first", metavar="DESIGN,…", help=f"of: {', '.join(DESIGNS)}")
    parser.add_argument("--first", type=int, metavar="N", help="so many cells of each design, from its beginning")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds after which no run is begun")
    parser.add_argument("--only", default="", metavar="NAME,…", help="with --merge: run these, whatever it has of them")
    parser.add_argument(
        "--again", default="", metavar="NAME,…", help="with --merge: run these at the rates it has found"
    )
    parser.add_argument("--merge", metavar="FILE", help="take what is not run again from this record")
    parser.add_argument("--keep", metavar="FILE", help="keep every run here, and go on from what it holds")
    parser.add_argument("--data-folder", default=Place.folder, help="of Fashion-MNIST's files and the verses")
    parser.add_argument("--device", default=Place.device, help="on which replicas lie and gradients are computed")
    parser.add_argument("--quick", action="store_true", help="a few short runs of few workers: does it run?")
    chosen = parser.parse_args()
    names = chosen.cells.split(",")
    if unknown := [name for name in names if name not in DESIGNS]:
        sys.exit(f"no cells are called {unknown[0]!r}; use some of: {', '.join(DESIGNS)}")
    designs = {name: DESIGNS[name]() for name in names}
    cells = {name: design.cells[: chosen.first] for name, design in designs.items()}
    if chosen.quick:
        chosen.seeds = 1
        cells = {
            name: [replace(cell, units=4.0, workers=min(cell.workers, 8)) for cell in of[-1:]]
            for name, of in cells.items()
        }
    place = Place(chosen.data_folder, chosen.device)
    try:
        for task in {cell.task for of in cells.values() for cell in of}:
            {"fashion": scale.pictures, "verses": verses.text}.get(task, str)(place.folder)
    except ValueError as error:
        sys.exit(str(error))
    report = Report(f"study: {chosen.cells}, {chosen.seeds} seeds", chosen)
    rows = recorded(chosen.merge) if chosen.merge else {}
    anew, again = (chosen.only or ("" if chosen.again else DEFAULT)).split(","), chosen.again.split(",")
    by_cell: Cells = {}
    for name, design in designs.items():
        for cell in cells[name]:
            found = by_cell.setdefault(cell, {})
            for method in design.methods:
                row = None if method in anew else rows.get((cell, method))
                found[method] = row or Search(cell, method, chosen.seeds, chosen.tuning_seeds)
    whole: Cells = {}

    def told(cell: Cell) -> None:
        found = by_cell[cell]
        if cell not in whole and all(s.done for s in found.values()):
            whole[cell] = found
            table(report, cell, found)
            report.close()

    store, ends = Store(chosen.keep), time.monotonic() + chosen.stop_after

    def run(searches: list[Search], done: Callable[[Search], None]) -> None:
        carry_out(searches, place, chosen.processes, ends - time.monotonic(), store, done)

    if chosen.again:
        run([search for found in by_cell.values() for search in found.values()], lambda search: None)
        by_cell = {cell: retraced(found, again) for cell, found in by_cell.items()}
    for cell in by_cell:  # of which everything may be in the record
        told(cell)
    left = [search for found in by_cell.values() for search in found.values() if not search.done]
    run(left, lambda search: told(search.cell))
    for name, design in designs.items():
        of = {cell: whole[cell] for cell in cells[name] if cell in whole}
        if of and design.against:
            one_against_another(report, name, design, of)
        elif of:
            summary(report, name, of)
    report.row("", "")
    took = [outcome.took_s for job, outcome in store.kept.items() if job.cell in by_cell]
    report.row(f"  {len(took)} runs", f"{sum(took):.0f} s of one core")
    for cell in by_cell:
        if cell not in whole:
            report.row("  not run to its end, in no table", str(cell))
    report.close()


if __name__ == "__main__":
    main()
