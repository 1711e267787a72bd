"""Sums among hosts: inside each host first, one message a host, inside again; what a codec loses on the way is kept."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat as ob
from offbeat.live.carriers import across
from offbeat.live.carriers.across import Across, Coding
from offbeat.live.carriers.commons import Commons
from offbeat.live.carriers.exchanges import Transport
from offbeat.live.memory.hands import Pairs
from offbeat.live.transport import hosts
from offbeat.tensors.vector import Vec
from tests.support import forge, namespaces
from tests.support.forge import Job
from tests.support.namespaces import TwoHosts
from tests.support.nets import flat, loss, net, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

# Ranks by host; the last one has hosts of unequal size, of which one has a single rank.
HOUSES = {"2+2": (0, 0, 1, 1), "1+1+2": (0, 1, 2, 2), "3+1": (0, 0, 0, 1), "mixed up": (0, 1, 0, 1)}
LENGTHS = {"short": (5,), "long": (300_007,), "of two kinds": (70_001, 3)}
CODECS = {"bf16": ob.codec.bf16(), "int8": ob.codec.int8(bucket=64), "qsgd4": ob.codec.qsgd(4, bucket=64)}
SIZE, ROUNDS = 4, 6


def vector(rank: int, number: int, lengths: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * number + rank)
    return [torch.randn(n, generator=draw, dtype=(torch.float32, torch.float64)[k]) for k, n in enumerate(lengths)]


def summed(rank: int, homes: tuple[int, ...], with_transport: object, chunk: int) -> dict[str, list[list[Tensor]]]:
    """For each kind of vector, what this rank has of every sum, one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hosts.NAME, f"host {homes[rank]}")
        patch.setattr(across, "CHUNK", chunk)  # so short that vectors go in several pieces
        patch.setattr(across, "MOST", 1)
        return used(rank, with_transport)


def used(rank: int, do: object) -> dict[str, list[list[Tensor]]]:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce(), patience_s=60)
    transport = optimizer._run.transport
    found = do(rank, transport)  # type: ignore[operator]
    optimizer.finish()
    return found


def composed(transport: Transport, like: Tensor) -> Across:
    way = transport.across(tuple(range(SIZE)), [like])
    assert way is not None, "no composition"
    return way


def plain_sums(rank: int, transport: Transport) -> dict[str, list[list[Tensor]]]:
    out: dict[str, list[list[Tensor]]] = {}
    for name, lengths in LENGTHS.items():
        out[name] = []
        for number in range(ROUNDS):
            given = vector(rank, number, lengths)
            way = composed(transport, given[0])
            transport.waiter.wait([transport.porter.send(lambda: way.total(given, "a sum"))], "a sum")  # noqa: B023
            out[name].append(given)
    return out


def coded_sums(rank: int, transport: Transport) -> dict[str, list[list[Tensor]]]:
    """The sums; and, last, all that this rank has kept of what coding lost."""
    out: dict[str, list[list[Tensor]]] = {}
    for name, codec in CODECS.items():
        out[name], kept = [], [torch.zeros(4_000)]
        for number in range(ROUNDS):
            given, record = vector(rank, number, (4_000,)), torch.tensor([1.0, float(rank)])
            coding = Coding(codec, (0, rank, number), kept, lambda records, house: True)
            way = composed(transport, given[0])
            errand = transport.porter.send(lambda: way.coded_total(given, record, coding, "a sum"))  # noqa: B023
            transport.waiter.wait([errand], "a sum")
            out[name].append([*given, record])
        out[name].append(kept)
    return out


def coded_means(rank: int, transport: Transport) -> dict[str, list[list[Tensor]]]:
    """Means of which nothing is kept; and how many numbers this rank has copied from memory to memory for them."""
    out: dict[str, list[list[Tensor]]] = {}
    copied, copy = [0], Commons.copy

    def counted(commons: Commons, pairs: Pairs) -> None:
        copied[0] += sum(into.numel() for into, _ in pairs)
        copy(commons, pairs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Commons, "copy", counted)
        for name, codec in CODECS.items():
            out[name], copied[0] = [], 0
            for number in range(ROUNDS):
                given, record = vector(rank, number, (4_000,)), torch.zeros(1)
                coding = Coding(codec, (0, rank, number), None, lambda records, house: True, SIZE)
                way = composed(transport, given[0])
                errand = transport.porter.send(lambda: way.coded_total(given, record, coding, "a mean"))  # noqa: B023
                transport.waiter.wait([errand], "a mean")
                out[name].append(given)
            out[name].append([torch.tensor(copied[0])])
    return out


@scenario(SIZE)
def in_all_houses(rank: int) -> dict[str, dict[str, list[list[Tensor]]]]:
    return {name: summed(rank, homes, plain_sums, 1 << 14) for name, homes in HOUSES.items()}


@scenario(SIZE)
def coded_in_all_houses(rank: int) -> dict[str, dict[str, list[list[Tensor]]]]:
    return {name: summed(rank, homes, coded_sums, 1 << 9) for name, homes in HOUSES.items()}


@scenario(SIZE)
def means_in_all_houses(rank: int) -> dict[str, dict[str, list[list[Tensor]]]]:
    return {name: summed(rank, homes, coded_means, 1 << 9) for name, homes in HOUSES.items()}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("houses", HOUSES)
