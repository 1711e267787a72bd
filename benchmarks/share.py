"""The job ends when its work is done: how long it takes for the same samples, with fixed shares and with shared work.

    python benchmarks/share.py [--json FILE] [--repeats 3] [--only slow,stalls,nobody,loader,loss,trainers]
    apt-get install dataset-fashion-mnist                               for a part of loss; or --data-folder DIR

*Ideal* is all samples over the sum of the workers' own speeds, each measured by itself in the same run: the loop with a
plain loader and optimiser, and nobody to talk to. A figure is the time of the job, from the first batch to the end of
`finish()` on the last worker, over the ideal.

- slow: 2 and 4 processes, steps of 10 ms, one worker 4 times slower for good.
- stalls: 2 and 4 processes, steps of 10 ms, stalls of 100 ms in a tenth of the steps, each worker's own.
- nobody: 2 and 4 processes, steps of 10 ms, nobody slow.
- loader: 2 processes, a loader with 4 worker processes and prefetching in each, one worker 4 times slower.
- loss: digits, Fashion-MNIST and a small Transformer at equal samples, one of four workers 4 times slower: the held-out
  loss over that of DDP with the same seed, beside DDP's own spread over seeds. Met where the median of our losses is
  not above the highest of DDP's. Rates are the best for DDP; nobody is slow in its runs, as its loss would be the same.
  The rows without a target tell what is the method's (fixed shares, nobody slow), and what is the sharing's.
- trainers: under Lightning, Hugging Face's Trainer, Accelerate and Ray, one of two workers 30 ms slower.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import scale
import torch
import torch.distributed as dist
from harness import Report, arguments, median, run_workers, spread, together
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import offbeat as ob
from offbeat.tasks.digits import _data as pictures_of_digits

STEP_S, SLOWER = 0.010, 4.0
STALL_S, STALLS = 0.1, 0.1
WARM_UP = 10  # steps of a worker alone that are not counted
TRAINED = 400  # batches, under the trainers
METHODS: dict[str, Callable[[], Any]] = {
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


def timed(report: Report, scene: str, repeats: int, targets: dict[int, float], rows: str, batches: int = 200) -> None:
    every = [("ddp", ""), ("fixed", "default"), *(("shared", name) for name in METHODS)]
    for size, target in targets.items():
        for way, method in [(way, method) for way, method in every if rows in f"{way} {method}"]:
            figures = [_over_ideal(size, scene, way, method, batches * size) for _ in range(repeats)]
            is_ours = way == "shared"
            report.row(
                f"{scene}, {size} processes, {way} {method}",
                spread(figures),
                f"at most {target}" if is_ours else "",
                median(figures) <= target if is_ours else None,
                figures=figures,
            )


class Data(NamedTuple):
    inputs: Tensor
    targets: Tensor
    held_out: Tensor
    held_out_targets: Tensor


@dataclass(frozen=True)
class Work:
    """Something to learn, with as many samples as make equally many whole batches for each worker."""

    data: Callable[[str], Data]
    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch: int
    epochs: int


def _digits(_: str) -> Data:
    return Data(*pictures_of_digits(torch.float32, torch.device("cpu")))


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@cache
def _fashion(folder: str) -> Data:
    images, labels, held_out, held_out_labels = scale.pictures(folder)
    seen, unseen = (scale._scaled(x).view(-1, 1, 28, 28) for x in (images[:6_016], held_out[:2_000]))
    return Data(seen, labels[:6_016], unseen, held_out_labels[:2_000])


def _convolutions() -> nn.Module:
    first = (nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU())
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(16 * 7 * 7, 10))


CONTEXT, WIDTH = 32, 64


@cache
def _text(_: str) -> Data:
    words = "\n".join(words for _, words in sorted(pydoc_data.topics.topics.items())).encode()
    rows = torch.frombuffer(bytearray(words), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, CONTEXT)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    seen, unseen = rows[:4_096], rows[-512:]
    return Data(seen[:, :-1], seen[:, 1:], unseen[:, :-1], unseen[:, 1:])


class Transformer(nn.Module):
    """Two layers over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, 256)
        self.register_buffer("later", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight
        out: Tensor = self.last(self.layers(x, mask=self.later, is_causal=True)).transpose(1, 2)
        return out


WORKS = {
    "digits": Work(_digits, _network, partial(torch.optim.SGD, lr=0.2, momentum=0.9), 16, 8),
    "Fashion-MNIST": Work(_fashion, _convolutions, partial(torch.optim.SGD, lr=0.05, momentum=0.9), 16, 2),
    "Transformer": Work(_text, Transformer, partial(torch.optim.AdamW, lr=0.016), 8, 1),
}
DDP = "DDP"
RUNS = {  # whose shares, the method, and whether the last worker is slow
    DDP: ("ddp", "", False),
    "shared default": ("shared", "default", True),
    "shared eager late=1": ("shared", "eager late=1", True),
    "fixed default, nobody slow": ("fixed", "default", False),
    "shared default, nobody slow": ("shared", "default", False),
}


def _learn(rank: int, work: Work, folder: str, seed: int, run: str) -> tuple[float, int]:
    """The held-out loss in the end, and how many steps this worker took."""
    way, method, is_one_slow = RUNS[run]
    size = dist.get_world_size()
    data = work.data(folder)
    samples = len(data.targets) // (size * work.batch) * size * work.batch
    own: Dataset[Any] = TensorDataset(data.inputs[:samples], data.targets[:samples])
    torch.manual_seed(seed)
    model = work.model()
    forward: nn.Module = DistributedDataParallel(model) if way == "ddp" else model
    inner = work.optimizer(model.parameters())
    fixed: Any = DistributedSampler(own, shuffle=True, seed=seed)
    if way == "shared":
        loader = ob.share(DataLoader(own, work.batch, shuffle=True), seed=seed)
    else:
        loader = DataLoader(own, work.batch, sampler=fixed)
    optimizer: Any = inner if way == "ddp" else ob.attach(inner, model, METHODS[method](), seed=seed)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, work.epochs * len(loader))
    if way == "shared":
        scheduler = ob.follow(scheduler, loader)
    slower = SLOWER if is_one_slow and rank == size - 1 else 1.0
    steps = 0
    together()
    for epoch in range(work.epochs):
        fixed.set_epoch(epoch)
        for x, y in loader:
            begun_s = time.perf_counter()
            if way != "ddp":
                time.sleep(STEP_S)
            F.cross_entropy(forward(x), y).backward()
            time.sleep((slower - 1.0) * (time.perf_counter() - begun_s))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
    if way != "ddp":
        optimizer.finish()
    if way == "shared":
        each = "" if work.epochs == 1 else f", in each of {work.epochs} epochs"
        sampler: Any = loader.batch_sampler
        assert sampler.told() == [f"{samples:,} of {samples:,} samples were used once{each}."], sampler.told()
    with torch.no_grad():
        held_out = F.cross_entropy(model(data.held_out), data.held_out_targets).item()
    dist.barrier()
    return held_out, steps


