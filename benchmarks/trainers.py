"""The fast worker beside a slow one, under each trainer: its own DDP, and methods that do not wait.

Steps of 10 ms; rank 1 takes 30 ms longer in each. Seconds are those of 60 steps of the loop on rank 0, after 5 that are
not counted: in these DDP cuts its buckets, and the host process starts. How long these five take is written behind.

python benchmarks/trainers.py [--json FILE] [--repeats 5] [--only lightning,transformers,accelerate,ray]
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from harness import Report, arguments, median, run_workers, spread
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import offbeat as ob

SIZE, UNCOUNTED, COUNTED, BATCH = 2, 5, 60, 4
STEPS = UNCOUNTED + COUNTED + 1  # the last one ends the one before it
COMPUTE_S, LATE_S = 0.010, 0.030
METHODS = {
    "eager(late=1, sync_every=None)": ob.eager(late=1, sync_every=None),
    "self_clocked()": ob.self_clocked(),
    "wagma(tau=1000)": ob.wagma(tau=1000),
    "allreduce": ob.allreduce(),
}


Times = list[tuple[float, float]]  # of each repeat


class Paced(nn.Module):
    """A step takes 10 ms, and 40 ms on a rank that is late."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 2)
        self._step_s = COMPUTE_S + (LATE_S if late else 0.0)
        self.starts: list[float] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.starts.append(time.perf_counter())
        time.sleep(self._step_s)
        return {"loss": F.mse_loss(self.net(x), labels)}

    @property
    def took_s(self) -> tuple[float, float]:
        """Of the steps that count, and of those that do not."""
        return self.starts[-1] - self.starts[UNCOUNTED], self.starts[UNCOUNTED] - self.starts[0]


def data() -> TensorDataset:
    x = torch.randn(BATCH * SIZE * STEPS, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :2])


def lightning(model: Paced, method: ob.Method | None) -> None:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

    from offbeat.integrations.lightning import OffbeatStrategy

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Tensor:
            return self.model(*batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = DDPStrategy() if method is None else OffbeatStrategy(method)
    trainer = L.Trainer(
        accelerator="cpu", devices=SIZE, strategy=strategy, max_epochs=1, enable_checkpointing=False, **quiet
    )
    trainer.fit(Module(), DataLoader(data(), batch_size=BATCH))


def transformers(model: Paced, method: ob.Method | None) -> None:
    from transformers import Trainer, TrainingArguments

    from offbeat.integrations.transformers import OffbeatTrainerMixin

    class Mine(OffbeatTrainerMixin, Trainer):  # type: ignore[misc]
        pass

    given = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"x": x, "labels": y} for x, y in zip(*data().tensors, strict=True)]
    kwargs: dict[str, Any] = {"train_dataset": rows}
    (Trainer(model, given, **kwargs) if method is None else Mine(model, given, method=method, **kwargs)).train()


def accelerate(model: Paced, method: ob.Method | None) -> None:
    from accelerate import Accelerator

    from offbeat.integrations.accelerate import prepare

    accelerator: Any = Accelerator(cpu=True)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data(), batch_size=BATCH)
    whole: Any
    inner: Any
    if method is None:
        whole, inner, batches = accelerator.prepare(model, optimizer, loader)
    else:
        whole, inner, batches = prepare(accelerator, method, model, optimizer, loader)
    for x, y in batches:
        accelerator.backward(whole(x, y)["loss"])
        inner.step()
        inner.zero_grad()
    if method is not None:
        inner.optimizer.finish()


def ray(model: Paced, method: ob.Method | None) -> None:
    from ray.train.torch import prepare_data_loader, prepare_model

    from offbeat.integrations.ray import prepare

    inner: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    whole: Any
    if method is None:
        whole = prepare_model(model)
    else:
        whole, inner = prepare(model, inner, method)
    for x, y in prepare_data_loader(DataLoader(data(), batch_size=BATCH)):
        whole(x, y)["loss"].backward()
        inner.step()
        inner.zero_grad()
    if method is not None:
        inner.finish()


TRAINERS = {"lightning": lightning, "transformers": transformers, "accelerate": accelerate, "ray": ray}


ROWS = [(None, False), (None, True), *((name, True) for name in METHODS)]  # the method (None: their DDP), who is late


def job(rank: int, trainer: str, repeats: int) -> list[Times]:
    """As torchrun would start it."""
    os.environ.update(LOCAL_RANK=str(rank), TORCHELASTIC_RUN_ID="benchmark")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    return seconds(rank, trainer, repeats)


def job_of_ray(config: dict[str, Any]) -> None:
    import ray.train

    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    if rank == 0:
        Path(config["answer"]).write_text(json.dumps(seconds(rank, "ray", config["repeats"])))
    else:
        seconds(rank, "ray", config["repeats"])


def seconds(rank: int, trainer: str, repeats: int) -> list[Times]:
    """Seconds of the loop on this rank, for each row, side by side in one process."""
    warnings.simplefilter("ignore")
    took_s: list[Times] = [[] for _ in ROWS]
    for _ in range(repeats):
        for times, (method, slow) in zip(took_s, ROWS, strict=True):
            model = Paced(late=slow and rank == 1)
            TRAINERS[trainer](model, None if method is None else METHODS[method])
            times.append(model.took_s)
    return took_s


def fast_worker(trainer: str, repeats: int) -> list[Times]:
    """The seconds of rank 0. Ray starts its workers itself."""
    if trainer != "ray":
        answers: list[list[Times]] = run_workers(SIZE, job, trainer, repeats)
        return answers[0]
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_TRAIN_V2_ENABLED": "1"}
    ray.init(
        num_cpus=SIZE + 1,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        TorchTrainer(
            job_of_ray,
            train_loop_config={"answer": str(answer), "repeats": repeats},
            scaling_config=ScalingConfig(num_workers=SIZE),
            run_config=RunConfig(storage_path=folder),
            torch_config=TorchConfig(backend="gloo"),
        ).fit()
        took_s: list[Times] = json.loads(answer.read_text())
    ray.shutdown()
    return took_s


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default=",".join(TRAINERS))
    chosen = parser.parse_args()
    report = Report("trainers", chosen)
    for trainer in chosen.only.split(","):
        fast = fast_worker(trainer, chosen.repeats)
        alone_s = median([counted for counted, _ in fast[0]])
        for (method, slow), times in zip(ROWS, fast, strict=True):
            took_s, first_s = ([one[which] for one in times] for which in (0, 1))
            waits = method in (None, "allreduce")
            target, met = ("", None) if waits else ("at most 1.1 times", median(took_s) <= 1.1 * alone_s)
            name = f"{trainer}: {method or 'its own DDP'}, {'rank 1 late' if slow else 'nobody late'}"
            figure = (
                f"{spread(took_s)} s, {median(took_s) / alone_s:.2f} times, first {UNCOUNTED}: {median(first_s):.2f} s"
            )
            report.row(name, figure, target, met, seconds=took_s, seconds_of_first=first_s)
    report.close()


if __name__ == "__main__":
    main()
