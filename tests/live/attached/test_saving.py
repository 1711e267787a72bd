"""Checkpoints that write themselves while a run goes on, and runs that are taken up from one."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.live.host import checkpoint
from tests.support import forge
from tests.support.forge import Job, attempt
from tests.support.methods import EVERY_KIND
from tests.support.nets import backward, end, flat, net, sgd
from tests.support.saved import packed
from tests.support.two_lives import die

pytestmark = pytest.mark.live

SIZE, FEWER, MORE, OFTEN_S, STEP = 3, 2, 4, 0.05, 70


def until_there_is_one(folder: str, within_s: float = 50.0) -> Iterator[int]:
    """Steps, until one is written of a step in which also a late gradient has been applied, and some more."""
    return until(lambda: any(one.manifest.get("step", 0) > MORE for one in checkpoint.every(Path(folder))), within_s)


def until(there_is: Callable[[], bool], within_s: float = 50.0) -> Iterator[int]:
    left, end_s = MORE, time.monotonic() + within_s
    for t in range(10**9):
        left -= there_is()
        if left < 0:
            return
        assert time.monotonic() < end_s, "no checkpoint was written"
        time.sleep(0.002)
        yield t


# Writing.


def saves(rank: int, method: str, folder: str) -> list[float]:
    model = net()
    optimizer = ob.attach(sgd(model), model, EVERY_KIND[method], checkpoint=folder, every_s=OFTEN_S)
    for t in until_there_is_one(folder):
        backward(optimizer, model, rank, t)
        optimizer.step()
    end(optimizer)
    return flat(model).tolist()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[forge.Outcome]]]:
    folders = {method: tmp_path_factory.mktemp("checkpoints") for method in EVERY_KIND}
    jobs = [Job(saves, SIZE, (method, str(folder)), timeout_s=90) for method, folder in folders.items()]
    return dict(zip(EVERY_KIND, zip(folders.values(), forge.run(jobs, at_once=2), strict=True), strict=True))


@pytest.mark.parametrize("method", EVERY_KIND)
def test_every_method_writes_them_while_it_trains_and_ends_as_ever(written: dict[str, Any], method: str) -> None:
    folder, outcomes = written[method]
    assert len({tuple(weights) for weights in forge.values(outcomes)}) == 1
    found, damaged = checkpoint.newest(folder)
    assert found is not None
    assert damaged == []
    assert found.step > 0
    assert found.manifest["method"] == str(EVERY_KIND[method])
    model = net()
    model.load_state_dict(found.model())
    inner = sgd(model)
    inner.load_state_dict(torch.load(found.place / checkpoint.STATE, weights_only=True)["optimizer"])
    assert flat(model).isfinite().all()
    assert flat(inner.state[p]["momentum_buffer"] for p in model.parameters()).abs().sum() > 0


class Ticks(nn.Module):
    """With SGD at rate −1 and no averages, number r of the weights is how many steps rank r has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))


def ticks(rank: int, folder: str, dies: int) -> int:
    model = Ticks()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    never = ob.local_sgd(period=10**6)
    optimizer = ob.attach(inner, model, never, checkpoint=folder, every_s=OFTEN_S, min_workers=1)
    if rank == dies:
        checkpoint.ModelFile.lay = lambda *_: die()  # type: ignore[method-assign]
    there = SIZE - (dies >= 0)
    for _ in until(lambda: any(one.manifest.get("models") == there for one in checkpoint.every(Path(folder)))):
        optimizer.zero_grad()
        (-model.w[rank]).backward()
        optimizer.step()
    end(optimizer)
    return len(checkpoint.every(Path(folder)))


@pytest.mark.parametrize("dies", [-1, 0, 2])
def test_the_model_is_the_mean_of_those_of_all_who_are_there_each_as_after_one_of_its_steps(
    dies: int, tmp_path: Path
) -> None:
    (outcomes,) = forge.run([Job(ticks, SIZE, (str(tmp_path), dies))])
    there = [rank for rank in range(SIZE) if rank != dies]
    assert all(outcomes[rank].value > 0 for rank in there)
    for found in checkpoint.every(tmp_path):
        models = found.manifest["models"]
        steps = found.model()["w"] * models
        assert models <= len(there)
        assert torch.equal(steps, steps.round())
        assert found.step in steps.tolist()
        assert (models, found.manifest["workers"]) == (len(there), len(there)) or min(steps) == 0
    assert any(found.manifest["models"] == len(there) for found in checkpoint.every(tmp_path))


