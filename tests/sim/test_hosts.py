"""Exchanges in step among workers whose hosts are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import simpy
import torch

from offbeat.method import topology
from offbeat.method.effects import GradMix, Mix
from offbeat.method.replica import Replica
from offbeat.runs.trace import Trace
from offbeat.sim.exchanges import Exchanges, Pending
from offbeat.sim.network import Network
from offbeat.tensors import codec
from offbeat.tensors.houses import mean_of_hosts
from offbeat.tensors.sums import coded, mean
from offbeat.tensors.vector import Vec

HOMES, SEED, INT8 = (0, 0, 1, 1), 7, codec.int8(16)
EVERYONE = topology.everyone(4)(0)


def vec(seed: int) -> Vec:
    return Vec([torch.randn(900, generator=torch.Generator().manual_seed(seed))])


def exchanged(post: Callable[[Exchanges, Replica], Pending], homes: tuple[int, ...] = HOMES) -> torch.Tensor:
    """What all four workers are answered."""
    env = simpy.Environment()
    exchanges = Exchanges(env, Network(), Trace(), lambda pending: None, homes)
    replicas = [Replica(r, 4, vec(0), Vec(()), lambda g: None, list, SEED) for r in range(4)]
    tickets = [post(exchanges, me) for me in replicas]
    env.run()
    values = [ticket.value for ticket in tickets]
    assert values[0] is not None
    assert all(value is values[0] for value in values)
    return values[0].parts[0]


def by_rule(given: dict[int, Vec], lost: dict[int, Vec | None] | None = None) -> torch.Tensor:
    value = mean_of_hosts(given, range(4), HOMES, len(given), INT8, (SEED, 5), lost)
    assert value is not None
    return value.parts[0]


@pytest.mark.parametrize("begun", [False, True])
def test_a_mix_is_coded_by_hosts_and_reads_its_vector_when_it_is_made(begun: bool) -> None:
    def post(exchanges: Exchanges, me: Replica) -> Pending:
        x = vec(me.rank)
        ticket = exchanges.mix(me, 5, Mix(x, EVERYONE, INT8), begun)
        if begun:
            x.parts[0].zero_()
        return ticket

    assert torch.equal(exchanged(post), by_rule({r: vec(r) for r in range(4)}))
    assert not torch.equal(exchanged(post), exchanged(post, homes=()))


def test_what_a_mix_of_hosts_has_lost_is_the_first_members() -> None:
    lost = [{r: vec(10 + r) for r in range(4)} for _ in range(2)]

    def post(exchanges: Exchanges, me: Replica) -> Pending:
        return exchanges.mix(me, 5, Mix(vec(me.rank), EVERYONE, INT8, lost[0][me.rank]), begun=False)

    assert torch.equal(exchanged(post), by_rule({r: vec(r) for r in range(4)}, {**lost[1]}))
    for r in range(4):
        assert torch.equal(lost[0][r].parts[0], lost[1][r].parts[0])
        assert torch.equal(lost[0][r].parts[0], vec(10 + r).parts[0]) == (r in (1, 3))


def test_gradients_are_coded_by_hosts_of_those_who_have_one() -> None:
    def post(exchanges: Exchanges, me: Replica) -> Pending:
        own = None if me.rank == 2 else (lambda: vec(me.rank))
        return exchanges.gradient(me, 5, GradMix(EVERYONE, INT8), 0.0, 1.0, own)

    assert torch.equal(exchanged(post), by_rule({r: vec(r) for r in (0, 1, 3)}))


def test_what_is_gathered_is_coded_by_each_worker() -> None:
    def mixes(exchanges: Exchanges, me: Replica) -> Pending:
        return exchanges.mix(me, 5, Mix(vec(me.rank), EVERYONE, INT8, gathers=True), begun=False)

    def gradients(exchanges: Exchanges, me: Replica) -> Pending:
        return exchanges.gradient(me, 5, GradMix(EVERYONE, INT8, gathers=True), 0.0, 1.0, lambda: vec(me.rank))

    each = mean([coded(vec(r), INT8, (SEED, r, 5)) for r in range(4)], 4).parts[0]
    assert torch.equal(exchanged(mixes), each)
    assert torch.equal(exchanged(gradients), each)


def test_what_is_not_coded_is_summed_by_hosts() -> None:
    x = {r: vec(r).parts[0] for r in range(4)}

    def mixes(exchanges: Exchanges, me: Replica) -> Pending:
        return exchanges.mix(me, 5, Mix(vec(me.rank), EVERYONE), begun=False)

    def gradients(exchanges: Exchanges, me: Replica) -> Pending:
        return exchanges.gradient(me, 5, GradMix(EVERYONE), 0.0, 1.0, lambda: vec(me.rank))

    for post in (mixes, gradients):
        assert torch.equal(exchanged(post), ((x[0] + x[1]) + (x[2] + x[3])) / 4)
        assert torch.equal(exchanged(post, homes=()), (((x[0] + x[1]) + x[2]) + x[3]) / 4)
