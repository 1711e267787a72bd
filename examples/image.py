"""A convolutional network on the handwritten digits that Offbeat brings, with batches of uneven cost.

torchrun --standalone --nproc-per-node 2 examples/image.py [--method wagma] [--steps 200]

Prints the accuracy of the average of the workers on held-out images, and who was waited for.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from torch import nn
from torch.nn import functional as F

import offbeat as ob


def network() -> nn.Module:
    """Three layers with BatchNorm, whose statistics are averaged too. An image is a row of 64 numbers."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", help="any of `offbeat list`, with settings or without; none: Offbeat's default")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    device = ob.init()

    digits = ob.tasks.digits(batch=32)
    torch.manual_seed(0)
    model = network().to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, given.steps)
    with ob.attach(inner, model, given.method, steps=given.steps) as optimizer:
        uneven = random.Random(optimizer.rank)
        for step in range(given.steps):
            time.sleep(0.03 if uneven.random() < 0.2 else 0.0)  # now a worker is late, now another
            images, labels = digits.batch(optimizer.rank, step)
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    if optimizer.rank == 0:
        assert digits.evaluate is not None
        found = digits.evaluate(model.eval().cpu())
        quality = f"accuracy {found['accuracy']:.1%}, loss {found['loss']:.3f}"
        print(f"{optimizer.method.name}: {quality}, {optimizer.size} workers")
        print(optimizer.summary())


if __name__ == "__main__":
    main()