def alone(folder: str) -> list[str]:
    model = net()
    optimizer = ob.attach(sgd(model), model, checkpoint=folder, every_s=OFTEN_S)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for t in range(4):
            backward(optimizer, model, 0, t)
            optimizer.step()
            time.sleep(OFTEN_S)
        optimizer.finish()
    return [str(one.message) for one in heard]


def test_a_worker_that_is_alone_writes_them_itself_and_warns_where_it_cannot(tmp_path: Path) -> None:
    assert alone(str(tmp_path)) == []
    found, _ = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step in (3, 4)
    (tmp_path / "file").touch()
    said = alone(str(tmp_path / "file"))
    assert said
    assert all(line.startswith(f"no checkpoint was written to {tmp_path / 'file'}: ") for line in said)


def cannot_be_written(rank: int, folder: str) -> float:
    model = net()
    optimizer = ob.attach(sgd(model), model, checkpoint=folder, every_s=OFTEN_S)
    for t in range(300):
        backward(optimizer, model, rank, t)
        optimizer.step()
        time.sleep(0.005)
    optimizer.finish()
    return float(flat(model).sum())


def test_where_none_can_be_written_the_run_goes_on_and_its_host_process_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (outcomes,) = forge.run([Job(cannot_be_written, SIZE, (str(tmp_path / "file"),))])
    assert len(set(forge.values(outcomes))) == 1
    said = "".join(one.stderr for one in outcomes)
    assert f"offbeat: no checkpoint was written to {tmp_path / 'file'}: " in said


# Taking a run up.


def saved_state() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(5)
    inner = sgd(model)
    (flat_of(model) ** 2).sum().backward()
    inner.step()
    return model, inner


def flat_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.reshape(-1) for p in model.parameters()])


def save(folder: Path, step: int = STEP) -> None:
    model, inner = saved_state()
    state = folder / "state"
    torch.save({"optimizer": inner.state_dict(), "step": step, "shares": []}, state)
    about = {"step": step, "method": "eager()", "workers": 8, "parameters": 83}
    checkpoint.write(folder / "saved", packed({**model.state_dict()}), memoryview(state.read_bytes()), about)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("to take up")
    save(place)
    return str(place / "saved")


def takes_up(rank: int, method: str, folder: str) -> tuple[int, bool, bool, list[float]]:
    os.environ["OFFBEAT_RESUME"] = folder
    model = net()
    optimizer = ob.attach(sgd(model, lr=0.3), model, EVERY_KIND[method], steps=STEP + MORE)
    wanted, inner = saved_state()
    same = torch.equal(flat(model), flat(wanted))
    remembers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    remembers_the_same = torch.equal(
        flat(remembers), flat(inner.state[p]["momentum_buffer"] for p in wanted.parameters())
    )
    begun = optimizer.begun_at
    for t in range(begun, STEP + MORE):
        backward(optimizer, model, rank, t)
        optimizer.step()
    end(optimizer)
    assert optimizer.me.t >= STEP + MORE
    return begun, same, remembers_the_same, flat(model).tolist()


TAKEN_UP = [method for method in EVERY_KIND if "per_node=3" not in method]


@pytest.fixture(scope="module")
def taken_up(folder: str) -> dict[str, list[forge.Outcome]]:
    jobs = [Job(takes_up, FEWER, (method, folder), timeout_s=90) for method in TAKEN_UP]
    return dict(zip(TAKEN_UP, forge.run(jobs, at_once=2), strict=True))


@pytest.mark.parametrize("method", TAKEN_UP)
def test_with_every_method_and_another_number_of_workers_a_run_goes_on_from_there(
    taken_up: dict[str, list[forge.Outcome]], method: str
) -> None:
    found = forge.values(taken_up[method])
    assert [one[:3] for one in found] == [(STEP, True, True)] * FEWER
    assert found[0][3] == found[1][3]
    assert torch.tensor(found[0][3]).isfinite().all()


def asked_twice(rank: int, folder: str) -> list[int]:
    begun = []
    os.environ["OFFBEAT_RESUME"] = folder
    for resume in (None, None, folder):
        model = net()
        with ob.attach(sgd(model), model, resume=resume) as optimizer:
            begun.append(optimizer.begun_at)
    return begun


def test_what_the_launcher_says_is_for_the_first_run_of_a_script_and_what_the_script_says_for_each(folder: str) -> None:
    assert forge.values(forge.run([Job(asked_twice, FEWER, (folder,))])[0]) == [[STEP, 0, STEP]] * FEWER


