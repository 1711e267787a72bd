"""Claims about tasks: the value itself, and the workloads that come with Offbeat."""

import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat.tasks import TASKS, digits, named, optimum, regression
from offbeat.tasks.task import Task

RANKS = st.integers(0, 2000)
STEPS = st.integers(0, 10**6)
every_task = pytest.mark.parametrize("make", TASKS.values(), ids=TASKS.keys())


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(task: Task, steps: int, seed: int = 0) -> nn.Module:
    model = task.build(seed)
    optimizer = task.optimizer(list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        task.value(model, task.take(0, step)).backward()
        optimizer.step()
    return model


def evaluated(task: Task, model: nn.Module) -> dict[str, float]:
    assert task.evaluate is not None
    return dict(task.evaluate(model))


def a_task(**changes: Any) -> Task:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "loss": nn.functional.mse_loss,
        "batch": lambda rank, step: (torch.ones(2, 3), torch.ones(2, 1)),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "name": "mine",
    }
    return Task(**(parts | changes))


# Building


def numpy_state() -> Any:
    state: Any = np.random.get_state()
    return state[1].tolist()


@every_task
def test_the_same_seed_builds_the_same_weights_and_another_seed_others(make: Callable[[], Task]) -> None:
    task = make()
    torch.manual_seed(1)
    first = flat(task.build(7))
    torch.manual_seed(2)
    assert torch.equal(first, flat(task.build(7)))
    assert not torch.equal(first, flat(task.build(8)))


