"""Every method that does not depend on timing, against a plain loop that is its paper's formula."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat as ob
from tests.support.formulas import (
    AT_ONCE,
    HEAVY,
    LR,
    PLAIN,
    UNEVEN,
    Local,
    by_allreduce,
    by_dasgd,
    by_diloco,
    by_dpsgd,
    by_local_sgd,
    by_matcha,
    by_noloco,
    by_sgp,
    by_sparseloco,
    close,
    final,
)

REFERENCES: dict[str, tuple[ob.Strategy, Callable[[int, int], Tensor]]] = {
    "allreduce": (ob.allreduce(), by_allreduce),
    "local_sgd": (ob.local_sgd(3), partial(by_local_sgd, 3)),
    "dasgd": (ob.dasgd(4, 2, 0.25), partial(by_dasgd, 4, 2, 0.25, "paper")),
    "dasgd at once": (ob.dasgd(4, 0, 0.4), partial(by_dasgd, 4, 0, 0.4, "paper")),
    "dasgd correct": (ob.dasgd(4, 3, merge="correct"), partial(by_dasgd, 4, 3, math.nan, "correct")),
    "dpsgd": (ob.dpsgd(), partial(by_dpsgd, "ring", "cta")),
    "dpsgd atc": (ob.dpsgd("exponential", "atc"), partial(by_dpsgd, "exponential", "atc")),
    "dpsgd edges": (ob.dpsgd(UNEVEN), partial(by_dpsgd, UNEVEN, "cta")),
    "sgp": (ob.sgp(), partial(by_sgp, "one_peer_exponential")),
    "sgp uneven": (ob.sgp(UNEVEN), partial(by_sgp, UNEVEN)),
    "matcha": (ob.matcha(), partial(by_matcha, "ring", 0.5)),
    "matcha whole": (ob.matcha("complete", 1.0), partial(by_matcha, "complete", 1.0)),
    "diloco": (ob.diloco(3), partial(by_diloco, 3, 0.7, 0.9, 1, 0, 0.0)),
    "diloco overlap": (ob.diloco(4, overlap=2), partial(by_diloco, 4, 0.7, 0.9, 1, 2, 0.0)),
    "streaming": (
        ob.diloco(6, 0.4, 0.8, fragments=2, overlap=2, merge=0.5),
        partial(by_diloco, 6, 0.4, 0.8, 2, 2, 0.5),
    ),
    "streaming thrice": (
        ob.diloco(6, 1.0, 0.0, fragments=3, overlap=1, merge=0.25),
        partial(by_diloco, 6, 1.0, 0.0, 3, 1, 0.25),
    ),
    "sparseloco": (
        ob.sparseloco(3, codec=ob.codec.topk(2, 4)),
        partial(by_sparseloco, 3, 0.95, 1.0, ob.codec.topk(2, 4)),
    ),
    "sparseloco that forgets": (
        ob.sparseloco(2, 0.3, 0.65, ob.codec.topk(1, 3, floats=True)),
        partial(by_sparseloco, 2, 0.3, 0.65, ob.codec.topk(1, 3, floats=True)),
    ),
    "noloco": (ob.noloco(3), partial(by_noloco, 3, 0.7, 0.5, 0.7)),
    "noloco pull": (ob.noloco(2, 0.9, 0.3, pull=0.2), partial(by_noloco, 2, 0.9, 0.3, 0.2)),
}


@pytest.mark.parametrize("steps", [1, 12, 29])
@pytest.mark.parametrize("name", REFERENCES)
def test_the_weights_are_those_of_the_papers_formula(name: str, steps: int) -> None:
    strategy, reference = REFERENCES[name]
    close(final(strategy, 5, steps, HEAVY).weights, reference(5, steps))


@pytest.mark.parametrize("seed", [1, 2])
def test_random_methods_follow_their_own_seed(seed: int) -> None:
    """Matchings and pairs come from the seed; so do initial weights, hence a run that begins with another seed's."""
    model = dataclasses.replace(HEAVY, model=partial(_model_of_seed, 0))
    close(final(ob.matcha(), 5, 12, model, seed=seed).weights, by_matcha("ring", 0.5, 5, 12, seed))
    close(final(ob.noloco(2), 5, 12, model, seed=seed).weights, by_noloco(2, 0.7, 0.5, 0.7, 5, 12, seed))


def _model_of_seed(seed: int) -> torch.nn.Module:
    return PLAIN.build(seed)


def by_adaptive(
    period: int,
    sampling_steps: int,
    low: float,
    high: float,
    cap: int,
    rates: Callable[[int], float],
    workers: int,
    steps: int,
) -> tuple[Tensor, list[int], list[int]]:
    """The weights, the steps after which all were averaged, and the periods that were in force."""
    its, p, cnt, samples, when, periods = Local(workers), period, 0, [], [], [period]
    for k in range(steps):
        its.descend(k, rates(k))
        cnt += 1
        if cnt == p:
            mean = its.w.mean(0)
            spread = (its.w**2).sum(1).mean() - (mean**2).sum()
            its.w, cnt = mean.expand_as(its.w), 0
            when.append(k + 1)
            if k < sampling_steps:
                samples.append(spread / rates(k))
            else:
                target = rates(k) * sum(samples) / len(samples)
                p += int(spread < low * target) - int(spread > high * target)
                p = min(max(p, 1), cap)
                periods.append(p)
    return its.w, when, periods


def _factor(k: int) -> float:
    return 1.0 if k < 80 else 1.6 if k < 110 else 0.3


@pytest.mark.parametrize("cap", [64, 5])
def test_the_adaptive_period_follows_the_papers_rule(cap: int) -> None:
    up_and_down = dataclasses.replace(HEAVY, scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=_factor))
    strategy = ob.adaptive(period=3, sampling=0.25, low=0.7, high=1.3, cap=cap)
    run = final(strategy, 4, 160, up_and_down, compute_s=1.0, network=AT_ONCE)
    w, when, periods = by_adaptive(3, 40, 0.7, 1.3, cap, lambda k: LR * _factor(k), 4, 160)
    assert [round(r.end_s) for r in run.trace.rounds[::2]] == when
    close(run.weights, w)
    moves = {b - a for a, b in pairwise(periods)}
    assert moves == {-1, 0, 1}, "this run must try all three branches to prove anything"


def test_sampling_above_one_is_a_number_of_steps_and_needs_no_horizon() -> None:
    cases: list[tuple[float, dict[str, Any]]] = [(20, {"seconds": 80}), (0.25, {"steps": 80})]
    runs = [
        ob.simulate(ob.adaptive(3, sampling=sampling), PLAIN, 4, compute_s=1.0, network=AT_ONCE, **end)
        for sampling, end in cases
    ]
    assert torch.equal(runs[0].weights, runs[1].weights)


def test_a_share_of_a_run_of_unknown_length_is_twenty_five_periods() -> None:
    unknown, told = (
        ob.simulate(ob.adaptive(2, sampling=s), PLAIN, 4, seconds=80, compute_s=1.0, network=AT_ONCE)
        for s in (0.25, 50)
    )
    assert torch.equal(unknown.weights, told.weights)
