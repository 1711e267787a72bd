"""What a sum costs in virtual time: a coded one in two phases, a gathered one, one without a codec."""

from __future__ import annotations

import pytest

import offbeat as ob
from offbeat.sim.costs import sum_cost
from offbeat.tensors.vector import Vec

MILLION = Vec((), 4_000_000)  # float32 numbers, of which only the size is known
SLOW = ob.Network(latency_s=0.001, bandwidth_Bps=1e6)


@pytest.mark.parametrize("members", [2, 5, 16])
def test_two_phases_cost_what_an_all_reduce_of_the_coded_bytes_costs(members: int) -> None:
    ranks = range(members)
    plain_s, plain = sum_cost(SLOW, ranks, MILLION, None)
    coded_s, coded = sum_cost(SLOW, ranks, MILLION, ob.codec.bf16())
    latencies_s = 2 * (members - 1) * 0.001
    assert coded == plain / 2 == 2 * (members - 1) * 2_000_000
    assert coded_s - latencies_s == pytest.approx((plain_s - latencies_s) / 2, rel=0.01)


@pytest.mark.parametrize("members", [2, 5, 16])
def test_gathering_costs_every_message_on_every_worker(members: int) -> None:
    seconds, sent = sum_cost(SLOW, range(members), MILLION, ob.codec.bf16(), gathers=True)
    assert sent == members * (members - 1) * 2_000_000
    assert seconds == pytest.approx((members - 1) * (0.001 + 2.0))


def test_an_all_to_all_is_as_slow_in_each_of_its_rounds_as_its_slowest_message() -> None:
    latency = {(0, 1): 1.0, (1, 2): 2.0, (2, 0): 3.0, (0, 2): 10.0, (1, 0): 20.0, (2, 1): 30.0}
    links = ob.Network(latency_s=lambda a, b: latency[a, b], bandwidth_Bps=1e6)
    assert links.all_to_all_s([0, 1, 2], 1e6) == pytest.approx((3.0 + 1) + (30.0 + 1))
    assert ob.Network(0.5, 1e6).all_to_all_s([0, 1, 2], 1e6) == pytest.approx(2 * 1.5)


def test_a_sum_of_one_costs_nothing() -> None:
    assert sum_cost(SLOW, [3], MILLION, ob.codec.int8()) == (0.0, 0)


@pytest.mark.parametrize(
    "strategy", [ob.local_sgd(1, codec=ob.codec.int8()), ob.eager("everyone", codec=ob.codec.int8())]
)
def test_methods_send_that_many_bytes(strategy: ob.Strategy) -> None:
    run = ob.simulate(strategy, None, workers=4, steps=1, parameters=51_200)
    assert run.wire_bytes == 2 * 3 * (51_200 + 4 * 100)


def test_qsgd_gathers_as_its_paper_does() -> None:
    run = ob.simulate(ob.qsgd(8), None, workers=4, steps=1, parameters=51_200)
    assert run.wire_bytes == 4 * 3 * (51_200 + 4 * 100)
