"""Nodes between real processes: in step inside, without waiting between them."""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from functools import cache, partial

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.method.effects import Channel, Got, GradMix, Open
from offbeat.method.replica import Replica
from offbeat.rounds.rules import Rules
from offbeat.runs.trace import Round
from tests.support import forge
from tests.support.counted import AT_MOST, Seen, counted, failing_early, now_and_then
from tests.support.forge import Job
from tests.support.long import every_or_in_turns
from tests.support.scenarios import CARRIERS, Call, Told, Turns, in_turn, over, scenario

pytestmark = pytest.mark.live

PAIRS = {
    "first": ob.eager(per_node=2),
    "every step": ob.eager(per_node=2, catch_up="every_step", sync_every=3),
    "late": ob.eager(per_node=2, late=1, sync_every=4),
    "bounded": ob.eager(per_node=2, sync="bounded", staleness=2),
    "correct": ob.wagma(per_node=2, tau=4, merge="correct"),
    "wagma, late": ob.wagma(per_node=2, tau=None, late=1),
    "wagma": ob.wagma(per_node=2, tau=3),
    "wagma, coded": ob.wagma(per_node=2, tau=4, codec=ob.codec.qsgd(8)),
    "moments too": ob.wagma(per_node=2, tau=None, merge="correct", moments=2),
}
NODES_ON = (*CARRIERS, "split")  # in the last some nodes are on one host, and some on two
EVEN, UNEVEN = (8, 8, 8, 8), (10, 7, 0, 13)
EMPTY = (6, 7, 0, 0, 3, 9)  # a node without any data
AVERAGED = [(7, 7, 7, 0), (7, 7, 0, 0)]  # a rank that has finished in a node that has not, and a node that has
FAILS = [
    ("first", "raised", 1, "shm"), ("first", "raised", 2, "shm"), ("wagma", "killed", 3, "shm"),
    ("late", "raised", 3, "split"), ("wagma", "killed", 3, "split"), ("first", "killed", 2, "split"),
]  # fmt: skip


def one_pair(rank: int, name: str, batches: tuple[int, ...], average_at: tuple[int, ...]) -> Seen:
    """A case with random lateness."""
    late = partial(now_and_then, random.Random(f"{name} {rank}"))
    return counted(rank, len(batches), PAIRS[name], batches, late, average_at)


@cache
def ran(carrier: str, batches: tuple[int, ...], average_at: tuple[int, ...] = ()) -> Turns[str]:
    calls = {name: Call(over, (carrier, one_pair, name, batches, average_at)) for name in PAIRS}
    return in_turn(calls, len(batches), init=False)


# With even data over every carrier; with others, at every change, over one.
RUNS = [(EVEN, carrier) for carrier in NODES_ON] + every_or_in_turns((UNEVEN, EMPTY), NODES_ON)
RUNS_WITH_AVERAGES = every_or_in_turns(AVERAGED, NODES_ON)
WORDS = {
    EVEN: "even", UNEVEN: "uneven", EMPTY: "an empty node", AVERAGED[0]: "a rank has finished",
    AVERAGED[1]: "a node has finished",
}  # fmt: skip
of_runs = pytest.mark.parametrize(("batches", "carrier"), RUNS, ids=lambda one: WORDS.get(one, one))
on_both = pytest.mark.parametrize("carrier", NODES_ON)


def applied(batches: tuple[int, ...]) -> torch.Tensor:
    """What the slots hold, times P: a node's mean is over those of it who had data in that step."""
    slots = torch.zeros(len(batches), AT_MOST, dtype=torch.float64)
    for rank, count in enumerate(batches):
        first = rank - rank % 2
        for step in range(count):
            slots[rank, step] = 2.0 / sum(step < other for other in batches[first : first + 2])
    return slots.reshape(-1)


@pytest.mark.parametrize("name", PAIRS)
@of_runs
def test_a_run_of_nodes_ends_with_equal_replicas_and_leaves_nothing_behind(
    batches: tuple[int, ...], carrier: str, name: str
) -> None:
    everyone: list[Seen] = ran(carrier, batches)[name]
    assert all(torch.equal(one.final, everyone[0].final) for one in everyone)
    assert [(one.threads, one.sockets) for one in everyone] == [([], 0)] * len(batches)


