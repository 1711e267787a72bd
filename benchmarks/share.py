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
TRAINED = 400  # batches, under the trainers
METHODS: dict[str, Any] = {
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
    plain = DataLoader(torch.utils.data.Subset(data, range(4 * count)), batch_size=4, **many)
    begun_s = 0.0
    for batch in plain:
        begun_s = begun_s or time.perf_counter()
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
    parser.add_argument("--only", default="slow,stalls,nobody,loader", help="parts, with commas")
    given = parser.parse_args()
    report = Report("shared work: time of the job over the ideal", given)
    parts = {
        "slow": lambda: timed(report, "slow", given.repeats, {2: 1.12, 4: 1.15}),
        "stalls": lambda: timed(report, "stalls", given.repeats, {2: 1.10, 4: 1.10}),
        "nobody": lambda: timed(report, "nobody", given.repeats, {2: 1.06, 4: 1.06}),
        "loader": lambda: timed(report, "loader", given.repeats, {2: 1.2}),
        "trainers": lambda: trainers(report, given.repeats, 1.25),
    }
    for name in given.only.split(","):
        parts[name]()
    report.close()


if __name__ == "__main__":
    main()
