"""Which method equals which other one, in which limit."""

from __future__ import annotations

import math

import pytest
import torch

import offbeat as ob
from tests.support.formulas import (
    HEAVY,
    by_local_sgd,
    close,
    final,
)

EQUALS_ALLREDUCE = {
    "local_sgd": ob.local_sgd(1),
    "adaptive": ob.adaptive(1, low=0.0, high=math.inf),
    "adaptive that may only shrink": ob.adaptive(1, low=0.0),
    "dasgd": ob.dasgd(1, 0, 0.0),
    "dasgd correct": ob.dasgd(1, 0, merge="correct"),
    "dpsgd": ob.dpsgd("complete", "atc"),
    "sgp": ob.sgp("everyone"),
    "diloco": ob.diloco(1, 1.0, 0.0),
    "sparseloco": ob.sparseloco(1, codec=None),
}
EQUALS_LOCAL = {
    "dasgd": ob.dasgd(4, 0, 0.0),
    "dasgd correct": ob.dasgd(4, 0, merge="correct"),
    "adaptive": ob.adaptive(4, low=0.0, high=math.inf),
    "adaptive that only samples": ob.adaptive(4, sampling=1.0),
    "diloco": ob.diloco(4, 1.0, 0.0),
    "sparseloco": ob.sparseloco(4, codec=None),
    "sparseloco that forgets": ob.sparseloco(4, 0.0, codec=None),
}
SERIAL = {
    **EQUALS_ALLREDUCE,
    **{f"{name}, period 4": made for name, made in EQUALS_LOCAL.items()},
    "adaptive, default": ob.adaptive(),
    "dasgd, late but correct": ob.dasgd(4, 2, merge="correct"),
    "dasgd, independent": ob.dasgd(4, 2, 1.0),
    "dpsgd": ob.dpsgd(),
    "sgp": ob.sgp(),
    "matcha": ob.matcha(),
    "noloco": ob.noloco(4, 1.0, 0.0),
}
TOGETHER = {  # with the number of steps after which all replicas must be equal, bit for bit
    "allreduce": (ob.allreduce(), 3),
    "qsgd": (ob.qsgd(4), 3),
    "local_sgd": (ob.local_sgd(4), 8),
    "local_sgd, coded": (ob.local_sgd(4, codec=ob.codec.qsgd(4)), 8),
    "adaptive": (ob.adaptive(4), 12),
    "dasgd": (ob.dasgd(4, 0, 0.0), 8),
    "diloco": (ob.diloco(4), 8),
    "diloco, coded": (ob.diloco(4, codec=ob.codec.int8()), 8),
    "sparseloco": (ob.sparseloco(4, codec=ob.codec.topk(2, 5)), 8),
}


@pytest.mark.parametrize("name", EQUALS_ALLREDUCE)
def test_in_this_limit_it_is_allreduce(name: str) -> None:
    close(final(EQUALS_ALLREDUCE[name]).final, final(ob.allreduce()).final)


def test_quantised_with_many_bits_it_is_nearly_allreduce() -> None:
    exact = final(ob.allreduce()).final
    errors = [(final(ob.qsgd(bits)).final - exact).norm().item() for bits in (4, 8, 16)]
    assert errors[0] > errors[1] > errors[2] > 0
    assert errors[2] < 1e-4


@pytest.mark.parametrize("name", EQUALS_LOCAL)
def test_in_this_limit_it_is_local_sgd(name: str) -> None:
    close(final(EQUALS_LOCAL[name], task=HEAVY).weights, final(ob.local_sgd(4), task=HEAVY).weights)


@pytest.mark.parametrize("name", ["dasgd", "adaptive", "adaptive that only samples"])
def test_in_this_limit_it_is_local_sgd_bit_for_bit(name: str) -> None:
    assert torch.equal(final(EQUALS_LOCAL[name]).weights, final(ob.local_sgd(4)).weights)


def test_two_workers_without_outer_momentum_make_noloco_local_sgd() -> None:
    close(final(ob.noloco(4, 1.0, 0.0), workers=2).weights, final(ob.local_sgd(4), workers=2).weights)


@pytest.mark.parametrize("name", SERIAL)
def test_one_worker_alone_is_serial_sgd(name: str) -> None:
    run = final(SERIAL[name], workers=1, task=HEAVY)
    close(run.final, by_local_sgd(99, 1, 13)[0])
    close(run.weights[0], run.final)


def test_one_worker_alone_is_not_serial_sgd_with_a_blend_or_an_outer_optimiser() -> None:
    serial = by_local_sgd(99, 1, 13)
    for strategy in (ob.dasgd(4, 1), ob.diloco(4), ob.noloco(4)):
        assert not torch.allclose(final(strategy, workers=1, task=HEAVY).weights, serial, atol=1e-4)


@pytest.mark.parametrize("name", TOGETHER)
def test_after_a_full_synchronisation_replicas_are_bitwise_equal(name: str) -> None:
    strategy, steps = TOGETHER[name]
    w = final(strategy, steps=steps, task=HEAVY).weights
    assert torch.equal(w, w[:1].expand_as(w))
    before = final(strategy, steps=steps - 1, task=HEAVY).weights
    assert name in ("allreduce", "qsgd") or not torch.equal(before, before[:1].expand_as(before))
