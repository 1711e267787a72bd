"""Ray Train with Offbeat's ``prepare``: what its users expect of it, and nobody waits for a slow worker."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import offbeat as ob
from offbeat.integrations.ray import prepare
from tests.support.fitting import LATE_STEPS, SCRIPTS, SIZE, data, late, small, weights

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'offbeat[ray]'")
pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore")]  # Ray warns of itself, and of others

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two workers on whatever this machine has. Starting it takes long, so all tests of Ray are in this file.

    What workers are to find in their environment they inherit: in a ``runtime_env`` it would be unlike that of the
    processes that Ray has started in advance, and each of them would be started again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # where Ray leaves what nobody gave a place
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.init(num_cpus=SIZE + 1, include_dashboard=False, logging_level="error", object_store_memory=80 * 2**20)
        yield
        ray.shutdown()


def fit(loop: Any, folder: Path, restarts: int) -> Exception:
    """How a run ends that fails at each attempt. What its workers have to tell they leave in ``folder``."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=SIZE),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=restarts)),
        torch_config=TorchConfig(backend="gloo"),
    )
    with pytest.raises(Exception) as caught:  # noqa: PT011
        trainer.fit()
    return caught.value


def loader(rank: int, rows: int = 64) -> Any:
    sampler: Any = torch.utils.data.DistributedSampler(data(rows), SIZE, rank, shuffle=False)
    return DataLoader(data(rows), batch_size=4, sampler=sampler)


def epoch(model: Any, optimizer: Any, rank: int, rows: int = 64, slow: bool = False, fails_at: int = -1) -> int:
    for number, (x, y) in enumerate(loader(rank, rows)):
        if slow:
            late(rank, number)
        if rank == 1 and number == fails_at:
            raise ValueError("no such file")
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return number + 1


def prepared(method: ob.Strategy) -> tuple[Any, ...]:
    model = small()
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02), method)


def shares(rank: int) -> dict[str, Any]:
    """What a worker has used of two epochs, in the first of which rank 1 stands until rank 0 is ahead."""
    model, used = small(), list[int]()
    loader = DataLoader(TensorDataset(*data(62).tensors, torch.arange(62)), batch_size=4, shuffle=True)
    whole, optimizer, batches = prepare(model, torch.optim.AdamW(model.parameters()), loader=loader)
    steps = 0
    with optimizer:
        for _ in range(2):
            for x, y, index in batches:
                late(rank, steps, "shared")
                F.mse_loss(whole(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                used += index.tolist()
            optimizer.average()
    return {"used": used, "length": len(batches), "is a loader": isinstance(batches, DataLoader)}


def trains(config: dict[str, Any]) -> None:
    """At the first attempt all that is compared, at the second what a restarted job does; both end with a failure."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    os.environ["JOB_FOLDER"] = config["folder"]  # where workers say what has happened
    kept = ray.train.get_checkpoint()
    told = from_the_beginning(rank) if kept is None else from_the_checkpoint(rank, kept)
    torch.save(told, Path(config["folder"], f"{'begun' if kept is None else 'resumed'}-{rank}.pt"))
    model, optimizer = prepared(ob.local_sgd(period=2))
    with optimizer:
        epoch(model, optimizer, rank, fails_at=2)


def from_the_beginning(rank: int) -> dict[str, Any]:
    import ray.train
    from ray.train.torch import prepare_model

    theirs = small()
    wrapped, inner = prepare_model(theirs), torch.optim.AdamW(theirs.parameters(), lr=0.02)
    for _ in range(2):
        epoch(wrapped, inner, rank)

    slow, optimizer = prepared(ob.eager(late=1))
    with optimizer:
        steps = epoch(slow, optimizer, rank, 4 * SIZE * LATE_STEPS, slow=True)
        optimizer.average()
        evaluated = weights(slow)

    ours, optimizer = prepared(ob.allreduce())
    with optimizer:
        epoch(ours, optimizer, rank)
        optimizer.average()
        with tempfile.TemporaryDirectory() as folder:
            torch.save([ours.state_dict(), optimizer.state_dict()], Path(folder, "state.pt"))
            ray.train.report({"half": 1}, checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None)
        epoch(ours, optimizer, rank)
    return {"theirs": weights(theirs), "ours": weights(ours), "steps": steps, "evaluated": evaluated, **shares(rank)}


def from_the_checkpoint(rank: int, checkpoint: Any) -> Any:
    model, optimizer = prepared(ob.allreduce())
    with optimizer:
        with checkpoint.as_directory() as folder:
            weights_, state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(weights_)
        optimizer.load_state_dict(state)
        epoch(model, optimizer, rank)
    return weights(model)


class Ran(NamedTuple):
    """One job, since starting workers takes long: it fails, Ray starts it again, and it fails again."""

    error: Exception
    begun: list[dict[str, Any]]
    resumed: list[Any]


@pytest.fixture(scope="module")
def ran(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("trained")
    error = fit(trains, folder, restarts=1)

    def left(attempt: str) -> list[Any]:
        files = [folder / f"{attempt}-{rank}.pt" for rank in range(SIZE)]
        assert all(file.exists() for file in files), f"not all workers came to the end of what was {attempt}: {error}"
        return [torch.load(file, weights_only=False) for file in files]

    return Ran(error, left("begun"), left("resumed"))


def test_allreduce_ends_with_the_bits_of_rays_own_ddp(ran: Ran) -> None:
    for told in ran.begun:
        assert torch.equal(told["theirs"], told["ours"])


def test_a_restarted_job_ends_with_the_bits_of_one_that_was_never_stopped(ran: Ran) -> None:
    assert [torch.equal(ran.resumed[rank], ran.begun[rank]["ours"]) for rank in range(SIZE)] == [True, True]


def test_the_fast_worker_does_not_wait_for_the_slow_one(ran: Ran) -> None:
    assert [told["steps"] for told in ran.begun] == [LATE_STEPS, LATE_STEPS]


def test_every_sample_is_used_once_an_epoch_by_whoever_is_free(ran: Ran) -> None:
    first, second = ran.begun
    assert sorted(first["used"] + second["used"]) == sorted(2 * [*range(62)])
    assert [(told["length"], told["is a loader"]) for told in ran.begun] == [(8, True), (8, True)]


def test_what_is_evaluated_is_the_average_of_the_workers(ran: Ran) -> None:
    first, second = ran.begun
    assert torch.equal(first["evaluated"], second["evaluated"])


def test_one_failing_worker_ends_the_job_with_its_error(ran: Ran) -> None:
    assert "no such file" in str(ran.error)
    assert "in epoch" in str(ran.error)


def test_the_script_of_the_page_runs(
    cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **settings: started.append(settings))  # a cluster is there
    exec(compile(SCRIPTS["ray"], "ray_train.py", "exec"), {"__name__": "__main__"})
    assert [settings["num_cpus"] for settings in started] == [SIZE + 1]
    said, told, end_s = "Vectors went through shared memory.", "", time.monotonic() + 60.0
    while said not in told and time.monotonic() < end_s:  # what workers print comes by and by, and equal lines once
        time.sleep(0.1)
        told += "".join(capsys.readouterr())  # on which of the two depends on the version
    assert said in told
