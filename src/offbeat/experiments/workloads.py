"""What the experiments train: a model on data, with the learning rates that every method is tried with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from offbeat import tasks
from offbeat.basics import draw
from offbeat.experiments import datasets, navigation, translation, vowels
from offbeat.experiments.datasets import Dataset
from offbeat.tasks.task import Task

_BATCH = 0xFA55  # so that no other draw shares our key
_WATCHED_RANK, _WATCHED_SAMPLES = 1 << 20, 512  # a rank that no run has: its batches are the sample that is watched


@dataclass(frozen=True)
class Workload:
    """A model and its data. ``make``: the task, of a seed, a batch size and the data's folder.

    ``rates``: learning rates of the search, each about twice the one before. ``drops``: shares of the run after which
    the rate falls to a tenth, as in the papers' schedules. ``cost``: how long a batch takes, beside others, by its
    seed, size and place, rank and step. ``score``: the name of what a model is judged by besides, and its function.
    ``reached``: what of an evaluation is followed on the way, in place of the training loss, where times to it are of
    interest. ``has_losses``: False where there is but a score. ``check`` refuses where one of ``packages`` is missing.
    """

    said: str
    make: Callable[[int, int, Path | None], Task]
    rates: tuple[float, ...]
    momentum: float = 0.0
    drops: tuple[float, ...] = ()
    data: Dataset | None = None
    cost: Callable[[int, int, Path | None, int, int], float] | None = None
    score: tuple[str, Callable[[Path | None, nn.Module], float] | None] | None = None
    reached: str = ""
    has_losses: bool = True
    adam: bool = False
    packages: tuple[str, ...] = ()
    check: Callable[[], None] | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Data and packages that do not come along."""
        return (*(() if self.data is None else (self.data.name,)), *self.packages)

    def place(self, folder: Path | None) -> Path | None:
        """Where the data are; a ValueError says what is missing, and how to get it."""
        return None if self.data is None else self.data.place(folder)

    def task(self, seed: int, batch: int, rate: float, steps: int, folder: Path | None) -> Task:
        """The task at this learning rate; ``steps`` are those of a whole run, for the schedule."""
        optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=rate, momentum=self.momentum)
        if self.adam:
            optimizer = partial(torch.optim.Adam, lr=rate)
        scheduler = partial(_dropping, self.drops, steps) if self.drops else None
        return replace(self.make(seed, batch, self.place(folder)), optimizer=optimizer, scheduler=scheduler)

    def watched(self, task: Task, seed: int, batch: int, folder: Path | None) -> Task:
        """The same task, evaluated by its training loss, on a sample of the training data that is always the same; or
        by what is to be reached.
        """
        if self.reached:
            return replace(task, evaluate=partial(_reached, task, self.reached))
        if self.cost is not None:  # batches are of uneven lengths: one that holds all
            whole = self.make(seed, _WATCHED_SAMPLES, self.place(folder)).take(_WATCHED_RANK, 0)
        else:
            sample = [task.take(_WATCHED_RANK, k) for k in range(max(1, _WATCHED_SAMPLES // batch))]
            whole = tuple(torch.cat(parts) for parts in zip(*sample, strict=True))
        return replace(task, evaluate=partial(_training_loss, task, whole))

    def seconds(self, step_s: float, seed: int, batch: int, folder: Path | None) -> Callable[[int, int], float]:
        """How long a step takes that takes ``step_s`` on average, by (step, rank)."""
        assert self.cost is not None
        cost = partial(self.cost, seed, batch, self.place(folder))
        mean = statistics.fmean(cost(_WATCHED_RANK, k) for k in range(_WATCHED_SAMPLES))
        return lambda step, rank: step_s * cost(rank, step) / mean


@torch.no_grad()
def _training_loss(task: Task, sample: tuple[Tensor, ...], model: nn.Module) -> Mapping[str, float]:
    return {"loss": task.value(model, sample).item()}


def _reached(task: Task, what: str, model: nn.Module) -> Mapping[str, float]:
    assert task.evaluate is not None
    found = task.evaluate(model)
    return {"loss": found["loss"], "reached": found[what]}


def _dropping(drops: tuple[float, ...], steps: int, optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.1 ** sum(step >= share * steps for share in drops))


# Hyperplane regression


def hyperplane(dimension: int, rates: tuple[float, ...]) -> Workload:
    """A linear model that is to find a hyperplane, from samples with a little noise."""
    return Workload(f"hyperplane regression of {dimension:,} weights", partial(_hyperplane, dimension), rates)


def _hyperplane(dimension: int, seed: int, batch: int, place: Path | None) -> Task:
    return tasks.regression(dimension, batch, seed=seed, dtype=torch.float32)


# Images


class Convolutional(nn.Module):
    """Two convolutions, each of every second pixel, and a linear layer; images come as rows of pixels."""

    def __init__(self, side: int, channels: int) -> None:
        super().__init__()
        self.side = side
        self.first = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.second = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.last = nn.Linear(2 * channels * (side // 4) ** 2, 10)

    def forward(self, rows: Tensor) -> Tensor:
        x = rows.view(len(rows), 1, self.side, self.side)
        for convolution in (self.first, self.second):
            x = convolution(x).relu()
        out: Tensor = self.last(x.flatten(1))
        return out


def _digits(seed: int, batch: int, place: Path | None) -> Task:
    return replace(tasks.digits(batch, seed=seed), model=partial(Convolutional, 8, 8))


def _fashion(seed: int, batch: int, place: Path | None) -> Task:
    assert place is not None
    return Task(
        model=partial(Convolutional, 28, 8),
        loss=F.cross_entropy,
        batch=partial(_fashion_batch, place, batch, seed),
        optimizer=torch.optim.SGD,
        evaluate=partial(_fashion_evaluate, place),
        name="fashion",
    )


def _fashion_batch(place: Path, size: int, seed: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    images, labels, _, _ = datasets.fashion(place)
    chosen = torch.randint(len(labels), (size,), generator=draw.generator(_BATCH, seed, rank, step))
    return datasets.scaled(images[chosen]), labels[chosen]


@torch.no_grad()
def _fashion_evaluate(place: Path, model: nn.Module) -> dict[str, float]:
    _, _, images, labels = datasets.fashion(place)
    output = torch.cat([model(datasets.scaled(part)) for part in images.split(1000)])
    right = (output.argmax(dim=1) == labels).double().mean().item()
    return {"loss": F.cross_entropy(output, labels).item(), "accuracy": right}


# As the papers train: momentum 0.9, and a rate that drops twice. PLAIN: neither, as in MATCHA's own runs.
DIGITS = Workload(
    "a CNN of 1,900 parameters on the digits (8 × 8 pixels)", _digits, (0.02, 0.04, 0.08), 0.9, (0.5, 0.8)
)
FASHION = Workload(
    "a CNN of 9,100 parameters on Fashion-MNIST",
    _fashion,
    (0.025, 0.05, 0.1),
    0.9,
    (0.5, 0.8),
    datasets.FASHION,
)
PLAIN_DIGITS = replace(DIGITS, rates=(0.1, 0.2, 0.4), momentum=0.0, drops=())
PLAIN_FASHION = replace(FASHION, rates=(0.1, 0.2, 0.4), momentum=0.0, drops=())

# Sequences

VOWELS = Workload(
    "an LSTM of 6,300 parameters on JapaneseVowels, in batches of sequences that are about as long",
    vowels.task,
    (0.1, 0.2),
    0.9,
    (0.8,),
    cost=vowels.cost,
)
PROVERBS = Workload(
    "a Transformer on the Proverbs, English and Spanish, in batches of verses that are about as long, Adam",
    translation.task,
    (0.002, 0.004, 0.008),
    drops=(0.8,),
    cost=translation.cost,
    score=("BLEU", translation.score),
    reached="accuracy",
    adam=True,
    packages=("sacrebleu",),
    check=translation.check,
)
TRANSLATION = replace(
    PROVERBS,
    said="a Transformer on 31,000 verses, English and Spanish, in batches of verses that are about as long, Adam",
    data=datasets.VERSES,
)

# Navigation

NAVIGATION = Workload(
    "PPO on MiniGrid (" + ", ".join(navigation.WORLDS) + "; a world for each worker), turns of whole episodes and "
    f"{navigation.LEARNS} steps of learning, Adam",
    navigation.task,
    (0.0005, 0.001, 0.002),
    score=("return", None),
    reached="score",
    has_losses=False,
    adam=True,
    packages=("minigrid",),
    check=navigation.check,
)
