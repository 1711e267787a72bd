"""Means among hosts: inside each host first, one message a host; what a codec loses on the way is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat as ob
from offbeat.live.carriers.exchanges import Transport
from offbeat.live.transport import hosts
from offbeat.live.worker import start
from offbeat.method.effects import Mix
from offbeat.tensors.vector import Vec
from offbeat.topology import everyone
from tests.support import forge, namespaces
from tests.support.forge import Job
from tests.support.namespaces import TwoHosts
from tests.support.nets import flat, loss, net, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

# Ranks by host. Three hosts send each other stretches of long vectors, two send all of them.
HOUSES = {"2+2": (0, 0, 1, 1), "1+1+2": (0, 1, 2, 2), "3+1": (0, 0, 0, 1), "mixed up": (0, 1, 0, 1)}
LENGTHS = {"short": (5,), "long": (300_007,), "of two kinds": (70_001, 3)}
CODECS = {"bf16": ob.codec.bf16(), "int8": ob.codec.int8(bucket=64), "qsgd4": ob.codec.qsgd(4, bucket=64)}
SIZE, ROUNDS, CODED = 4, 6, 4_000
Found = dict[str, list[list[Tensor]]]


def vector(rank: int, number: int, lengths: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * number + rank)
    return [torch.randn(n, generator=draw, dtype=(torch.float32, torch.float64)[k]) for k, n in enumerate(lengths)]


def among(rank: int, homes: tuple[int, ...], do: Callable[[int, Transport], Found]) -> Found:
    """What ``do`` finds, where ranks are on such hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hosts.NAME, f"host {homes[rank]}")
        model = net()
        with ob.attach(sgd(model), model, ob.allreduce(), patience_s=60) as optimizer:
            return do(rank, optimizer._run.transport)


def mixed(transport: Transport, effect: Mix, seq: int) -> list[Tensor]:
    sent = transport.mix(effect, seq, 0)
    transport.waiter.wait(sent.works, "a mean")
    return list(sent.result().parts)


def plain_means(rank: int, transport: Transport) -> Found:
    out: Found = {}
    for k, (name, lengths) in enumerate(LENGTHS.items()):
        W = everyone(SIZE)(0)
        given = [Vec(vector(rank, n, lengths)) for n in range(ROUNDS)]
        out[name] = [mixed(transport, Mix(x, W), 100 * k + n) for n, x in enumerate(given)]
    return out


def coded_means(rank: int, transport: Transport) -> Found:
    """The means; and, last, all that this rank has kept of what coding lost."""
    out: Found = {}
    for k, (name, codec) in enumerate(CODECS.items()):
        kept = Vec([torch.zeros(CODED)])
        given = [Vec(vector(rank, n, (CODED,))) for n in range(ROUNDS)]
        effects = [Mix(x, everyone(SIZE)(0), codec, kept) for x in given]
        out[name] = [mixed(transport, effect, 100 * k + n) for n, effect in enumerate(effects)]
        out[name].append([*kept.parts])
    return out


@scenario(SIZE)
def in_all_houses(rank: int) -> dict[str, Found]:
    return {name: among(rank, homes, plain_means) for name, homes in HOUSES.items()}


@scenario(SIZE)
def coded_in_all_houses(rank: int) -> dict[str, Found]:
    return {name: among(rank, homes, coded_means) for name, homes in HOUSES.items()}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("houses", HOUSES)