def _losses_job(rank: int, name: str, folder: str, seed: int, runs: list[str]) -> list[tuple[float, int]]:
    return [_learn(rank, WORKS[name], folder, seed, run) for run in runs]


def loss(report: Report, seeds: int, size: int, folder: str) -> None:
    for name in WORKS:
        try:
            WORKS[name].data(folder)
        except ValueError as error:
            print(f"# {name} is left out: {error}")
            continue
        runs = [run for run in RUNS if name != "Transformer" or "eager" not in run]  # eager is for SGD
        answers = [run_workers(size, _losses_job, name, folder, seed, runs) for seed in range(seeds)]
        losses = {run: [answer[0][k][0] for answer in answers] for k, run in enumerate(runs)}
        theirs = losses[DDP]
        for k, run in enumerate(runs):
            ratios = [x / (median(theirs) if run == DDP else y) for x, y in zip(losses[run], theirs, strict=True)]
            is_asked = RUNS[run][0] == "shared" and RUNS[run][2]
            report.row(
                f"{name}, {size} workers, {run}: loss / " + ("median" if run == DDP else DDP),
                f"{spread(ratios)}, loss {median(losses[run]):.4f}",
                f"loss at most {max(theirs):.4f}" if is_asked else "",
                median(losses[run]) <= max(theirs) if is_asked else None,
                losses=[round(x, 5) for x in losses[run]],
                steps=[[of[k][1] for of in answer] for answer in answers],
            )


