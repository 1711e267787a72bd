"""Partial rounds and visits between real processes: the laws of the simulator, with nobody's clock under control."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.live.partial.endpoints import Endpoints
from tests.support.counted import AT_MOST, BATCHES, CASES, EAGER, HELD_STEP, Seen, counted, once_each, one_case
from tests.support.long import LONG
from tests.support.scenarios import CARRIERS, Call, Turns, in_turn, over

pytestmark = pytest.mark.live

SIZES = (1, 2, 3, 4, 5, 9)
SUM_KEPT = [
    name
    for name, case in CASES.items()
    if case.name in ("ad_psgd", "self_clocked")
    or (case.name == "wagma" and (case.settings["late"] or case.settings["merge"] == "correct"))
]


def cases_for(size: int, carrier: str) -> list[str]:
    """Every case with two and with four workers, at every change over different carriers; elsewhere the ones that
    differ most."""
    if size in (2, 4):
        turn = CARRIERS.index(carrier) + (size == 4)
        return [name for number, name in enumerate(CASES) if LONG or number % 2 == turn % 2]
    if not LONG and (size in (1, 5)) != (carrier == "shm"):
        return []
    some = ["first", "majority", "every step, late", "late", "bounded", "dropped"]
    some += ["wagma", "wagma, late", "self-clocked", "ad_psgd"]
    return [*some, *([] if size == 1 else ["two", "wagma of two", "wagma, bounded", "coded"])]


Beside = dict[int, Turns[str]]
Run = tuple[str, int, str]  # carrier, workers, case
RUNS = [(way, size, name) for way in CARRIERS for size in SIZES for name in cases_for(size, way)]


def of(runs: Iterable[Run]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("way", "size", "name"), list(runs))


def in_step(rank: int, strategy: ob.Strategy) -> tuple[Tensor, Tensor]:
    """Eight steps of everybody: the weights before the end, and at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy, patience_s=120) as optimizer:
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
            model(x).square().mean().backward()
            optimizer.step()
        before = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()
    return before, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def nobody_late(size: int) -> dict[str, ob.Strategy]:
    """Everybody waits for everybody: the partial methods beside allreduce."""
    return {
        "allreduce": ob.allreduce(),
        "eager": ob.eager("everyone"),
        "eager, full": ob.eager(sync_every=1),
        "eager, every step": ob.eager("everyone", catch_up="every_step"),
        "wagma": ob.wagma(group=size, wait="everyone"),
        "wagma, full": ob.wagma(tau=1),
    }