@pytest.mark.parametrize("name", [n for n in PAIRS if n not in ("wagma", "wagma, coded")])
@of_runs
def test_every_sample_of_every_node_is_applied_once(batches: tuple[int, ...], carrier: str, name: str) -> None:
    final = ran(carrier, batches)[name][0].final
    assert torch.allclose(final * len(batches), applied(batches), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", PAIRS)
@on_both
def test_all_ranks_of_a_node_name_the_ways(carrier: str, name: str) -> None:
    for seen in ran(carrier, EVEN)[name]:
        assert seen.carriers == (("shm",) if carrier == "shm" else ("shm", "tcp"))


@pytest.mark.parametrize("name", ["first", "bounded", "wagma"])
@on_both
def test_rounds_are_told_by_leaders_and_name_whole_nodes(carrier: str, name: str) -> None:
    outs: list[Seen] = ran(carrier, EVEN)[name]
    assert [bool(out.rounds) for out in outs] == [True, False, True, False]
    for out in outs:
        for r in out.rounds:
            assert all((rank ^ 1) in r.fresh for rank in r.fresh)
            assert all(r.staleness[rank ^ 1] == old for rank, old in r.staleness.items())
            assert set(r.fresh) <= set(r.staleness)
            assert min(r.staleness.values(), default=0) >= 0


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("batches", "carrier"), RUNS_WITH_AVERAGES, ids=lambda one: WORDS.get(one, one))
def test_an_average_in_the_middle_makes_all_nodes_equal(batches: tuple[int, ...], carrier: str, name: str) -> None:
    outs: list[Seen] = ran(carrier, batches, (2, 5))[name]
    training = [out for out, count in zip(outs, batches, strict=True) if count]
    assert [len(out.averages) for out in outs] == [2 if count else 0 for count in batches]
    for number in (0, 1):
        assert all(torch.equal(out.averages[number], outs[0].averages[number]) for out in training)
    assert all(torch.equal(out.final, outs[0].final) for out in outs)
    if name not in ("wagma", "wagma, coded"):
        assert torch.allclose(outs[0].final * 4, applied(batches), rtol=0, atol=1e-9)


@scenario(4)
def in_lockstep(rank: int) -> list[torch.Tensor]:
    """A small network on data of each rank's own, with momentum: its weights after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights, late = [], random.Random(rank // 2)
    with ob.attach(inner, model, ob.eager(per_node=2, sync_every=None), patience_s=120) as optimizer:
        for step in range(20):
            torch.randn(100, 100).mm(torch.randn(100, 100 * (1 + late.choice((0, 40))))).sum()  # one node is late
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
            model(x).square().mean().backward()
            optimizer.step()
            weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return weights


def test_the_ranks_of_a_node_have_the_same_bits_after_every_step(told: Told) -> None:
    a, b, c, d = told(in_lockstep)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(c, d, strict=True))


@scenario(4)
def beside_allreduce(rank: int) -> list[torch.Tensor]:
    """One node of all, nodes in step with one another, and allreduce: what they end with."""
    out = []
    for strategy in (ob.allreduce(), ob.eager(per_node=4), ob.eager("everyone", per_node=2)):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy, patience_s=120) as optimizer:
            for step in range(8):
                optimizer.zero_grad()
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
                model(x).square().mean().backward()
                optimizer.step()
        out.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return out


def test_nodes_that_wait_for_one_another_are_allreduce(told: Told) -> None:
    for allreduce, one_node, two_nodes in told(beside_allreduce):
        assert torch.equal(one_node, allreduce)
        torch.testing.assert_close(two_nodes, allreduce)


@scenario(4)
def contributors(rank: int) -> tuple[dict[int, dict[int, int]], list[Round]]:
    """A strategy of a user's own: what its results say of who contributed, and what the trace says."""
    said: dict[int, dict[int, int]] = {}

    async def body(me: Replica) -> None:
        def look(results: list[Got]) -> None:
            said.update({got.version: dict(got.contributors) for got in results})

        channel = Channel("mine", ob.topology.everyone(2), Rules(ob.waiting.first, "carry", 7), look, per_node=2)
        await Open(channel, None)
        async for t in me.own_steps(2):
            g = await GradMix(ob.topology.nodes(4, 2)(0))
            assert g is not None
            look(await channel.mix(g, t))
        async for got in channel.rest(lambda: None):
            look([got])

    model, late = nn.Linear(3, 1), random.Random(rank // 2)
    mine = dataclasses.replace(ob.eager(), body=body)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, mine, patience_s=120) as optimizer:
        for _ in range(30):
            time.sleep(late.choice((0.0, 0.0, 0.01)))
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    return said, optimizer.trace.rounds


def test_every_result_says_to_all_of_a_node_who_contributed_and_how_stale(told: Told) -> None:
    outs = told(contributors)
    rounds = {r.version: r for r in outs[0][1]}
    assert len(rounds) >= 30
    for said, _ in outs:
        assert said == {version: r.staleness for version, r in rounds.items()}


@pytest.mark.parametrize(("name", "how", "who", "where"), FAILS)
def test_when_one_rank_of_a_node_fails_all_nodes_end_and_say_who(name: str, how: str, who: int, where: str) -> None:
    (outcomes,) = forge.run([Job(over, 4, (where, failing_early, PAIRS[name], how, who), timeout_s=120)])
    reason = f"rank {who} failed: ValueError: the disk is full" if how == "raised" else f"rank {who} gives no sign of"
    assert outcomes[who].exit_code == (1 if how == "raised" else -signal.SIGKILL)
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert (outcome.exit_code, outcome.hung) == (1, False), outcome.stderr
            assert reason in outcome.error
