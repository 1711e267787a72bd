"""What bytes cost with real models: several workers on one GPU, or on the cores of one host.

    python benchmarks/engine.py [--json FILE] [--repeats 3] [--only rounds,gpt,large,coded,memory]
                                [--cases none,const,stalls]

- rounds: one partial round (everybody there) of a vector on the device, beside torch's own Gloo all-reduce of it.
- gpt, large: a GPT of 23 or 109 million parameters, AdamW, bf16 autocast on a GPU: wall time of a step over that of the
  same loop with nobody to talk to, before and after the others in the same run: nobody slow, one worker slower by five
  steps' time in each step, or a stall of 300 ms with p = 0.1 for each. The figures are those of the workers that are
  not the slow one; with the GPU memory that a worker holds beyond the loop alone.
- coded: the round of ``rounds`` with a codec, over the one without.
- memory: how many copies of the model a worker holds at most, between two steps, beyond the loop alone: its own memory
  and its share of what all see, while nobody is slow.

Without a GPU the models are smaller, and the figures are those of the cores.
"""

from __future__ import annotations

import gc
import os
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist
from harness import ON_ONE_HOST, Report, arguments, median, run_workers, spread, together
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from offbeat.tensors.vector import Vec

Settings = dict[str, object]


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        narrow: torch.Tensor = self.narrow(F.gelu(self.wide(self.norms[1](x))))
        return x + narrow


class Gpt(nn.Module):
    """A small GPT over ``words`` tokens."""

    def __init__(self, words: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.words(tokens) + self.places(places))))
        return logits


SIZES = {
    "gpt": {"words": 8192, "width": 512, "depth": 6, "heads": 8, "length": 256},
    "large": {"words": 32000, "width": 768, "depth": 12, "heads": 12, "length": 256},
    "tiny": {"words": 512, "width": 128, "depth": 2, "heads": 4, "length": 64},
}
ROWS = {"gpt": 8, "large": 4, "tiny": 4}
RUNS: list[tuple[str, Settings]] = [
    ("alone", {}),
    ("ddp", {}),
    ("eager", {}),
    ("eager", {"sync": "bounded"}),
    ("eager", {"late": 1}),
    ("wagma", {"late": 1}),
    ("wagma", {"merge": "correct"}),
    ("self_clocked", {}),
    ("ad_psgd", {}),
    ("allreduce", {}),
    ("alone", {}),  # once more: a machine may be slower at first, and what the others are compared with is the mean
]
LIMITS = {"eager{}": 1.15, "late": 1.05, "self_clocked{}": 1.05, "ad_psgd{}": 1.1}


