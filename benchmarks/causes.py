"""Why a method that does not wait loses with AdamW at equal samples: one process, one thing changed at a time.

    python benchmarks/causes.py [--seeds 1] [--steps 400] [--json FILE]

The task of ``character.py`` with four workers' batches. *DDP*: AdamW on the mean of the four gradients. *Late*: the
same, with every gradient so many steps old. *Adams*: each worker has an AdamW of its own, and the weights are averaged
after every step, so that nobody is late and all replicas are equal; with ``squares`` each divides by the mean square
that the mean of the four gradients would have, m² + (v − m²)/4.
"""

from __future__ import annotations

from statistics import mean

import torch
from character import STEPS, batch, evaluate, loss, task
from harness import Report, arguments
from torch import Tensor

WORKERS, BETAS, EPS, DECAY = 4, (0.9, 0.999), 1e-8, 0.01


def late(rate: float, seed: int, steps: int, by: int) -> float:
    """AdamW on the mean of all gradients, each applied so many steps after it was computed."""
    model = task(rate, seed).build(seed)
    parameters, waiting = list(model.parameters()), list[tuple[Tensor, ...]]()
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=True)
    for step in range(steps):
        inputs, targets = zip(*(batch(seed, rank, step) for rank in range(WORKERS)), strict=True)
        value = loss(model(torch.cat(inputs)), torch.cat(targets))
        waiting.append(torch.autograd.grad(value, parameters))
        if len(waiting) > by:
            for parameter, gradient in zip(parameters, waiting.pop(0), strict=True):
                parameter.grad = gradient
            optimizer.step()
    return evaluate(model)["loss"]


@torch.no_grad()
def adams(rate: float, seed: int, steps: int, squares: int) -> float:
    """One AdamW for each worker, and the mean of their weights after every step."""
    model = task(rate, seed).build(seed)
    parameters = list(model.parameters())
    x = torch.nn.utils.parameters_to_vector(parameters)
    m, v, (beta1, beta2) = torch.zeros(WORKERS, len(x)), torch.zeros(WORKERS, len(x)), BETAS
    for step in range(1, steps + 1):
        for rank in range(WORKERS):
            with torch.enable_grad():
                text, target = batch(seed, rank, step - 1)
                gradients = torch.autograd.grad(loss(model(text), target), parameters)
            g = torch.nn.utils.parameters_to_vector(gradients)
            m[rank].lerp_(g, 1 - beta1)
            v[rank].lerp_(g * g, 1 - beta2)
        of_mean, of_squares = m / (1 - beta1**step), v / (1 - beta2**step)
        noise = (of_squares - of_mean.square()).clamp_min(0.0)
        divisor = (of_squares - noise * (1 - 1 / squares)).sqrt() + EPS
        x.mul_(1 - rate * DECAY).add_((of_mean / divisor).mean(dim=0), alpha=-rate)
        torch.nn.utils.vector_to_parameters(x, parameters)
    return evaluate(model)["loss"]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(f"causes: one process, {WORKERS} workers' batches, {chosen.steps} steps", chosen)
    for what, function, rate, setting in (
        ("DDP", late, 0.004, 0),
        ("late by 1", late, 0.004, 1),
        ("late by 2", late, 0.004, 2),
        ("DDP", late, 0.002, 0),
        ("late by 1", late, 0.002, 1),
        ("Adams", adams, 0.004, 1),
        ("Adams", adams, 0.008, 1),
        ("Adams, squares=4", adams, 0.004, 4),
    ):
        losses = [function(rate, seed, chosen.steps, setting) for seed in range(chosen.seeds)]
        report.row(f"{what}, rate {rate:g}", f"{mean(losses):.4f}", losses=[round(one, 4) for one in losses])
    report.close()


if __name__ == "__main__":
    main()