def _under(trainer: str, model: Any, shares: bool, data: TensorDataset) -> None:
    """One epoch under a trainer, with fixed shares or with shared work."""
    import tempfile

    inner: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    if trainer == "lightning":
        import lightning as L

        from offbeat.integrations.lightning import OffbeatStrategy

        class Module(L.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, number: int) -> Any:
                return self.model(*batch)["loss"]

            def configure_optimizers(self) -> Any:
                return inner

        off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        strategy = OffbeatStrategy(share=shares)
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **off).fit(Module(), loader)
    elif trainer == "transformers":
        from transformers import Trainer, TrainingArguments

        from offbeat.integrations.transformers import OffbeatTrainerMixin

        class Mine(OffbeatTrainerMixin, Trainer):  # type: ignore[misc]
            pass

        given: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        settings = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=1, per_device_train_batch_size=4, **given)
        rows = [{"x": x, "labels": y} for x, y in zip(*data.tensors, strict=True)]
        Mine(model, settings, train_dataset=rows, share=shares).train()
    elif trainer == "accelerate":
        from accelerate import Accelerator

        from offbeat.integrations import accelerate

        accelerator: Any = Accelerator(cpu=True)
        whole, optimizer, batches = accelerate.prepare(accelerator, model, inner, loader, share=shares)
        with accelerate.attached(optimizer):
            for x, y in batches:
                accelerator.backward(whole(x, y)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    else:
        from offbeat.integrations import ray

        whole, attached, batches = ray.prepare(model, inner, loader=loader, share=shares)
        with attached:
            for x, y in batches:
                whole(x, y)["loss"].backward()
                attached.step()
                attached.zero_grad()


def _trained(rank: int, trainer: str, repeats: int) -> list[list[tuple[float, float, float]]]:
    """For fixed shares and for shared work, of each repeat: when the first step began, when the run was over, and how
    long a step of this worker takes by itself.
    """
    import os
    import warnings

    from trainers import Paced

    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), TORCHELASTIC_RUN_ID="benchmark")
    x = torch.randn(4 * TRAINED, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :2])
    alone = Paced(late=rank == 1)
    inner = torch.optim.SGD(alone.parameters(), lr=0.01)
    for _ in range(51):
        alone(x[:4], x[:4, :2])["loss"].backward()
        inner.step()
        inner.zero_grad()
    own_s = (alone.starts[-1] - alone.starts[0]) / 50
    found: list[list[tuple[float, float, float]]] = [[], []]
    for _ in range(repeats):
        for shares in (False, True):
            model = Paced(late=rank == 1)
            _under(trainer, model, shares, data)
            found[shares].append((model.starts[0], time.perf_counter(), own_s))
    return found


def _trained_by_ray(config: dict[str, Any]) -> None:
    import json
    from pathlib import Path

    import ray.train

    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], f"{rank}.json").write_text(json.dumps(_trained(rank, "ray", config["repeats"])))


def _by_ray(repeats: int) -> list[Any]:
    import json
    import os
    import tempfile
    from pathlib import Path

    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    here = str(Path(__file__).parent)
    paths = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_TRAIN_V2_ENABLED": "1", "PYTHONPATH": paths}
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            _trained_by_ray,
            train_loop_config={"folder": folder, "repeats": repeats},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
            torch_config=TorchConfig(backend="gloo"),
        ).fit()
        told = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    ray.shutdown()
    return told


def trainers(report: Report, repeats: int, target: float) -> None:
    """From the first step of the first worker to the end of the last: what a trainer does before is not counted."""
    for trainer in ("lightning", "transformers", "accelerate", "ray"):
        told = _by_ray(repeats) if trainer == "ray" else run_workers(2, _trained, trainer, repeats)
        for shares, way in enumerate(("fixed", "shared")):
            figures = []
            for ranks in zip(*(one[shares] for one in told), strict=True):
                took_s = max(end for _, end, _ in ranks) - min(begun for begun, _, _ in ranks)
                figures.append(took_s * sum(1 / own_s for _, _, own_s in ranks) / TRAINED)
            met = median(figures) <= target if shares else None
            aim = f"at most {target}" if shares else ""
            report.row(f"{trainer}, 2 processes, {way}", spread(figures), aim, met, figures=figures)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(repeats=3)
    parser.add_argument("--only", default="slow,stalls,nobody,loader,loss", help="parts, with commas")
    parser.add_argument("--workers", type=int, default=4, help="of loss")
    parser.add_argument("--data-folder", default="/usr/share/datasets/fashion-mnist", help="Fashion-MNIST's four files")
    parser.add_argument("--rows", default="", help="of slow, stalls, nobody and loader: rows with these words alone")
    given = parser.parse_args()
    report = Report("shared work: time of the job over the ideal, loss over DDP's", given)
    parts = {
        "slow": lambda: timed(report, "slow", given.repeats, {2: 1.12, 4: 1.15}, given.rows),
        "stalls": lambda: timed(report, "stalls", given.repeats, {2: 1.10, 4: 1.10}, given.rows),
        "nobody": lambda: timed(report, "nobody", given.repeats, {2: 1.06, 4: 1.06}, given.rows),
        "loader": lambda: timed(report, "loader", given.repeats, {2: 1.2}, given.rows),
        "loss": lambda: loss(report, given.repeats, given.workers, given.data_folder),
        "trainers": lambda: trainers(report, given.repeats, 1.25),
    }
    for name in given.only.split(","):
        parts[name]()
    report.close()


if __name__ == "__main__":
    main()
