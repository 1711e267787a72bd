"""The job ends when its work is done: how long it takes for the same samples, with fixed shares and with shared work.

    python benchmarks/share.py [--json FILE] [--repeats 3] [--only slow,stalls,nobody,loader,loss,trainers]

*Ideal* is all samples over the sum of the workers' own speeds, each measured by itself in the same run: the loop with a
plain loader and optimiser, and nobody to talk to. A figure is the time of the job, from the first batch to the end of
`finish()` on the last worker, over the ideal.

- slow: 2 and 4 processes, steps of 10 ms, one worker 4 times slower for good.
- stalls: 2 and 4 processes, steps of 10 ms, stalls of 100 ms in a tenth of the steps, each worker's own.
- nobody: 2 and 4 processes, steps of 10 ms, nobody slow.
- loader: 2 processes, a loader with 4 worker processes and prefetching in each, one worker 4 times slower.
- loss: digits, Fashion-MNIST's size and a small Transformer at equal samples, one of four workers 4 times slower: the
  held-out loss over that of DDP, beside DDP's own spread over seeds.
- trainers: under Lightning, Hugging Face's Trainer, Accelerate and Ray, one of two workers 30 ms slower.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from harness import Report, arguments, median, run_workers, spread, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import offbeat as ob

STEP_S, SLOWER = 0.010, 4.0
STALL_S, STALLS = 0.1, 0.1
WARM_UP = 10  # steps of a worker alone that are not counted
METHODS = {
    "default": lambda: None,
    "eager late=1": lambda: ob.eager(late=1),
    "wagma late=1": lambda: ob.wagma(late=1),
    "ad_psgd": lambda: ob.ad_psgd(),
}


class Net(nn.Module):
    """A small model: the step's computation is slept."""

    def __init__(self, n: int = 10_000) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w.mean() * x.mean()


def _pace(scene: str, rank: int, size: int) -> Any:
    """How long a worker's next batch takes it, beside the little it really computes."""
    rng = random.Random(rank)
    if scene == "stalls":
        return lambda: STEP_S + (STALL_S if rng.random() < STALLS else 0.0)
    slow = SLOWER if scene in ("slow", "loader") and rank == size - 1 else 1.0
    return lambda: STEP_S * slow


class Slowly(Dataset[torch.Tensor]):
    """Samples that take their time to load, as images do."""

    def __init__(self, samples: int, sample_s: float) -> None:
        self._samples, self._sample_s = samples, sample_s

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._sample_s)
        return torch.ones(4)


def _job(rank: int, scene: str, way: str, method: str, batches: int) -> tuple[float, float]:
    """The time of this worker's loop and its end, and its own seconds a batch."""
    size = dist.get_world_size()
    pace = _pace(scene, rank, size)
    workers = 4 if scene == "loader" else 0
    data: Dataset[Any] = Slowly(batches * 4, 0.001) if workers else TensorDataset(torch.ones(batches * 4, 4))
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    many: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 2} if workers else {}

    def step(run: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
        time.sleep(pace())
        run(batch[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    count = 200 if scene == "stalls" else 100
    plain = DataLoader(torch.utils.data.Subset(data, range(4 * (WARM_UP + count))), batch_size=4, **many)
    begun_s = 0.0
    for number, batch in enumerate(plain):
        if number == WARM_UP:
            begun_s = time.perf_counter()
        step(model, batch, inner)
    own_s = (time.perf_counter() - begun_s) / count
    dist.barrier()
    fixed: Any = DistributedSampler(data, shuffle=True) if size > 1 else None
    if way == "ddp":
        loader = DataLoader(data, batch_size=4, sampler=fixed, **many)
        wrapped = DistributedDataParallel(model)
        start = together()
        for batch in loader:
            step(wrapped, batch, inner)
        dist.barrier()
        return time.perf_counter() - start, own_s
    if way == "fixed":
        loader = DataLoader(data, batch_size=4, sampler=fixed, **many)
    else:
        loader = ob.share(DataLoader(data, batch_size=4, shuffle=True, **many))
    optimizer = ob.attach(inner, model, METHODS[method]())
    start = together()
    for batch in loader:
        step(model, batch, optimizer)
    optimizer.finish()
    took_s = time.perf_counter() - start
    if way == "shared":
        sampler: Any = loader.batch_sampler
        assert sampler.told() == [f"{batches * 4:,} of {batches * 4:,} samples were used once."], sampler.told()
    return took_s, own_s


def _over_ideal(size: int, scene: str, way: str, method: str, batches: int) -> float:
    told = run_workers(size, _job, scene, way, method, batches)
    ideal_s = batches / sum(1 / own_s for _, own_s in told)
    return float(max(took_s for took_s, _ in told) / ideal_s)


def timed(report: Report, scene: str, repeats: int, targets: dict[int, float], batches: int = 200) -> None:
    for size, target in targets.items():
        for way, method in [("ddp", ""), ("fixed", "default"), *(("shared", name) for name in METHODS)]:
            figures = [_over_ideal(size, scene, way, method, batches * size) for _ in range(repeats)]
            is_ours = way == "shared"
            report.row(
                f"{scene}, {size} processes, {way} {method}",
                spread(figures),
                f"at most {target}" if is_ours else "",
                median(figures) <= target if is_ours else None,
                figures=figures,
            )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(repeats=3)
    parser.add_argument("--only", default="slow,stalls,nobody,loader", help="parts, with commas")
    given = parser.parse_args()
    report = Report("shared work: time of the job over the ideal", given)
    parts = {
        "slow": lambda: timed(report, "slow", given.repeats, {2: 1.12, 4: 1.15}),
        "stalls": lambda: timed(report, "stalls", given.repeats, {2: 1.10, 4: 1.10}),
        "nobody": lambda: timed(report, "nobody", given.repeats, {2: 1.06, 4: 1.06}),
        "loader": lambda: timed(report, "loader", given.repeats, {2: 1.2}),
    }
    for name in given.only.split(","):
        parts[name]()
    report.close()


if __name__ == "__main__":
    main()
