"""Whose Adam moments? Digits with AdamW, averaged seldom: what becomes of the loss, and what it costs in bytes.

python benchmarks/moments.py [--seeds 3]
"""

from __future__ import annotations

import argparse
import dataclasses
import platform

import torch

import offbeat as ob
from offbeat.basics.units import format_bytes

WORKERS, STEPS = 8, 384
SCENES = ((0.003, 8, 16), (0.01, 4, 32))  # learning rate, batch, period
MOMENTS = (None, "1/1", "3/3", "6/3", "3/6")


def task(lr: float, batch: int) -> ob.Task:
    return dataclasses.replace(ob.tasks.digits(batch=batch), optimizer=lambda p: torch.optim.AdamW(p, lr=lr))


def row(name: str, strategy: ob.Strategy, lr: float, batch: int, seeds: int) -> None:
    runs = [ob.simulate(strategy, task(lr, batch), WORKERS, STEPS, seed=seed) for seed in range(seeds)]
    losses = " ".join(f"{run.metrics['loss']:10.4g}" for run in runs)
    shares = " ".join(f"{run.metrics['accuracy']:6.1%}" for run in runs)
    print(f"{name:<12} loss {losses}   accuracy {shares}   {format_bytes(runs[0].wire_bytes)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    print(
        f"python benchmarks/moments.py --seeds {seeds}; Python {platform.python_version()}, torch {torch.__version__}"
    )
    for lr, batch, period in SCENES:
        print(f"\n{WORKERS} workers, {STEPS} steps of batch {batch}, AdamW {lr:g}, an average every {period} steps")
        row("allreduce", ob.allreduce(), lr, batch, seeds)
        for moments in MOMENTS:
            row(f"moments {moments or 'kept'}", ob.local_sgd(period, moments=moments), lr, batch, seeds)


if __name__ == "__main__":
    main()
