"""What methods do to the mean of all weights, and how late what was sent comes back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import offbeat as ob
from tests.support.formulas import (
    LR,
    UNEVEN,
    close,
    final,
    gradients,
    push_matrix,
    start,
)

LOSSY = (None, ob.codec.bf16(), ob.codec.qsgd(2))
KEEPS_THE_MEAN = {
    "local_sgd": ob.local_sgd(2),
    "adaptive": ob.adaptive(2),
    "dasgd": ob.dasgd(3, 1, merge="correct"),
    **{f"dpsgd {c and c.name}": ob.dpsgd(codec=c) for c in LOSSY},
    **{f"dpsgd atc {c and c.name}": ob.dpsgd("grid", "atc", codec=c) for c in LOSSY},
    **{f"sgp {c and c.name}": ob.sgp(codec=c) for c in LOSSY},
    **{f"matcha {c and c.name}": ob.matcha(codec=c) for c in LOSSY},
}


@pytest.mark.parametrize("name", KEEPS_THE_MEAN)
def test_the_mean_moves_by_the_mean_of_the_updates_alone(name: str) -> None:
    """Of plain SGD; whatever a codec loses is lost by nobody in particular."""
    runs = [final(KEEPS_THE_MEAN[name], 6, steps).weights for steps in range(8)]
    for t, (now, after) in enumerate(pairwise(runs)):
        close(after.mean(0), now.mean(0) - LR * gradients(now, t).mean(0))


@pytest.mark.parametrize(("c", "tolerance"), [(None, 1e-12), (ob.codec.qsgd(2), 1e-6)], ids=["exact", "qsgd2"])
def test_push_sum_conserves_numerators_and_weights_on_an_uneven_graph(c: Any, tolerance: float) -> None:
    """The codec sends an ω as a float32; that is all by which its sums may be off."""
    omega = torch.ones(5, 1, dtype=torch.float64)
    runs = [final(ob.sgp(UNEVEN, codec=c), 5, steps).weights for steps in range(8)]
    for t, (now, after) in enumerate(pairwise(runs)):
        before = (omega * now - LR * gradients(now, t)).sum(0)
        omega = push_matrix(UNEVEN, 5, t) @ omega
        torch.testing.assert_close((omega * after).sum(0), before, rtol=tolerance, atol=tolerance)
    assert omega.sum() == pytest.approx(5)
    assert not torch.allclose(omega, torch.ones_like(omega)), "on an uneven graph ω must differ from 1"


@pytest.mark.parametrize(("tau", "d", "xi"), [(4, 1, 0.25), (5, 3, 0.6), (3, 2, 0.0)])
def test_the_blend_discards_a_known_share_and_shrinks_the_spread_by_xi(tau: int, d: int, xi: float) -> None:
    at_snapshot = final(ob.dasgd(tau, d, xi), steps=tau).weights
    alone = final(ob.dasgd(tau, d, 1.0), steps=tau + d).weights
    blended = final(ob.dasgd(tau, d, xi), steps=tau + d).weights
    close(blended.mean(0), at_snapshot.mean(0) + xi * (alone.mean(0) - at_snapshot.mean(0)))
    close(blended - blended.mean(0), xi * (alone - alone.mean(0)))


def test_the_pulls_of_a_pair_cancel() -> None:
    """Σφ takes no notice of the pull: after one outer round from different φ, whatever γ is."""
    sums = [final(ob.noloco(3, 0.7, 0.0, pull=pull), 6, 6).weights.sum(0) for pull in (0.0, 0.5)]
    close(*sums)


# How late, and what becomes of it at the end.


@pytest.mark.parametrize("merge", ["paper", "correct"])
def test_a_delayed_average_is_applied_exactly_d_steps_later(merge: Any) -> None:
    alone = ob.dasgd(5, 0, 1.0)
    for steps in range(8):
        assert torch.equal(final(ob.dasgd(5, 3, merge=merge), steps=steps).weights, final(alone, steps=steps).weights)
    assert not torch.equal(final(ob.dasgd(5, 3, merge=merge), steps=8).weights, final(alone, steps=8).weights)


def test_a_fragment_under_way_is_applied_exactly_tau_steps_later_and_nothing_else_is() -> None:
    streaming, alone = ob.diloco(8, fragments=2, overlap=2, merge=0.5), ob.dasgd(5, 0, 1.0)
    for steps in range(4):
        assert torch.equal(final(streaming, steps=steps).weights, final(alone, steps=steps).weights)
    first, second = (final(s, steps=4).weights.split([3, 4], dim=1) for s in (streaming, alone))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_a_merge_of_one_leaves_the_local_weights_alone() -> None:
    assert torch.equal(final(ob.diloco(4, overlap=1, merge=1.0)).weights, final(ob.dasgd(5, 0, 1.0)).weights)


def test_an_average_under_way_is_blended_in_at_the_end() -> None:
    snapshot, run = final(ob.dasgd(4, 3), steps=4).weights, final(ob.dasgd(4, 3, 0.25), steps=6)
    close(run.final, (0.25 * run.weights + 0.75 * snapshot.mean(0)).mean(0))
    correct = final(ob.dasgd(4, 3, merge="correct"), steps=6)
    close(correct.final, correct.weights.mean(0))


def test_a_fragment_under_way_takes_its_outer_step_at_the_end() -> None:
    run = final(ob.diloco(4, 0.7, 0.9, overlap=2, merge=0.5), steps=3)
    sent = start(5) - final(ob.local_sgd(9), steps=2).weights
    theta = start(5)[0] - 0.7 * (1 + 0.9) * sent.mean(0)
    close(run.final, (0.5 * theta + 0.5 * run.weights).mean(0))
