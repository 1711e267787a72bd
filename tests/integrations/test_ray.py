"""Ray Train with Offbeat's ``prepare``: what its users expect of it, and nobody waits for a slow worker."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import offbeat as ob
from offbeat.integrations.ray import prepare
from tests.support.fitting import LATE_S, LATE_STEPS, SCRIPTS, SIZE, data, late, small, weights

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'offbeat[ray]'")
pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore")]  # Ray warns of itself, and of others

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two workers on whatever this machine has. Starting it takes long, so all tests of Ray are in this file."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_TRAIN_V2_ENABLED": "1"}
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # where Ray leaves what nobody gave a place
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.init(
            num_cpus=SIZE + 1,
            include_dashboard=False,
            logging_level="error",
            object_store_memory=80 * 2**20,
            runtime_env={"env_vars": variables},
        )
        yield
        ray.shutdown()


def fit(loop: Any, folder: Path, name: str, **config: Any) -> tuple[Any, list[Any]]:
    """Ray's result, and what each worker has left in ``folder``."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    result = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ScalingConfig(num_workers=SIZE),
        run_config=RunConfig(storage_path=str(folder / "ray"), name=name),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()
    return result, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


def loader(rank: int, rows: int = 64) -> Any:
    sampler: Any = torch.utils.data.DistributedSampler(data(rows), SIZE, rank, shuffle=False)
    return DataLoader(data(rows), batch_size=4, sampler=sampler)


def epoch(model: Any, optimizer: Any, rank: int, rows: int = 64, slow: bool = False, fails_at: int = -1) -> float:
    starts = []
    for number, (x, y) in enumerate(loader(rank, rows)):
        starts.append(time.monotonic())
        if slow:
            late(rank)
        if rank == 1 and number == fails_at:
            raise ValueError("no such file")
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return starts[-1] - starts[0]


def prepared(method: ob.Strategy) -> tuple[Any, ob.Attached]:
    model = small()
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02), method)


def trains(config: dict[str, Any]) -> None:
    import ray.train
    from ray.train.torch import prepare_model

    rank = ray.train.get_context().get_world_rank()
    theirs = small()
    wrapped, inner = prepare_model(theirs), torch.optim.AdamW(theirs.parameters(), lr=0.02)
    for _ in range(2):
        epoch(wrapped, inner, rank)

    slow, optimizer = prepared(ob.eager(late=1))
    with optimizer:
        took_s = epoch(slow, optimizer, rank, 4 * SIZE * LATE_STEPS, slow=True)
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
    torch.save([weights(theirs), weights(ours), took_s, evaluated], Path(config["folder"], f"{rank}.pt"))


def goes_on(config: dict[str, Any]) -> None:
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    model, optimizer = prepared(ob.allreduce())
    with optimizer:
        with config["checkpoint"].as_directory() as folder:
            weights_, state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(weights_)
        optimizer.load_state_dict(state)
        epoch(model, optimizer, rank)
    torch.save(weights(model), Path(config["folder"], f"{rank}.pt"))


@pytest.fixture(scope="module")
def trained(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    return fit(trains, tmp_path_factory.mktemp("trained"), "trained")


def test_allreduce_ends_with_the_bits_of_rays_own_ddp(trained: tuple[Any, list[Any]]) -> None:
    for theirs, ours, _, _ in trained[1]:
        assert torch.equal(theirs, ours)


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_stopped(
    trained: tuple[Any, list[Any]], tmp_path: Path
) -> None:
    _, resumed = fit(goes_on, tmp_path, "resumed", checkpoint=trained[0].checkpoint)
    assert [torch.equal(resumed[rank], trained[1][rank][1]) for rank in range(SIZE)] == [True, True]


def test_the_fast_worker_does_not_wait_for_the_slow_one(trained: tuple[Any, list[Any]]) -> None:
    (_, _, fast_s, _), (_, _, slow_s, _) = trained[1]
    assert slow_s > (LATE_STEPS - 1) * LATE_S
    assert fast_s < 0.85 * slow_s  # in step they would take the same


def test_what_is_evaluated_is_the_average_of_the_workers(trained: tuple[Any, list[Any]]) -> None:
    (_, _, _, first), (_, _, _, second) = trained[1]
    assert torch.equal(first, second)


def fails(config: dict[str, Any]) -> None:
    import ray.train

    model, optimizer = prepared(ob.local_sgd(period=2))
    with optimizer:
        epoch(model, optimizer, ray.train.get_context().get_world_rank(), fails_at=2)


def test_one_failing_worker_ends_the_job_with_its_error(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such file") as caught:
        fit(fails, tmp_path, "fails")
    assert "in epoch" in str(caught.value)


def test_the_script_of_the_page_runs(
    cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **settings: started.append(settings))  # a cluster is there
    exec(compile(SCRIPTS["ray"], "ray_train.py", "exec"), {"__name__": "__main__"})
    assert [settings["num_cpus"] for settings in started] == [SIZE + 1]
    told, end_s = "", time.monotonic() + 60.0
    while told.count("Vectors went through shared memory.") < SIZE and time.monotonic() < end_s:
        time.sleep(0.1)  # what workers print comes by and by
        told += capsys.readouterr().out
    assert told.count("Vectors went through shared memory.") == SIZE, told