def refused(rank: int, folders: list[str], hidden: int) -> str:
    model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()
    return attempt(lambda: ob.attach(sgd(model), model, resume=folders[rank]))


@pytest.mark.parametrize("who", ["another model", "another checkpoint", "all damaged"])
def test_what_cannot_be_taken_up_is_refused_in_a_sentence(who: str, folder: str, tmp_path: Path) -> None:
    folders, hidden, words = [folder, folder], 8, ""
    if who == "another model":
        hidden, words = 9, "is of another model: it has 0.weight of [8, 6] numbers, and the model of [9, 6]"
    elif who == "another checkpoint":
        save(tmp_path, STEP + 1)
        folders[1] = str(tmp_path / "saved")
        words = (
            "the ranks differ in their checkpoint: rank 0 has checkpoint-1 of step 70, rank 1 has checkpoint-1 of step"
        )
    else:
        save(tmp_path)
        (tmp_path / "saved" / "checkpoint-1" / checkpoint.MODEL).write_bytes(b"\0" * 40)
        folders = [str(tmp_path / "saved")] * FEWER
        words = "model.safetensors has 40 bytes, and should have"
    (outcomes,) = forge.run([Job(refused, FEWER, (folders, hidden))])
    assert all(words in one for one in forge.values(outcomes)), forge.values(outcomes)


def a_folder_without_any(rank: int, folder: str) -> int:
    model = net()
    with ob.attach(sgd(model), model, resume=folder) as optimizer:
        return optimizer.begun_at


def test_where_there_is_no_checkpoint_yet_the_run_begins(tmp_path: Path) -> None:
    assert forge.values(forge.run([Job(a_folder_without_any, FEWER, (str(tmp_path),))])[0]) == [0] * FEWER


def warned(rank: int, folder: str) -> tuple[int, list[str]]:
    model = net()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        optimizer = ob.attach(sgd(model), model, resume=folder)
    optimizer.finish()
    return optimizer.begun_at, [str(one.message) for one in heard]


def test_of_a_damaged_one_all_are_warned_and_begin_with_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "saved" / "checkpoint-2" / checkpoint.STATE
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    words = f"{path} has changed since it was written: its digest is another; the run is taken up from the one before"
    assert forge.values(forge.run([Job(warned, FEWER, (str(tmp_path / "saved"),))])[0]) == [(1, [words])] * FEWER


# With the place in the data.

SAMPLES, BATCH = 96, 2


def shared(rank: int, folder: str, made: str) -> tuple[int, list[int]]:
    """What it begins with, and which samples it uses: until there is a checkpoint, or all that are left."""
    model, used = net(), list[int]()
    early = ob.share(range(SAMPLES), BATCH) if made == "before" else None
    taken_up = bool(list(Path(folder).glob("checkpoint-*")))
    optimizer = ob.attach(sgd(model), model, checkpoint=folder, every_s=OFTEN_S, resume=folder)
    sampler = early if early is not None else ob.share(range(SAMPLES), BATCH)
    begun = sampler.epoch
    for _ in until(lambda: False):
        for batch in sampler:
            if not taken_up and list(Path(folder).glob("checkpoint-*")):
                os._exit(0)
            used += batch
            backward(optimizer, model, rank, 0)
            optimizer.step()
            time.sleep(0.004)
        if taken_up:
            break
    end(optimizer)
    return begun, used


@pytest.mark.parametrize("made", ["before", "after"])
def test_the_samples_that_were_left_are_used_once_by_whoever_takes_the_run_up(made: str, tmp_path: Path) -> None:
    forge.run([Job(shared, SIZE, (str(tmp_path), made))])
    saved = checkpoint.every(tmp_path)[0]
    (state,) = torch.load(saved.place / checkpoint.STATE, weights_only=True)["shares"]
    epoch = int(state["epoch"])
    for other in checkpoint.every(tmp_path)[1:]:  # the next job is to take up this one
        shutil.rmtree(other.place)
    found = forge.values(forge.run([Job(shared, FEWER, (str(tmp_path), made))])[0])
    assert [begun for begun, _ in found] == [epoch] * FEWER
    left = state["left"].get(epoch, torch.arange(SAMPLES // BATCH))
    assert len({sample for _, used in found for sample in used}) == sum(len(used) for _, used in found)
    assert sum(len(used) for _, used in found) == BATCH * len(left)