WARM_UP = 20  # steps: memory that others read is made, and opened by them, when it is first needed


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _loop(rank: int, size: str, case: str, steps: int, name: str, settings: Settings, slow_s: float) -> list[float]:
    """Seconds of a step, and MiB that were held at most."""
    device, shape = _device(), SIZES[size]
    torch.manual_seed(0)
    model: nn.Module = Gpt(**shape).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if name == "ddp":
        model = DistributedDataParallel(model)
    elif name != "alone":
        optimizer = ob.attach(optimizer, model, ob.named(name, **settings))
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, shape["words"], (ROWS[size], shape["length"] + 1), generator=draw).to(device)
    stalls = ob.delays.bind(ob.delays.stalls(0.1, 0.3), seed=5, workers=8, what="stalls")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    _settle(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = together()
    slept = 0.0
    for t in range(steps):
        late_s = slow_s * (rank == 1) if case == "const" else stalls(t, rank) if case == "stalls" else 0.0
        time.sleep(late_s)
        slept += late_s
        step()
    _settle(device)
    wall = time.perf_counter() - start
    held = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    if isinstance(optimizer, ob.Attached):
        optimizer.finish()
    return [wall / steps, slept / steps, held]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _gpt_job(rank: int, size: str, case: str, steps: int, runs: list[tuple[str, Settings]]) -> list[list[float]]:
    out, own = [], _loop(rank, size, "none", steps, "alone", {}, 0.0)[0]
    for name, settings in runs:
        out.append(_loop(rank, size, case, steps, name, settings, 5 * own))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        dist.barrier()
    return out


def gpt(report: Report, repeats: int, workers: int, steps: int, size: str, cases: list[str]) -> None:
    for case in cases:
        ratios: list[list[float]] = [[] for _ in RUNS]
        steps_ms: list[list[float]] = [[] for _ in RUNS]
        more: list[list[float]] = [[] for _ in RUNS]
        for _ in range(repeats):
            answers = run_workers(workers, _gpt_job, size, case, steps, RUNS)
            fast = [a for rank, a in enumerate(answers) if case != "const" or rank != 1]
            for k in range(len(RUNS)):
                ratios[k].append(median([2 * a[k][0] / (a[0][0] + a[-1][0]) for a in fast]))
                steps_ms[k].append(median([a[k][0] for a in fast]) * 1e3)
                more[k].append(max(a[k][2] - a[0][2] for a in answers))
        for (name, settings), found, took, mib in zip(RUNS, ratios, steps_ms, more, strict=True):
            limit = 1.05 if "late" in settings else LIMITS.get(f"{name}{settings}") if not settings else None
            words = f"{size}, {workers} workers, {case}: {name}{settings or ''} step / alone"
            figure = f"{spread(found)}, {median(took):.1f} ms, {median(mib):+.0f} MiB"
            met = None if limit is None else median(found) <= limit
            report.row(words, figure, f"at most {limit}" if limit else "", met, step_ms=took)


def _rounds_job(rank: int, n: int, times: int, codec: str) -> tuple[list[float], list[float]]:
    device = _device()
    model = nn.Module()
    model.w = w = nn.Parameter(torch.zeros(n, device=device))
    strategy = ob.eager(wait="everyone", sync_every=None, codec=ob.codec.parse(codec))
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, strategy)
    w.sum().backward()
    optimizer.step()
    client, g, tensor = (
        optimizer._run.endpoints.client,
        Vec([torch.ones(n, device=device)]),
        torch.ones(n, device=device),
    )
    plain, ours = [], []
    for k in range(times):
        _settle(device)
        start = together()
        dist.all_reduce(tensor)
        _settle(device)
        plain.append(time.perf_counter() - start)
        start = together()
        client.offer(g, k + 1)
        _settle(device)
        ours.append(time.perf_counter() - start)
    optimizer.finish()
    return plain, ours


def rounds(report: Report, repeats: int, workers: int) -> None:
    gpu = torch.cuda.is_available()
    for n in (1_000, 1_000_000, *((23_200_000, 109_300_000) if gpu else (25_000_000,))):
        ours_ms, ratios, more = [], [], []
        for _ in range(repeats):
            plain, ours = run_workers(workers, _rounds_job, n, 200 if n == 1_000 else 20, "none")[-1]
            ours_ms.append(median(ours) * 1e3)
            ratios.append(median(ours) / median(plain))
            more.append((median(ours) - median(plain)) * 1e3)
        limit = 5.0 if n > 100_000_000 else None
        what = f"{workers} workers, a round of {n:,} floats"
        figure = f"{spread(ours_ms)} ms, {median(ratios):.2f} of Gloo's all-reduce ({median(more):+.2f} ms)"
        report.row(what, figure, "at most 5 ms" if limit else "", None if limit is None else median(ours_ms) <= limit)


def coded(report: Report, repeats: int, workers: int) -> None:
    n = 10_000_000
    for codec in ("bf16", "int8"):
        ratios = []
        for _ in range(repeats):
            uncoded = median(run_workers(workers, _rounds_job, n, 10, "none")[-1][1])
            ratios.append(median(run_workers(workers, _rounds_job, n, 10, codec)[-1][1]) / uncoded)
        what = f"{workers} workers, a round of {n:,} floats with {codec} / without"
        report.row(what, spread(ratios), "at most 1.3", median(ratios) <= 1.3)


