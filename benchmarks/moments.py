"""Whose Adam moments? Digits with AdamW: what becomes of the loss, and what it costs in bytes.

Averaged seldom, in step; and in partial rounds of workers with log-normal step times, where a message takes a fifth of
a step.

python benchmarks/moments.py [--seeds 3] [--only step|rounds]
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import offbeat as ob
from offbeat.basics.units import format_bytes

WORKERS, STEPS = 8, 384
SCENES = ((0.003, 8, 16), (0.01, 4, 32))  # learning rate, batch, period
MOMENTS = (None, "1/1", "3/3", "6/3", "3/6")
IN_ROUNDS: dict[str, Callable[..., ob.Method]] = {
    "self_clocked": ob.self_clocked,
    "wagma": ob.wagma,
    "correct": partial(ob.wagma, merge="correct"),
    "ad_psgd": ob.ad_psgd,
    "decoupled": partial(ob.decoupled, every=6, fragments=4),
}
SETTINGS, FEWER_STEPS = (None, 10), 192
STEP_S, MESSAGE_S = 0.1, 0.02


def task(lr: float, batch: int) -> ob.Task:
    return dataclasses.replace(ob.tasks.digits(batch=batch), optimizer=lambda p: torch.optim.AdamW(p, lr=lr))


def row(name: str, strategy: ob.Method, lr: float, batch: int, seeds: int, steps: int = STEPS, **how: Any) -> None:
    runs = [ob.simulate(strategy, task(lr, batch), WORKERS, steps, seed=seed, **how) for seed in range(seeds)]
    losses = " ".join(f"{run.metrics['loss']:10.4g}" for run in runs)
    shares = " ".join(f"{run.metrics['accuracy']:6.1%}" for run in runs)
    print(f"{name:<21} loss {losses}   accuracy {shares}   {format_bytes(runs[0].wire_bytes)}", flush=True)


def in_step(seeds: int) -> None:
    for lr, batch, period in SCENES:
        print(f"\n{WORKERS} workers, {STEPS} steps of batch {batch}, AdamW {lr:g}, an average every {period} steps")
        row("allreduce", ob.allreduce(), lr, batch, seeds)
        for moments in MOMENTS:
            row(f"moments {moments or 'kept'}", ob.local_sgd(period, moments=moments), lr, batch, seeds)


def in_rounds(seeds: int) -> None:
    print(f"\nin partial rounds: {WORKERS} workers, {FEWER_STEPS} steps of batch 8, AdamW 0.003, log-normal step times")
    model_bytes = 4 * sum(p.numel() for p in task(0.003, 8).build(0).parameters())
    how = {
        "compute_s": ob.delays.lognormal(STEP_S, 0.5),
        "network": ob.Network(latency_s=0.0, bandwidth_Bps=model_bytes / MESSAGE_S),
    }
    for name, make in IN_ROUNDS.items():
        for n in SETTINGS:
            row(f"{name}, {n or 'kept'}", make(moments=n), 0.003, 8, seeds, FEWER_STEPS, **how)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("step", "rounds"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    which = f" --only {given.only}" if given.only else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"python benchmarks/moments.py --seeds {given.seeds}{which}; {versions}")
    if given.only != "rounds":
        in_step(given.seeds)
    if given.only != "step":
        in_rounds(given.seeds)


if __name__ == "__main__":
    main()
