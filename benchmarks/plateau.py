"""A small GPT on English letters whose loss first stands on a plateau: what each method does to it at equal samples.

    python benchmarks/plateau.py [--workers 4] [--seeds 3] [--scenes nobody slow] [--methods eager "eager:late=1"]
    python benchmarks/plateau.py --alone                                one process: gradients 0, 1, 2 steps late
    python benchmarks/plateau.py --live [--workers 4] [--steps 500]     real processes, on a GPU where there is one
    python benchmarks/plateau.py --task "digits, momentum" --steps 200 --rates 0.1      without a plateau, or AdamW
    python benchmarks/plateau.py --quick

The text is what Python brings: its reference (``pydoc_data.topics``) and the docstrings of its library, 2 MB of bytes,
of which every tenth 4 KB are held out. Such a model knows after some fifty steps how often each letter follows which,
and stands there (a loss of 2.8); only when its attention begins to look further back does the loss fall again. That is
when gradients must not be late: the issue is an 11 M model that never left its plateau with gradients of one step ago.

Simulated: two layers of width 64, 64 letters at a time, AdamW at 0.002, the best rate for all-reduce. Samples are 600
steps of 32 rows, whatever the number of workers: 4 workers take 8 rows each, 8 take 4, so that all-reduce ends alike
and figures can be compared across. ``--rows 8`` gives every worker so many, and takes as much longer. Steps take 0.1 s
with a log-normal spread of 10 %, a message next to nothing or ``--message 0.5`` of a step, and all workers are on
``--hosts`` hosts (one: nothing is coded).

* *nobody*: nobody is slow, all workers take as many steps: equal samples.
* *slow*: the last worker takes five times as long for each step; *stalls*: each step of each worker stands still for a
  second with a probability of 2 %; *speeds*: of each quarter of the workers, steps take 1, 1.5, 2.5 and 4 times as
  long; *even*: nobody is slow. All four end when the time is over in which 600 steps of nobody would be: equal time.

A figure is the held-out loss of the mean of all replicas after the run's ending, with its ratio to all-reduce's where
nobody is slow, as the mean over seeds (first weights, batches and step times), with the least and the most; how many
steps it takes until the mean training loss of 20 steps is below 2.6 (–: never); the gradients that were taken.

Live the model has 6 layers of width 384 and reads 256 letters at a time, 16 rows a worker, in bfloat16 on a GPU (11 M
parameters, AdamW at 0.001); the loop is a user's own, ``ddp`` is PyTorch's. Methods are named in words, as everywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import re
import sysconfig
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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

DDP, REFERENCE, LETTERS, CHUNK, AT_LEAST = "ddp", "allreduce", 256, 4096, 10**6
STEP_S, STEPS, ROWS_OF_ALL, BELOW, TARGET = 0.1, 600, 32, 2.6, 0.005
JITTER = ob.delays.lognormal(STEP_S, 0.1)
SLOWER, STALL_S, STALLS = 5.0, 1.0, 0.02
SPEEDS = (1.0, 1.5, 2.5, 4.0)
SCENES = ("nobody", "slow", "stalls", "speeds", "even")
METHODS = (
    "self_clocked",
    "eager",
    "eager:grace=auto",
    "eager:late=1",
    "wagma:late=1",
    "dasgd",
    "local_sgd:period=8",
    "ad_psgd",
)


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    context: int
    rate: float


WARM_UP = 50  # steps of the live loop, in which the rate grows: without it the loss jumps, for DDP too
SMALL, LARGE, LARGE_ROWS = Size(2, 64, 4, 64, 0.002), Size(6, 384, 6, 256, 0.001), 16


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        later = torch.full((size.context, size.context), -math.inf).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, letters, width = x.shape
        cut = (rows, letters, 3, self.heads, width // self.heads)
        query, key, value = self.query_key_value(self.before(x)).view(cut).permute(2, 0, 3, 1, 4).unbind()
        scores = (
            query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        )  # not one call: vmap knows no batch of it
        seen = (scores + self.later).softmax(-1) @ value
        x = x + self.out(seen.transpose(1, 2).reshape(rows, letters, width))
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.after(x))))
        return out


class GPT(nn.Module):
    """As GPT-2 begins: small weights, and smaller ones where a layer adds to what comes in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, size.width), nn.Embedding(size.context, size.width)
        self.layers = nn.Sequential(*[Layer(size) for _ in range(size.layers)])
        self.last, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, LETTERS, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                adds = name.endswith(("out.weight", "narrow.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * size.layers) if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.head(self.last(self.layers(self.letters(text) + self.places.weight)))
        return out


@cache
def text() -> tuple[Tensor, Tensor]:
    """What is trained on, and what is held out."""
    library = Path(sysconfig.get_path("stdlib"))
    found = [words for _, words in sorted(pydoc_data.topics.topics.items())]
    for file in sorted(library.rglob("*.py")):
        if file.relative_to(library).parts[0] not in ("site-packages", "test"):
            said = re.findall(r'"""(.*?)"""', file.read_text(errors="ignore"), re.DOTALL)
            plain = (re.sub(r"\n[ \t]+", "\n", words).strip() for words in said)
            found += [words for words in plain if len(words) >= 200]
    whole = "\n\n".join(dict.fromkeys(found)).encode()
    if len(whole) < AT_LEAST:
        raise SystemExit(
            f"{library} holds {len(whole)} bytes of docstrings, but {AT_LEAST} are needed; use a Python whose library "
            "is there as source files"
        )
    chunks = [whole[start : start + CHUNK] for start in range(0, len(whole), CHUNK)]
    kept, held = (b"".join(c for i, c in enumerate(chunks) if (i % 10 == 9) is out) for out in (False, True))
    return torch.frombuffer(bytearray(kept), dtype=torch.uint8), torch.frombuffer(bytearray(held), dtype=torch.uint8)


def batch(size: Size, rows: int, seed: int, device: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    train, _ = text()
    starts = torch.randint(len(train) - size.context, (rows,), generator=draw.generator(0x91A7, seed, rank, step))
    drawn = train.unfold(0, size.context + 1, 1)[starts].to(device).long()
    return drawn[:, :-1], drawn[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten())


@torch.no_grad()
def evaluate(size: Size, device: str, trained: nn.Module) -> dict[str, float]:
    rows = text()[1].unfold(0, size.context + 1, size.context)
    rows = rows[:: max(1, len(rows) // 256)][:256].to(device).long()
    return {"loss": loss(trained(rows[:, :-1]), rows[:, 1:]).item()}


def task(size: Size, rows: int, rate: float, seed: int) -> ob.Task:
    return ob.Task(
        partial(GPT, size),
        loss,
        partial(batch, size, rows, seed, "cpu"),
        partial(torch.optim.AdamW, lr=rate, fused=True),
        evaluate=partial(evaluate, size, "cpu"),
        name="plateau",
    )


def digits(rows: int, rate: float, seed: int, name: str) -> ob.Task:
    """The digits, whose loss stands on no plateau."""
    if name == "digits, AdamW":
        return replace(ob.tasks.digits(rows, seed=seed), optimizer=partial(torch.optim.AdamW, lr=rate, fused=True))
    return ob.tasks.digits(rows, lr=rate, momentum=0.9, seed=seed)


@dataclass(frozen=True)
class Case:
    scene: str
    method: str
    workers: int
    steps: int
    rows: int
    rate: float
    hosts: int
    seed: int
    message: float = 0.0
    task: str = "text"

    @property
    def trained(self) -> ob.Task:
        if self.task != "text":
            return digits(self.rows, self.rate, self.seed, self.task)
        return task(SMALL, self.rows, self.rate, self.seed)


@dataclass(frozen=True)
class Outcome:
    loss: float
    left: int | None  # the plateau, after so many steps
    gradients: int
    wall_s: float
    sent: int = 0


def left(losses: Sequence[float]) -> int | None:
    """After how many steps the plateau is behind."""
    last: deque[float] = deque(maxlen=20)
    for step, value in enumerate(losses, 1):
        last.append(value)
        if len(last) == 20 and mean(last) < BELOW:
            return step
    return None


def network(case: Case) -> ob.Network:
    if not case.message:
        return ob.Network(hosts=case.hosts)
    model_bytes = 4 * sum(p.numel() for p in case.trained.model().parameters())
    return ob.Network(bandwidth_Bps=model_bytes / (case.message * STEP_S), hosts=case.hosts)


def simulated(case: Case) -> Outcome:
    begun = time.perf_counter()
    quarter = max(1, case.workers // len(SPEEDS))
    late: Any = {
        "nobody": None,
        "even": None,
        "slow": ob.delays.chronic(case.workers - 1, (SLOWER - 1) * STEP_S),
        "stalls": ob.delays.stalls(STALLS, STALL_S),
        "speeds": ob.delays.total(
            *[
                ob.delays.constant((times - 1) * STEP_S, range(k * quarter, (k + 1) * quarter))
                for k, times in enumerate(SPEEDS)
            ]
        ),
    }[case.scene]
    end: dict[str, Any] = {"steps": case.steps} if case.scene == "nobody" else {"seconds": case.steps * STEP_S}
    run = ob.simulate(
        case.method,
        case.trained,
        case.workers,
        **end,
        seed=case.seed,
        compute_s=JITTER,
        delays=late,
        network=network(case),
    )
    wall_s = time.perf_counter() - begun
    return Outcome(run.metrics["loss"], left(run.losses.tolist()), sum(run.gradients), wall_s, run.wire_bytes)


def own_loop(rank: int, case: Case) -> Outcome:
    """A user's own loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    trained = task(LARGE, case.rows, case.rate, case.seed).build(case.seed).to(device)
    inner = torch.optim.AdamW(trained.parameters(), lr=case.rate, fused=True)
    forward: nn.Module = DistributedDataParallel(trained) if case.method == DDP else trained
    optimizer: Any = inner
    if case.method != DDP:
        optimizer = ob.attach(inner, trained, case.method, steps=case.steps)
    losses: list[Tensor] = []
    begun = together()
    for step in range(case.steps):
        inputs, target = batch(LARGE, case.rows, case.seed, device, rank, step)
        for group in optimizer.param_groups:
            group["lr"] = case.rate * min(1.0, (step + 1) / WARM_UP)
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            value = loss(forward(inputs), target)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    if case.method != DDP:
        optimizer.finish()
    wall_s = together() - begun
    seen = torch.stack(losses).tolist()
    held_out = evaluate(LARGE, device, trained)["loss"] if rank == 0 else math.nan  # all have the same weights
    return Outcome(held_out, left(seen), case.steps * case.workers, wall_s)


def alone(report: Report, chosen: argparse.Namespace) -> None:
    """One process, the gradient of all 32 rows, taken by AdamW so many steps late."""
    for late in (0, 1, 2):
        for rate in chosen.rates:
            trained = task(SMALL, ROWS_OF_ALL, rate, 0).build(0)
            optimizer = torch.optim.AdamW(trained.parameters(), lr=rate, fused=True)
            waiting: deque[list[Tensor | None]] = deque()
            losses: list[float] = []
            for step in range(chosen.steps):
                inputs, target = batch(SMALL, ROWS_OF_ALL, 0, "cpu", 0, step)
                optimizer.zero_grad()
                value = loss(trained(inputs), target)
                value.backward()
                losses.append(value.item())
                waiting.append([p.grad for p in trained.parameters()])
                if len(waiting) > late:
                    for p, g in zip(trained.parameters(), waiting.popleft(), strict=True):
                        p.grad = g
                    optimizer.step()
            found = evaluate(SMALL, "cpu", trained)["loss"]
            what = f"one process, gradients {late} steps late, rate {rate:g}"
            report.row(what, f"{found:.4f}   left after {left(losses) or '–'}", late=late, rate=rate, loss=found)


def measured(case: Case, chosen: argparse.Namespace, kept: dict[Case, Outcome]) -> Outcome:
    if case not in kept:
        kept[case] = run_workers(case.workers, own_loop, case)[0] if chosen.live else simulated(case)
        if chosen.keep is not None:
            with Path(chosen.keep).open("a") as out:
                out.write(json.dumps([asdict(case), asdict(kept[case])]) + "\n")
    return kept[case]


def figures(report: Report, chosen: argparse.Namespace, workers: int, kept: dict[Case, Outcome]) -> None:
    """Each method in each scene, beside the reference where nobody is slow."""
    rows = chosen.rows or (LARGE_ROWS if chosen.live else max(1, ROWS_OF_ALL // workers))
    reference = DDP if chosen.live else REFERENCE

    def outcome(scene: str, method: str, seed: int) -> Outcome:
        how = chosen.hosts, seed, chosen.message, chosen.task
        return measured(Case(scene, method, workers, chosen.steps, rows, chosen.rates[0], *how), chosen, kept)

    for scene in chosen.scenes:
        others = [m for m in (*([REFERENCE] if chosen.live else []), *chosen.methods) if m != reference]
        for method in dict.fromkeys([reference, *others]):
            found = [outcome(scene, method, seed) for seed in range(chosen.seeds)]
            base = [outcome("nobody", reference, seed) for seed in range(chosen.seeds)]
            ratios = [o.loss / b.loss - 1 for o, b in zip(found, base, strict=True)]
            steps = " ".join(str(o.left or "–") for o in found)
            sent = mean(o.sent for o in found)
            judged = method.startswith("self_clocked") and scene == "nobody"
            report.row(
                f"{workers} workers, {scene}, {method}",
                f"{mean(o.loss for o in found):.4f} {mean(ratios):+.2%} ({min(ratios):+.1%} … {max(ratios):+.1%})  "
                f"left {steps}  gradients {mean(o.gradients for o in found):.0f}"
                + (f"  {sent / 1e6:.0f} MB" if sent else "")
                + (f"  {mean(o.wall_s for o in found):.1f} s" if chosen.live else ""),
                f"within {TARGET:.1%}" if judged else "",
                mean(ratios) <= TARGET if judged else None,
                outcomes=[asdict(o) for o in found],
            )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", type=int, nargs="+", default=[4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, help="of each worker and step")
    parser.add_argument("--rates", type=float, nargs="+", help="--alone tries all, the others take the first")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--message", type=float, default=0.0, help="how many steps one copy of the model takes")
    parser.add_argument("--scenes", nargs="+", default=["nobody"], choices=SCENES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help="in words")
    parser.add_argument("--task", default="text", choices=["text", "digits, momentum", "digits, AdamW"])
    parser.add_argument("--keep", metavar="FILE", help="keep every outcome here, and go on from what it holds")
    parser.add_argument("--live", action="store_true", help="real processes and the large model; scene nobody")
    parser.add_argument("--alone", action="store_true", help="one process, gradients that are late")
    parser.add_argument("--quick", action="store_true", help="two methods, 10 steps, one seed: does it run?")
    chosen = parser.parse_args()
    chosen.rates = chosen.rates or [LARGE.rate if chosen.live else SMALL.rate]
    if chosen.quick:
        chosen.seeds, chosen.steps, chosen.methods, chosen.scenes = 1, 10, ["self_clocked", "eager"], list(SCENES)
    if chosen.live:
        chosen.scenes = ["nobody"]
    chosen.steps = chosen.steps or (500 if chosen.live else STEPS)
    torch.set_num_threads(1)
    world = "live" if chosen.live else "one process" if chosen.alone else "simulated"
    report = Report(f"plateau, {world}, {chosen.steps} steps, {chosen.seeds} seeds", chosen)
    if chosen.alone:
        alone(report, chosen)
    else:
        lines = Path(chosen.keep).read_text().splitlines() if chosen.keep and Path(chosen.keep).exists() else []
        kept = {Case(**case): Outcome(**found) for case, found in map(json.loads, lines)}
        for workers in chosen.workers:
            figures(report, chosen, workers, kept)
    report.close()


if __name__ == "__main__":
    main()