COPIES = {"eager{}": 2, "wagma{}": 2, "wagma{'merge': 'correct'}": 3, "eager{'late': 1}": 3, "wagma{'late': 1}": 3}
HOLDS: list[tuple[str, Settings]] = [
    ("alone", {}),
    ("alone", {}),
    ("allreduce", {}),
    ("eager", {}),
    ("eager", {"late": 1}),
    ("wagma", {}),
    ("wagma", {"merge": "correct"}),
    ("wagma", {"late": 1}),
    *(("self_clocked", settings) for settings in ON_ONE_HOST.values()),
    ("ad_psgd", {}),
]


def _held() -> tuple[float, float]:
    """Bytes: this process's own, and its share of what it has mapped with others; on a GPU, what all hold there.

    Not what torch's allocator has been given back, and keeps for the next tensor.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return 0.0, float(total - free)
    own, share, ours = 0.0, 0.0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            ours = "memfd:offbeat" in line
        elif ours and line.startswith("Pss:"):
            share += 1024 * int(line.split()[1])
        elif not ours and line.startswith("Anonymous:"):
            own += 1024 * int(line.split()[1])
    return own, share


def _memory_job(rank: int, n: int, steps: int) -> list[float]:
    out, device = [], _device()
    for name, settings in HOLDS:
        model = nn.Module()
        model.a, model.b = (nn.Parameter(torch.zeros(size, device=device)) for size in (n - n // 3, n // 3))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if name != "alone":
            optimizer = ob.attach(optimizer, model, ob.named(name, **settings))
        most = 0.0
        for t in range(steps):
            time.sleep(0.02)  # a step that leaves the others their cores
            optimizer.zero_grad()
            (model.a.sum() + model.b.sum()).backward()
            optimizer.step()
            if t > 4:
                most = max(most, _held()[0])
        # What is shared only grows, and is told once by all at the same time: before, a page that only one of them had
        # seen was all its own, and later a part of everybody's; and on a GPU others are in the middle of a backward.
        dist.barrier()
        _held()
        dist.barrier()
        most += _held()[1]
        dist.barrier()
        if isinstance(optimizer, ob.Attached):
            optimizer.finish()
        out.append(most)
        del optimizer, model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        dist.barrier()
    return out


def memory(report: Report, repeats: int, workers: int) -> None:
    n = 100_000_000 if torch.cuda.is_available() else 8_000_000
    shared = torch.cuda.is_available()
    found: list[list[float]] = [[] for _ in HOLDS]
    for _ in range(repeats):
        answers = run_workers(workers, _memory_job, n, 25)
        held = [max(a[k] for a in answers) if shared else sum(a[k] for a in answers) for k in range(len(HOLDS))]
        for k in range(len(HOLDS)):
            found[k].append((held[k] - held[1]) / workers / (4 * n))
    for (name, settings), copies in list(zip(HOLDS, found, strict=True))[2:]:
        limit = COPIES.get(f"{name}{settings}")
        met = None if limit is None else median(copies) <= limit
        report.row(
            f"{workers} workers: copies of the model that {name}{settings or ''} holds",
            spread(copies),
            f"at most {limit}" if limit else "",
            met,
        )


def main() -> None:
    # Else freed memory stays with the process, and is counted.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="rounds,gpt")
    parser.add_argument("--cases", default="none,const,stalls", help="of the GPTs")
    parser.add_argument(
        "--methods", default="", help="of the GPTs: some of eager, wagma, self_clocked, …; all if left out"
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=25)
    given = parser.parse_args()
    if given.methods:
        RUNS[:] = [one for one in RUNS if one[0] in ("alone", *given.methods.split(","))]
    report, only = Report("engine", given), given.only.split(",")
    if "rounds" in only:
        rounds(report, given.repeats, given.workers)
    for size in ("tiny", "gpt", "large"):
        if size in only:
            gpt(report, given.repeats, given.workers, given.steps, size, given.cases.split(","))
    if "memory" in only:
        memory(report, given.repeats, given.workers)
    if "coded" in only:
        coded(report, given.repeats, given.workers)
    report.close()


if __name__ == "__main__":
    main()