def test_a_mean_is_everybodys_and_has_the_same_bits_on_all(told: Told, houses: str, lengths: str) -> None:
    everyones = [out[houses][lengths] for out in told(in_all_houses)]
    for number in range(ROUNDS):
        given = [vector(rank, number, LENGTHS[lengths]) for rank in range(SIZE)]
        for k, first in enumerate(everyones[0][number]):
            assert all(torch.equal(first, other[number][k]) for other in everyones)
            mean = (added([one[k] for one in given]) / SIZE).to(first.dtype)
            torch.testing.assert_close(first, mean, atol=1e-5, rtol=0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("houses", HOUSES)
def test_what_was_averaged_and_what_is_kept_is_all_that_was_given(told: Told, houses: str, codec: str) -> None:
    everyones = [out[houses][codec] for out in told(coded_in_all_houses)]
    *means, _ = everyones[0]
    given = added([vector(rank, n, (CODED,))[0] for rank in range(SIZE) for n in range(ROUNDS)])
    kept, got = added([out[-1][0] for out in everyones]), SIZE * added([one[0] for one in means])
    torch.testing.assert_close(got + kept, given, atol=1e-4, rtol=0)
    assert (got - given).abs().max() > 1e-3, "nothing was coded"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("houses", HOUSES)
def test_a_coded_mean_has_the_same_bits_on_all(told: Told, houses: str, codec: str) -> None:
    everyones = [out[houses][codec][:-1] for out in told(coded_in_all_houses)]
    for number in range(ROUNDS):
        assert all(torch.equal(everyones[0][number][0], other[number][0]) for other in everyones)


def added(tensors: list[Tensor]) -> Tensor:
    return torch.stack([t.double() for t in tensors]).sum(dim=0)


@scenario(SIZE)
def in_groups_of_two(rank: int) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """Two hosts; some groups are on one of them, others on both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hosts.NAME, f"host {rank // 2}")
        codecs = {"coded": ob.codec.int8(bucket=64), "uncoded": None}
        return {name: trained(rank, ob.wagma(2, 3, "everyone", codec=c)) for name, c in codecs.items()}


def test_a_coded_average_within_a_host_is_divided_as_one_between_hosts(told: Told) -> None:
    for out in told(in_groups_of_two):
        assert "shm" in out["coded"][1]
        torch.testing.assert_close(out["coded"][0], out["uncoded"][0], rtol=0, atol=0.003)


# Two network namespaces: hosts that are told apart by themselves, with a cable whose bytes are counted.

NUMBERS = 500_000
METHODS = {
    "allreduce": ob.allreduce(),
    "local_sgd": ob.local_sgd(2),
    "dasgd": ob.dasgd(),
    "dpsgd": ob.dpsgd("ring"),
    "eager": ob.eager("everyone"),
    "wagma": ob.wagma(2, 2, "everyone"),
    "ad_psgd": ob.ad_psgd(),
    "self_clocked": ob.self_clocked(),
    "moments too": ob.self_clocked(moments=1),
}
OF_TIMING = ("ad_psgd", "self_clocked", "moments too")


def trained(rank: int, strategy: ob.Strategy) -> tuple[Tensor, tuple[str, ...]]:
    model = net()
    with ob.attach(sgd(model), model, strategy, patience_s=60) as optimizer:
        for t in range(4):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
    return flat(model), optimizer.carriers


def round_bytes(rank: int, cable: TwoHosts) -> float:
    """What leaves the first host in a round with everybody there, over the size of the vector."""
    model = nn.Module()
    model.w = w = nn.Parameter(torch.zeros(NUMBERS))
    strategy = ob.eager(wait="everyone", sync_every=None)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, strategy, patience_s=60)
    w.sum().backward()
    optimizer.step()
    client, gradient = optimizer._run.endpoints.client, Vec([torch.ones(NUMBERS)])
    dist.barrier()
    before = cable.sent_bytes(0)
    for t in range(4):
        client.offer(gradient, t + 1)
    dist.barrier()
    sent = cable.sent_bytes(0) - before
    optimizer.finish()
    return sent / 4 / (4 * NUMBERS)


def on_two_hosts(rank: int, cable: TwoHosts) -> tuple[dict[str, tuple[Tensor, tuple[str, ...]]], float]:
    cable.move_in(rank // 2, 29_500)
    start.spawn = start.spawn_python  # the forge, which would fork it, is on neither host
    dist.init_process_group("gloo")
    model = net()
    with ob.attach(sgd(model), model, ob.local_sgd(2), patience_s=60):  # keeps the host processes, which start slowly
        runs = {name: trained(rank, strategy) for name, strategy in METHODS.items()}
        return runs, round_bytes(rank, cable)


@scenario(SIZE)
def on_one_host(rank: int) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    return {name: trained(rank, strategy) for name, strategy in METHODS.items() if name not in OF_TIMING}


@pytest.fixture(scope="module")
def cabled() -> list[forge.Outcome]:
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    with TwoHosts() as cable:
        (outcomes,) = forge.run([Job(on_two_hosts, SIZE, (cable,), timeout_s=120, rank_0_hosts=True)])
    assert all(outcome.returned for outcome in outcomes), outcomes[0].stderr[-3000:]
    return outcomes


@pytest.mark.parametrize("name", METHODS)
def test_on_two_hosts_a_method_ends_as_on_one(cabled: list[forge.Outcome], told: Told, name: str) -> None:
    here = [outcome.value[0][name] for outcome in cabled]
    assert all(torch.equal(weights, here[0][0]) for weights, _ in here)
    assert {carriers for _, carriers in here} == {("shm", "tcp")}
    if name not in OF_TIMING:
        torch.testing.assert_close(here[0][0], told(on_one_host)[0][name][0], rtol=0, atol=1e-9)


def test_one_message_a_host_leaves_it_in_a_round(cabled: list[forge.Outcome]) -> None:
    _, sent_bytes = cabled[0].value
    assert 1.0 <= sent_bytes < 1.1
