"""One worker, or one node, has nobody to wait for and nobody to send to: its training is plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat as ob
from tests.support.methods import CODECS, a_method, settings_of

STEPS = 7
TASK = ob.tasks.regression(dimension=5, batch=4, noise=1.0, lr=0.05, momentum=0.5, dtype=torch.float32)
CODED = [name for name in ob.STRATEGIES if "codec" in settings_of(name)]


def serial(task: ob.Task = TASK, steps: int = STEPS) -> torch.Tensor:
    """Plain SGD, without any of this."""
    model = task.build(0)
    optimizer = task.optimizer(list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        task.value(model, task.take(0, step)).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def final(strategy: ob.Strategy, workers: int = 1, **how: Any) -> torch.Tensor:
    return ob.simulate(strategy, TASK, workers, STEPS, **how).final


def uncoded(strategy: ob.Strategy) -> ob.Strategy:
    return ob.strategy(strategy.name, **{**strategy.settings, "codec": None})


# Nobody to wait for.


@pytest.mark.parametrize("name", ["eager", "msync", "ringmaster", "self_clocked", "wagma"])
@given(data=st.data())
@settings(max_examples=40)
def test_one_worker_alone_is_plain_training_bit_for_bit_whatever_the_settings(name: str, data: st.DataObject) -> None:
    assert torch.equal(final(data.draw(a_method(name, 1))), final(ob.allreduce()))  # whose own law is below


@pytest.mark.parametrize("name", ["eager", "ringmaster", "self_clocked", "wagma"])
@given(data=st.data(), size=st.integers(2, 4))
@settings(max_examples=30)
def test_one_node_alone_is_allreduce_bit_for_bit_whatever_the_settings(
    name: str, data: st.DataObject, size: int
) -> None:
    drawn = data.draw(a_method(name, 1))
    node = ob.strategy(name, **{**drawn.settings, "per_node": size})
    assert torch.equal(final(node, size), final(ob.allreduce(), size))


ALSO = [
    ob.allreduce(), ob.qsgd(2), ob.local_sgd(2), ob.adaptive(2), ob.dasgd(3, 2, merge="correct"), ob.dpsgd(),
    ob.dpsgd(order="atc"), ob.ad_psgd(), ob.sgp(), ob.matcha(), ob.nonblocking(micro=1), ob.diloco(2, 1.0, 0.0),
    ob.noloco(2, 1.0, 0.0), ob.sparseloco(2), ob.decoupled(2, 1, outer_lr=1.0, outer_momentum=0.0),
]  # fmt: skip


@pytest.mark.parametrize("strategy", ALSO, ids=str)
def test_the_other_methods_alone_are_plain_training_to_rounding(strategy: ob.Strategy) -> None:
    """But for a blend with older weights (dasgd's) and an outer optimiser, which are the method."""
    torch.testing.assert_close(final(strategy), serial(), rtol=1e-5, atol=1e-6)


def test_the_other_methods_are_all_named() -> None:
    assert {s.name for s in ALSO} == set(ob.STRATEGIES) - {"eager", "msync", "ringmaster", "self_clocked", "wagma"}


# Nobody to send to.


@pytest.mark.parametrize("name", CODED)
@given(data=st.data(), codec=st.sampled_from(CODECS))
@settings(max_examples=15)
def test_with_one_worker_a_codec_changes_nothing(name: str, data: st.DataObject, codec: Any) -> None:
    drawn = data.draw(a_method(name, 1))
    coded = ob.strategy(name, **{**drawn.settings, "codec": codec})
    run, plain = (ob.simulate(s, TASK, 1, STEPS) for s in (coded, uncoded(drawn)))
    assert run.hash == plain.hash  # weights, times and bytes
    assert run.wire_bytes == 0


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_groups_of_one_code_nothing(codec: Any) -> None:
    """WAGMA's, with several workers and no full rounds: everybody trains alone, and nothing is sent."""
    run, plain = (ob.simulate(ob.wagma(group=1, tau=None, codec=c), TASK, 3, STEPS) for c in (codec, None))
    assert torch.equal(run.weights, plain.weights)
    assert run.wire_bytes == 0


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_a_server_that_alone_has_data_codes_nothing(codec: Any) -> None:
    """Its own share of the sum goes to nobody; the weights that it sends afterwards are never coded."""
    run, plain = (ob.simulate(ob.nonblocking(over="server", codec=c), TASK, 2, samples=1).final for c in (codec, None))
    assert torch.equal(run, plain)


def test_one_worker_with_two_bits_learns_as_without() -> None:
    task = ob.tasks.digits()
    coded, plain = (ob.simulate(ob.wagma(codec=c), task, 1, 60) for c in (ob.codec.qsgd(2), None))
    assert coded.metrics == plain.metrics


# The same in the live world: one process is a job of one.

LIVE = [
    ob.eager(codec=ob.codec.qsgd(2, 3)), ob.eager(late=1), ob.eager(late=1, codec=ob.codec.int8(5)),
    ob.ringmaster(1, codec=ob.codec.bf16()),
    ob.wagma(codec=ob.codec.qsgd(2, 3)), ob.wagma(late=1), ob.wagma(merge="correct", codec=ob.codec.bf16()),
    ob.local_sgd(2, codec=ob.codec.qsgd(2, 3)), ob.adaptive(2, codec=ob.codec.bf16()), ob.qsgd(2),
    ob.dasgd(2, 0, 0.0, codec=ob.codec.int8(5)), ob.dpsgd(codec=ob.codec.qsgd(2, 3)), ob.sgp(codec=ob.codec.bf16()),
    ob.self_clocked(), ob.self_clocked(codec=ob.codec.qsgd(2, 3)), ob.self_clocked(2, pause=0.5),
    ob.self_clocked(2, None, "everyone", late=0, codec=ob.codec.int8(5)),
]  # fmt: skip


@pytest.mark.parametrize("strategy", LIVE, ids=str)
def test_a_single_process_is_plain_training_bit_for_bit(strategy: ob.Strategy) -> None:
    model = TASK.build(0)
    with ob.attach(TASK.optimizer(list(model.parameters())), model, strategy) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            TASK.value(model, TASK.take(0, step)).backward()
            optimizer.step()
        assert optimizer.wire_bytes == 0
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()).detach(), serial())