def test_a_model_that_draws_from_every_generator_depends_on_the_seed_alone_and_leaves_them_untouched() -> None:
    def model() -> nn.Module:
        net = nn.Linear(3, 1)
        with torch.no_grad():
            net.weight += float(np.random.rand()) + random.random()
        return net

    def later() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    def seed_everything(seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    task = a_task(model=model)
    seed_everything(5)
    undisturbed = later()
    seed_everything(5)
    built = flat(task.build(3))
    assert later() == undisturbed
    assert torch.equal(built, flat(task.build(3)))
    seed_everything(3)
    assert torch.equal(built, flat(model()))


def test_the_generators_are_put_back_even_if_building_fails() -> None:
    def fails() -> nn.Module:
        torch.rand(4), np.random.rand(4), random.random()
        raise RuntimeError("no model today")

    before = torch.get_rng_state(), numpy_state(), random.getstate()
    with pytest.raises(RuntimeError, match="no model today"):
        a_task(model=fails).build(0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numpy_state() == before[1]
    assert random.getstate() == before[2]


# Each in a process of its own, since CUDA must be asleep when the model is built.
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_building_a_model_leaves_the_generator_of_a_gpu_untouched(device: str) -> None:
    script = f"""
import torch
from torch import nn
from offbeat.tasks.task import Task
task = Task(lambda: nn.Linear(3, 1, device="{device}"), nn.functional.mse_loss, lambda r, t: (), lambda p: None)
torch.manual_seed(5)
first = task.build(3).weight
assert torch.cuda.is_initialized() == ("{device}" == "cuda")
drawn = torch.rand(2, device="cuda")
assert torch.equal(first, task.build(3).weight) and not torch.equal(first, task.build(4).weight)
torch.manual_seed(5)
assert torch.equal(drawn, torch.rand(2, device="cuda"))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="'mine' has no trainable parameters"):
        a_task(model=lambda: nn.Linear(3, 1).requires_grad_(False)).build(0)


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="is a str; let `model` be a function"):
        a_task(model=lambda: "resnet").build(0)


# Batches


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (torch.ones(2, 3), "is a Tensor; return a tuple of tensors"),
        (None, "is a NoneType; return a tuple of tensors"),
        ((), "is a tuple of nothing; return a tuple of tensors"),
        ((torch.ones(2, 3),), "is a tuple of Tensor; return a tuple of tensors"),
        ([torch.ones(2, 3), 4], "is a list of Tensor, int; return a tuple of tensors"),
        ((torch.ones(2, 3), torch.ones(())), "holds a tensor without dimensions"),
        ((torch.ones(2, 3), torch.ones(3)), "has parts of 2, 3 samples"),
        ((torch.ones(0, 3), torch.ones(0)), "is empty, .*; give every worker at least one sample"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_refused_with_its_rank_and_step(batch: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"the batch of rank 3 at step 14 of task 'mine' {sentence}"):
        a_task(batch=lambda rank, step: batch).take(3, 14)


def test_a_list_will_do_as_a_batch_and_a_model_may_take_several_inputs() -> None:
    task = a_task(batch=lambda rank, step: [torch.full((2, 1), 3.0), torch.full((2, 1), 4.0), torch.ones(2, 1)])

    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * b

    assert task.value(Product(), task.take(0, 0)).item() == (3 * 4 - 1) ** 2


@every_task
@given(rank=RANKS, step=STEPS)
def test_asking_twice_gives_the_same_batch_and_asking_elsewhere_another(
    make: Callable[[], Task], rank: int, step: int
) -> None:
    task = make()
    first = task.take(rank, step)
    other_rank, other_step = task.take(rank + 1, step), task.take(rank, step + 1)
    assert all(torch.equal(a, b) for a, b in zip(first, task.take(rank, step), strict=True))
    assert not torch.equal(first[0], other_rank[0])
    assert not torch.equal(first[0], other_step[0])


@every_task
def test_another_seed_draws_other_batches(make: Callable[..., Task]) -> None:
    assert not torch.equal(make(seed=0).take(0, 0)[0], make(seed=1).take(0, 0)[0])


@every_task
def test_drawing_a_batch_leaves_the_global_generators_untouched(make: Callable[[], Task]) -> None:
    before = torch.get_rng_state(), random.getstate()
    make().take(0, 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


# The tasks


@every_task
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_task_stays_in_its_dtype(make: Callable[..., Task], dtype: torch.dtype) -> None:
    task = make(dtype=dtype)
    model = task.build(0)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert task.value(model, task.take(0, 0)).dtype == dtype


@every_task
def test_a_task_travels_to_another_process_by_pickle(make: Callable[[], Task]) -> None:
    task, copy = make(), pickle.loads(pickle.dumps(make()))
    assert torch.equal(flat(trained(task, 3)), flat(trained(copy, 3)))


@pytest.mark.live
@every_task
def test_processes_agree_on_the_weights_and_the_batches_to_the_last_bit(make: Callable[[], Task]) -> None:
    script = f"""
import torch
from offbeat.tasks import named
task = named({make().name!r})
for tensor in [*task.build(3).parameters(), *task.take(1, 2)]:
    print(tensor.tolist())
"""
    there = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120).stdout
    here = [*named(make().name).build(3).parameters(), *make().take(1, 2)]
    assert there == "".join(f"{tensor.tolist()}\n" for tensor in here)


def test_serial_sgd_learns_more_than_93_percent_of_the_held_out_digits() -> None:
    task = digits()
    before, after = evaluated(task, task.build(0)), evaluated(task, trained(task, 600))
    assert before["accuracy"] < 0.3
    assert after["accuracy"] > 0.93
    assert after["loss"] < before["loss"] / 5


def test_held_out_digits_are_never_trained_on() -> None:
    seen: list[Tensor] = []
    task = digits()
    assert task.evaluate is not None

    class Spy(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return torch.zeros(len(images), 10)

    chance = task.evaluate(Spy())
    held_out = {tuple(row) for row in seen[0].tolist()}
    trained_on = {tuple(row) for rank in range(4) for t in range(200) for row in task.take(rank, t)[0].tolist()}
    assert len(held_out) == 360
    assert len(trained_on) > 1400  # nearly all of the 1,437: the claim is not empty
    assert not held_out & trained_on
    assert chance["accuracy"] == pytest.approx(0.1)  # all ten digits are equally many


def test_a_batch_of_digits_may_be_larger_than_the_data() -> None:
    images, labels = digits(batch=5000).take(0, 0)
    assert images.shape == (5000, 64)
    assert labels.unique().tolist() == list(range(10))
    assert (images.min().item(), images.max().item()) == (-1, 1)


def test_serial_sgd_finds_the_optimum_of_a_regression_without_noise() -> None:
    task = regression(noise=0.0)
    result = evaluated(task, trained(task, 400))
    assert result["distance"] < 1e-6
    assert result["loss"] == pytest.approx(result["distance"] ** 2)


def test_the_optimum_has_no_distance_and_only_the_noise_as_loss() -> None:
    task = regression(dimension=5, noise=0.3, seed=4)
    model = task.build(0)
    with torch.no_grad():
        next(model.parameters()).copy_(optimum(5, seed=4)[None])
    assert evaluated(task, model) == {"loss": pytest.approx(0.09), "distance": 0.0}


def test_the_exact_loss_of_a_regression_is_the_mean_over_many_batches() -> None:
    task = regression(noise=0.5, batch=50_000)
    model = task.build(1)
    sampled = task.value(model, task.take(0, 0)).item()
    assert sampled == pytest.approx(evaluated(task, model)["loss"], rel=0.03)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: digits(batch=0), "a batch of 0 images .* use batch=1 or more"),
        (lambda: digits(hidden=0), "a hidden layer of 0 units .* use hidden=1 or more"),
        (lambda: regression(dimension=0), "dimension 0 .* use dimension=1 or more"),
        (lambda: regression(batch=-1), "a batch of -1 samples .* use batch=1 or more"),
        (lambda: regression(noise=-0.1), "noise=-0.1 is not a standard deviation; use 0 or more"),
        (lambda: named("imagenet"), "no task is called 'imagenet'; use one of: digits, regression"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(make: Callable[[], Task], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