def held_up_at_the_end(rank: int) -> Seen:
    """Rank 0 takes its last steps while its exchange is under way, and then stands still for long."""
    told = Endpoints.finished

    def slowly(self: Endpoints) -> None:
        told(self)
        time.sleep(0.4 * (rank == 0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Endpoints, "finished", slowly)
        bounded = ob.wagma(late=1, sync="bounded", staleness=2)
        return counted(rank, 2, bounded, (7, 14), lambda step: 0.0 if rank == 0 and step >= 4 else 0.05)


@cache
def in_groups(way: str, size: int) -> Turns[str]:
    calls = {name: Call(over, (way, one_case, size, name, BATCHES[:size])) for name in cases_for(size, way)}
    return in_turn(calls, size, init=False)


def ran(way: str, size: int, name: str) -> list[Seen]:
    return in_groups(way, size)[name]


@pytest.fixture(scope="module", params=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def beside(carrier: str) -> Beside:
    return {
        n: in_turn({k: Call(over, (carrier, in_step, s)) for k, s in nobody_late(n).items()}, n, init=False)
        for n in (2, 4)
    }


@of(RUNS)
def test_a_run_ends_with_equal_replicas_and_leaves_nothing_behind(way: str, size: int, name: str) -> None:
    everyone = ran(way, size, name)
    assert all(torch.equal(one.final, everyone[0].final) for one in everyone)
    assert [(one.threads, one.sockets) for one in everyone] == [([], 0)] * size


@of(run for run in RUNS if run[2] in EAGER)
def test_every_sample_is_applied_exactly_once(way: str, size: int, name: str) -> None:
    everyone = ran(way, size, name)
    assert torch.allclose(everyone[0].final * size, once_each(BATCHES[:size]), rtol=0, atol=1e-12)
    assert all(one.lost == [] for one in everyone)


@of(run for run in RUNS if run[2] in SUM_KEPT)
def test_what_is_added_to_shared_weights_is_never_lost(way: str, size: int, name: str) -> None:
    assert torch.allclose(ran(way, size, name)[0].final * size, once_each(BATCHES[:size]), rtol=0, atol=1e-9)


@of(run for run in RUNS if run[1] in (2, 4) and run[2] in ("dropped", "dropped, late", "dropped, if old"))
def test_what_is_dropped_is_named_and_everything_else_applied_once(way: str, size: int, name: str) -> None:
    everyone = ran(way, size, name)
    expected = once_each(BATCHES[:size]).reshape(size, AT_MOST)
    for rank, one in enumerate(everyone):
        assert len(set(one.lost)) == len(one.lost)
        expected[rank, one.lost] -= 1.0
    assert torch.allclose(everyone[0].final * size, expected.reshape(-1), rtol=0, atol=1e-12)
    assert HELD_STEP in everyone[0].lost, "rank 0 was held until it was late"


@of(run for run in RUNS if "bounded" in run[2])
def test_a_bound_on_staleness_is_held(way: str, size: int, name: str) -> None:
    bound = CASES[name].settings["staleness"]
    stale = [
        age for one in ran(way, size, name) for r in one.rounds for age in r.staleness.values() if r.started_by >= 0
    ]
    assert isinstance(bound, int)
    assert max(stale, default=0) <= bound


@pytest.mark.parametrize("carrier", CARRIERS)
def test_the_bound_holds_for_the_last_steps_of_one_who_is_slow_to_end(carrier: str) -> None:
    for one in in_turn({"": Call(over, (carrier, held_up_at_the_end))}, 2, init=False)[""]:
        assert max(age for r in one.rounds if r.started_by >= 0 for age in r.staleness.values()) <= 2


@of(run for run in RUNS if run[2] == "dropped, if old")
def test_nothing_is_applied_that_has_become_too_old(way: str, size: int, name: str) -> None:
    ages = [age for one in ran(way, size, name) for r in one.rounds for age in r.staleness.values()]
    assert max(ages) <= 1


@of(run for run in RUNS if run[1] > 1 and run[2] in ("first", "majority", "late", "bounded"))
def test_all_tell_the_same_of_every_round(way: str, size: int, name: str) -> None:
    everyone = ran(way, size, name)
    stories = [[(r.version, r.started_by, r.fresh, dict(r.staleness)) for r in one.rounds] for one in everyone]
    assert all(story == stories[0] for story in stories)
    assert [version for version, *_ in stories[0]] == list(range(len(stories[0])))
    for rank, one in enumerate(everyone):
        assert all(list(r.waited_s) == [rank] and r.waited_s[rank] >= 0 for r in one.rounds)
    for _, started_by, fresh, staleness in stories[0]:
        if started_by < 0:  # the last round, of what was still owed
            continue
        assert fresh or name == "late"
        assert set(fresh) <= set(staleness)
        assert BATCHES[started_by] or name != "first"


@pytest.mark.parametrize("size", [2, 4])
def test_with_nobody_late_eager_has_the_bits_of_allreduce(carrier: str, beside: Beside, size: int) -> None:
    for name in ("eager", "eager, full", "eager, every step"):
        for (_, ours), (_, allreduce) in zip(beside[size][name], beside[size]["allreduce"], strict=True):
            assert torch.equal(ours, allreduce)


@pytest.mark.parametrize("size", [2, 4])
def test_with_nobody_late_wagma_in_one_group_is_allreduce_to_rounding(beside: Beside, size: int) -> None:
    for name in ("wagma", "wagma, full"):
        for (_, ours), (_, allreduce) in zip(beside[size][name], beside[size]["allreduce"], strict=True):
            assert torch.allclose(ours, allreduce, rtol=0, atol=1e-6)


def test_after_a_full_round_replicas_have_the_same_bits(beside: Beside) -> None:
    for name in ("eager, full", "wagma, full"):
        outs = beside[4][name]
        assert all(torch.equal(before, outs[0][0]) for before, _ in outs)
