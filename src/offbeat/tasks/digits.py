"""Handwritten digits: 1,797 images of 8×8 pixels, inside the package, learnt in seconds."""

from __future__ import annotations

from functools import cache, partial
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.basics import draw
from offbeat.tasks.task import Task

_HELD_OUT_PER_DIGIT = 36  # a fifth of every digit's images, 360 in all
_BATCH, _SPLIT = 0xD161, 0xD162  # so that no other draw shares our keys


class _Data(NamedTuple):
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def digits(
    batch: int = 32,
    hidden: int = 64,
    lr: float = 0.1,
    momentum: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Task:
    """A network of one hidden layer on the handwritten digits, trained by SGD.

    Every worker draws from the same 1,437 images, with replacement. The other 360, 36 of each digit, are held out and
    are the same for every seed.

    Arguments:
        batch: images a worker takes each step.
        hidden: width of the hidden layer.
        lr: of ``torch.optim.SGD``.
        momentum: of ``torch.optim.SGD``.
        seed: which images are drawn. (The initial weights come from the seed of the run.)
        dtype: of the model and the images.
        device: of the model and the images. The weights are drawn on the CPU: the same for every device.

    The data are from E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI (1998), CC BY 4.0.
    """
    if batch < 1:
        raise ValueError(f"a batch of {batch} images teaches nothing; use batch=1 or more")
    if hidden < 1:
        raise ValueError(f"a hidden layer of {hidden} units lets nothing through; use hidden=1 or more")
    device = torch.device(device)
    return Task(
        model=partial(_network, hidden, dtype, device),
        loss=F.cross_entropy,
        batch=partial(_batch, batch, seed, dtype, device),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum),
        evaluate=partial(_evaluate, dtype, device),
        name="digits",
    )


def _network(hidden: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    first = nn.Linear(64, hidden, device="cpu", dtype=dtype)
    last = nn.Linear(hidden, 10, device="cpu", dtype=dtype)
    return nn.Sequential(first, nn.ReLU(), last).to(device)


def _batch(size: int, seed: int, dtype: torch.dtype, device: torch.device, rank: int, step: int) -> tuple[Tensor, ...]:
    data = _data(dtype, device)
    generator = draw.generator(_BATCH, seed, rank, step)
    chosen = torch.randint(len(data.train_labels), (size,), generator=generator, device="cpu").to(device)
    return data.train_images[chosen], data.train_labels[chosen]


@torch.no_grad()
def _evaluate(dtype: torch.dtype, device: torch.device, model: nn.Module) -> dict[str, float]:
    data = _data(dtype, device)
    output = model(data.test_images)
    return {
        "loss": F.cross_entropy(output, data.test_labels).item(),
        "accuracy": (output.argmax(dim=1) == data.test_labels).double().mean().item(),
    }


@cache
def _data(dtype: torch.dtype, device: torch.device) -> _Data:
    with files("offbeat.tasks").joinpath("data", "digits.npz").open("rb") as file, np.load(file) as stored:
        images = torch.from_numpy(stored["images"]).to(device, dtype) / 8 - 1  # from 0 … 16 to −1 … 1
        labels = torch.from_numpy(stored["labels"]).to(device, torch.int64)
    train: list[int] = []
    test: list[int] = []
    for digit in range(10):
        members = (labels == digit).nonzero().flatten().tolist()
        order = [members[i] for i in draw.permutation(len(members), _SPLIT, digit)]
        test += order[:_HELD_OUT_PER_DIGIT]
        train += order[_HELD_OUT_PER_DIGIT:]
    return _Data(images[train], labels[train], images[test], labels[test])
