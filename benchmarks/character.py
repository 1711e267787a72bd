"""A small Transformer on characters, AdamW, nobody slow: each method's held-out loss at equal samples, over DDP's.

    python benchmarks/character.py [--workers 2 4] [--seeds 3] [--keep FILE] [--json FILE]      real processes
    python benchmarks/character.py --simulated [--rates 0.002 0.004 0.008]                      virtual time
    python benchmarks/character.py --quick

The text is the reference that comes with Python (``pydoc_data.topics``), in small letters; its last tenth is held out.
One layer of width 32, 32 characters at a time, 8 rows a worker and step: a loss of about 2.0 after 400 steps of four
workers, and still falling. Live, the loop is a user's own: ``ob.attach``, ``backward()``, ``step()``, ``finish()``;
what is late is late because the processes share the cores. Simulated, steps take 0.1 s with a log-normal spread of
10 %, and all-reduce stands for DDP. Seeds decide first weights and batches, alike for all methods; a figure is the mean
over seeds of loss / DDP's loss with the same seed, with the least and the most.

With several ``--rates`` every method, DDP too, has its own best one, found with seed 0; the figures are of other seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from harness import Report, arguments, run_workers, together
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from offbeat.basics import draw

CONTEXT, WIDTH, HEADS, ROWS = 32, 32, 4, 8
STEPS, RATE, TARGET = 400, 0.004, 0.01
JITTER = ob.delays.lognormal(0.1, 0.1)
DDP = "DDP"
METHODS = {
    "self_clocked": ob.self_clocked(),
    "self_clocked squares=1": ob.self_clocked(squares=1),
    "self_clocked as with many": ob.self_clocked(period=1, group=2, pause=1.0, squares=16),
    "self_clocked as with few": ob.self_clocked(period=1, group=None, pause=0.0, squares=1024),
    "self_clocked period=1 squares=P": ob.self_clocked(period=1, squares=1024),
    "self_clocked period=1 group=4 squares=P": ob.self_clocked(period=1, group=4, squares=1024),
    "eager": ob.eager(grace=0),
    "eager late=1": ob.eager(late=1, grace=0),
    "wagma": ob.wagma(),
    "wagma merge=correct": ob.wagma(merge="correct"),
    "wagma late=1": ob.wagma(late=1),
    "local_sgd period=1": ob.local_sgd(1),
    "local_sgd": ob.local_sgd(),
    "ad_psgd": ob.ad_psgd(),
}


class Transformer(nn.Module):
    """One layer, with the letters' own vectors at its end, too."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.letters.weight, std=0.05)
        nn.init.normal_(self.places.weight, std=0.05)
        self.before, self.after, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.forward_ = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.register_buffer("later", torch.full((CONTEXT, CONTEXT), -math.inf).triu(1), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.places.weight
        rows, size = len(text), WIDTH // HEADS
        heads = self.query_key_value(self.before(x)).view(rows, CONTEXT, 3, HEADS, size).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        seen = (query @ key.transpose(-1, -2) / math.sqrt(size) + self.later).softmax(-1) @ value
        x = x + self.out(seen.transpose(1, 2).reshape(rows, CONTEXT, WIDTH))
        out: Tensor = self.last(x + self.forward_(self.after(x))) @ self.letters.weight.T
        return out


@cache
def text() -> tuple[Tensor, Tensor, int]:
    """What is trained on, what is held out, and how many letters there are."""
    whole = "\n".join(words for _, words in sorted(pydoc_data.topics.topics.items())).lower()
    numbers = {letter: number for number, letter in enumerate(sorted(set(whole)))}
    letters = torch.tensor([numbers[letter] for letter in whole])
    cut = len(letters) * 9 // 10
    return letters[:cut], letters[cut:], len(numbers)


def model() -> nn.Module:
    return Transformer(text()[2])


def batch(seed: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    train, _, _ = text()
    starts = torch.randint(len(train) - CONTEXT, (ROWS,), generator=draw.generator(0xC4A8, seed, rank, step))
    rows = train.unfold(0, CONTEXT + 1, 1)[starts]
    return rows[:, :-1], rows[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@torch.no_grad()
def evaluate(trained: nn.Module) -> dict[str, float]:
    rows = text()[1].unfold(0, CONTEXT + 1, CONTEXT)
    return {"loss": loss(trained(rows[:, :-1]), rows[:, 1:]).item()}


def task(rate: float, seed: int) -> ob.Task:
    return ob.Task(
        model, loss, partial(batch, seed), partial(torch.optim.AdamW, lr=rate, fused=True), evaluate=evaluate
    )


@dataclass(frozen=True)
class Case:
    method: str
    workers: int
    rate: float
    seed: int
    steps: int
    simulated: bool


def own_loop(case: Case, rank: int) -> float:
    """A user's own loop."""
    trained = task(case.rate, case.seed).build(case.seed)
    inner = torch.optim.AdamW(trained.parameters(), lr=case.rate, fused=True)
    forward: nn.Module = DistributedDataParallel(trained) if case.method == DDP else trained
    optimizer: Any = inner if case.method == DDP else ob.attach(inner, trained, METHODS[case.method], steps=case.steps)
    together()
    for step in range(case.steps):
        *inputs, target = batch(case.seed, rank, step)
        optimizer.zero_grad()
        loss(forward(*inputs), target).backward()
        optimizer.step()
    if case.method != DDP:
        optimizer.finish()
    return evaluate(trained)["loss"]


def live(rank: int, cases: list[Case], keep: str | None) -> list[float]:
    found = []
    for case in cases:
        found.append(own_loop(case, rank))
        if rank == 0:
            _keep(keep, case, found[-1])
    return found


def simulated(case: Case) -> float:
    strategy = ob.allreduce() if case.method == DDP else METHODS[case.method]
    made = task(case.rate, case.seed)
    return ob.simulate(strategy, made, case.workers, case.steps, seed=case.seed, compute_s=JITTER).metrics["loss"]


def _keep(file: str | None, case: Case, value: float) -> None:
    print(f"# {case.method}, {case.workers} workers, rate {case.rate:g}, seed {case.seed}: {value:.4f}", flush=True)
    if file is not None:
        with Path(file).open("a") as out:
            out.write(json.dumps([asdict(case), value]) + "\n")


def losses(cases: list[Case], keep: str | None) -> dict[Case, float]:
    """Every case's loss; those that were kept are not run again."""
    kept = Path(keep).read_text().splitlines() if keep is not None and Path(keep).exists() else []
    found = {Case(**case): value for case, value in map(json.loads, kept)}
    missing = [case for case in dict.fromkeys(cases) if case not in found]
    for workers in sorted({case.workers for case in missing if not case.simulated}):
        of = [case for case in missing if case.workers == workers and not case.simulated]
        found.update(zip(of, run_workers(workers, live, of, keep)[0], strict=True))
    for case in missing:
        if case.simulated:
            found[case] = simulated(case)
            _keep(keep, case, found[case])
    return found


def figures(report: Report, chosen: argparse.Namespace, workers: int, names: list[str]) -> None:
    tuned = len(chosen.rates) > 1
    seeds = range(tuned, chosen.seeds + tuned)

    def cases(name: str, rate: float, of: Any) -> list[Case]:
        return [Case(name, workers, rate, seed, chosen.steps, chosen.simulated) for seed in of]

    best = dict.fromkeys(names, chosen.rates[0])
    if tuned:
        tried = {(name, rate): cases(name, rate, [0])[0] for name in names for rate in chosen.rates}
        found = losses(list(tried.values()), chosen.keep)
        best = {name: min(chosen.rates, key=lambda rate: found[tried[name, rate]]) for name in names}
    found = losses([case for seed in seeds for name in names for case in cases(name, best[name], [seed])], chosen.keep)
    of = {name: [found[case] for case in cases(name, best[name], seeds)] for name in names}
    for name in names:
        ratios = [ours / ddp - 1 for ours, ddp in zip(of[name], of[DDP], strict=True)]
        figure = f"{mean(of[name]):.4f}" if name == DDP else f"{mean(of[name]):.4f} {mean(ratios):+.2%}"
        judged = name.startswith("self_clocked")
        report.row(
            f"{workers} workers, {name}, rate {best[name]:g}",
            figure if name == DDP else f"{figure} ({min(ratios):+.1%} … {max(ratios):+.1%})",
            "within 1 %" if judged else "",
            mean(ratios) <= TARGET if judged else None,
            workers=workers,
            method=name,
            rate=best[name],
            seeds=list(seeds),
            losses=[round(x, 4) for x in of[name]],
        )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--simulated", action="store_true", help="in virtual time, without processes")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rates", type=float, nargs="+", default=[RATE])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--keep", metavar="FILE", help="keep every loss here, and go on from what it holds")
    parser.add_argument("--quick", action="store_true", help="two methods, 20 steps, one seed: does it run?")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.workers, chosen.seeds, chosen.steps, chosen.methods = [2], 1, 20, ["self_clocked", "eager late=1"]
    torch.set_num_threads(1)
    world = "simulated" if chosen.simulated else "live"
    report = Report(f"characters, {world}, {chosen.steps} steps of {ROWS} rows a worker, {chosen.seeds} seeds", chosen)
    for workers in chosen.workers:
        figures(report, chosen, workers, [DDP, *chosen.methods])
    report.close()


if __name__ == "__main__":
    main()