def test_a_sum_is_everybodys_and_has_the_same_bits_on_all(told: Told, houses: str, lengths: str) -> None:
    everyones = [out[houses][lengths] for out in told(in_all_houses)]
    for number in range(ROUNDS):
        given = [vector(rank, number, LENGTHS[lengths]) for rank in range(SIZE)]
        for k, first in enumerate(everyones[0][number]):
            assert all(torch.equal(first, other[number][k]) for other in everyones)
            total = added([one[k] for one in given]).to(first.dtype)
            torch.testing.assert_close(first, total, atol=1e-5, rtol=0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("houses", HOUSES)
def test_what_was_summed_and_what_is_kept_is_all_that_was_given(told: Told, houses: str, codec: str) -> None:
    everyones = [out[houses][codec] for out in told(coded_in_all_houses)]
    *sums, _ = everyones[0]
    given = added([vector(rank, n, (4_000,))[0] for rank in range(SIZE) for n in range(ROUNDS)])
    kept, got = added([out[-1][0] for out in everyones]), added([one[0] for one in sums])
    torch.testing.assert_close(got + kept, given, atol=1e-4, rtol=0)
    assert (got - given).abs().max() > 1e-3, "nothing was coded"


@pytest.mark.parametrize(("codec", "worst"), [("bf16", 0.02), ("int8", 0.05), ("qsgd4", 1.5)])
@pytest.mark.parametrize("houses", HOUSES)
def test_a_coded_mean_is_everybodys_and_has_the_same_bits_on_all(
    told: Told, houses: str, codec: str, worst: float
) -> None:
    everyones = [out[houses][codec][:-1] for out in told(means_in_all_houses)]
    for number in range(ROUNDS):
        (first,) = everyones[0][number]
        assert all(torch.equal(first, other[number][0]) for other in everyones)
        right = added([vector(rank, number, (4_000,))[0] for rank in range(SIZE)]) / SIZE
        assert 0 < (first - right).abs().max() < worst


@pytest.mark.parametrize("houses", HOUSES)
def test_what_is_quickly_read_is_not_copied_as_numbers_inside_a_host(told: Told, houses: str) -> None:
    told_by = told(means_in_all_houses)
    for rank, home in enumerate(HOUSES[houses]):
        if HOUSES[houses].count(home) > 1:
            bf16, int8, qsgd4 = (int(told_by[rank][houses][codec][-1][0]) for codec in CODECS)
            assert bf16 == int8 <= qsgd4 - 4_000 * ROUNDS, "one copy of the vector less for each mean, at least"


def added(tensors: list[Tensor]) -> Tensor:
    return torch.stack([t.double() for t in tensors]).sum(dim=0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("houses", HOUSES)
def test_a_coded_sum_has_the_same_bits_on_all_and_its_record_is_exact(told: Told, houses: str, codec: str) -> None:
    everyones = [out[houses][codec] for out in told(coded_in_all_houses)]
    for number in range(ROUNDS):
        first = everyones[0][number]
        assert all(torch.equal(a, b) for out in everyones for a, b in zip(first, out[number], strict=True))
        assert first[1].tolist() == [SIZE, sum(range(SIZE))]


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


@scenario(SIZE)
def one_host_cannot_share(rank: int) -> tuple[tuple[str, ...], Tensor, list[str]]:
    """Of two hosts; the ranks of the other could."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setenv(hosts.NAME, str(rank // 2))
        if rank == 3:
            patch.setattr("os.memfd_create", refuse)
        model = net()
        with ob.attach(sgd(model), model, ob.eager("everyone"), patience_s=60) as optimizer:
            for t in range(3):
                optimizer.zero_grad()
                loss(model, rank, t).backward()
                optimizer.step()
    return optimizer.carriers, flat(model), [str(w.message) for w in caught if "memory cannot" in str(w.message)]


def refuse(*_: object) -> int:
    raise OSError("Cannot allocate memory")


def test_where_one_host_cannot_share_memory_all_use_gloo_and_its_first_rank_says_why(told: Told) -> None:
    outs = told(one_host_cannot_share)
    assert all(torch.equal(weights, outs[0][1]) for _, weights, _ in outs)
    assert {carriers for carriers, _, _ in outs} == {("gloo",)}
    assert [len(said) > 0 for _, _, said in outs] == [False, False, True, False]
    assert "rank 3: Cannot allocate memory" in outs[2][2][0]


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


def round_bytes(rank: int, cable: TwoHosts, carrier: str) -> float:
    """What leaves the first host in a round with everybody there, over the size of the vector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hosts.VARIABLE, carrier)
        model = nn.Module()
        model.w = w = nn.Parameter(torch.zeros(NUMBERS))
        strategy = ob.eager(wait="everyone", sync_every=None)
        optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, strategy, patience_s=60)
        w.sum().backward()
        optimizer.step()
        clerk, gradient = optimizer._run.endpoints.clerk, Vec([torch.ones(NUMBERS)])
        dist.barrier()
        before = cable.sent_bytes(0)
        for t in range(4):
            clerk.offer(gradient, t + 1)
        dist.barrier()
        sent = cable.sent_bytes(0) - before
        optimizer.finish()
    return sent / 4 / (4 * NUMBERS)


def on_two_hosts(rank: int, cable: TwoHosts) -> tuple[dict[str, tuple[Tensor, tuple[str, ...]]], float, float]:
    cable.move_in(rank // 2, 29_500)
    dist.init_process_group("gloo")
    runs = {name: trained(rank, strategy) for name, strategy in METHODS.items()}
    return runs, round_bytes(rank, cable, ""), round_bytes(rank, cable, "gloo")


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
    assert {carriers for _, carriers in here} == {("gloo", "shm")}
    if name not in OF_TIMING:
        torch.testing.assert_close(here[0][0], told(on_one_host)[0][name][0], rtol=0, atol=1e-9)


def test_one_message_a_host_leaves_it_in_a_round(cabled: list[forge.Outcome]) -> None:
    _, composed_bytes, plain_bytes = cabled[0].value
    assert composed_bytes < 1.1
    assert plain_bytes > 1.3  # a message a rank: what the composition saves
