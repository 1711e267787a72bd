"""Partial rounds and visits between real processes: the laws of the simulator, with nobody's clock under control."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.live.partial.partial_jobs import AT_MOST, BATCHES, CASES, EAGER, HELD_STEP, OWED, Seen
from tests.support import forge
from tests.support.forge import Job

pytestmark = pytest.mark.live

SIZES = (1, 2, 3, 4, 5, 9)
STOPPED = ("first", "majority", "two", "every step", "late", "bounded")
AVERAGED = [name for name in CASES if name not in ("half", "late quorum", "wagma, quorum")]
SUM_KEPT = [
    name
    for name, case in CASES.items()
    if case.name == "ad_psgd"
    or (case.name == "wagma" and (case.settings["late"] or case.settings["merge"] == "correct"))
]
FAILS = [
    ("first", "raised", 1),
    ("first", "raised", 0),
    ("first", "killed", 0),
    ("wagma", "raised", 0),
    ("wagma, correct", "killed", 2),
    ("ad_psgd", "raised", 1),
    ("ad_psgd", "killed", 0),
]


def cases_for(size: int) -> list[str]:
    """Every case with two and with four workers; elsewhere the ones that differ most."""
    if size in (2, 4):
        return list(CASES)
    some = ("first", "majority", "every step, late", "late", "bounded", "dropped", "wagma", "wagma, late", "ad_psgd")
    return [*some, *([] if size == 1 else ["two", "wagma of two", "wagma, bounded", "coded"])]


RUNS = [(size, name) for size in SIZES for name in cases_for(size)]
PLAN: dict[Any, Job] = {
    **{
        n: Job("tests.live.partial.partial_jobs", "all_cases", n, (n, cases_for(n), BATCHES[:n]), timeout_s=300)
        for n in SIZES
    },
    **{("in step", n): Job("tests.live.partial.partial_jobs", "in_step", n, (n,)) for n in (2, 4)},
    "averaged": Job("tests.live.partial.partial_jobs", "averaged", 4, (4, AVERAGED), timeout_s=300),
    "resumed": Job("tests.live.partial.partial_jobs", "resumed", 3, (3, STOPPED), timeout_s=300),
    **{fails: Job("tests.live.partial.partial_jobs", "failing", 4, fails, timeout_s=300) for fails in FAILS},
    "hosting": Job(
        "tests.live.partial.partial_jobs", "failing", 4, ("first", "killed", 0), timeout_s=300, rank_0_hosts=True
    ),
}


@pytest.fixture(scope="module")
def told() -> dict[Any, list[forge.Outcome]]:
    return dict(zip(PLAN, forge.run(list(PLAN.values())), strict=True))


def seen(told: Any, size: int, name: str) -> list[Seen]:
    return [out[name] for out in forge.values(told[size])]


def once_each(batches: tuple[int, ...]) -> Tensor:
    """What the slots hold, times P, when every sample has been applied once."""
    slots = torch.zeros(len(batches), AT_MOST, dtype=torch.float64)
    for rank, count in enumerate(batches):
        slots[rank, :count] = 1.0
    return slots.reshape(-1)


@pytest.mark.parametrize(("size", "name"), RUNS)
def test_a_run_ends_with_equal_replicas_and_leaves_nothing_behind(told: Any, size: int, name: str) -> None:
    everyone = seen(told, size, name)
    assert all(torch.equal(one.final, everyone[0].final) for one in everyone)
    assert [(one.threads, one.sockets) for one in everyone] == [([], 0)] * size


@pytest.mark.parametrize(("size", "name"), [run for run in RUNS if run[1] in EAGER])
def test_eager_applies_every_sample_exactly_once(told: Any, size: int, name: str) -> None:
    everyone = seen(told, size, name)
    assert torch.allclose(everyone[0].final * size, once_each(BATCHES[:size]), rtol=0, atol=1e-12)
    assert all(one.lost == [] for one in everyone)


@pytest.mark.parametrize(("size", "name"), [run for run in RUNS if run[1] in SUM_KEPT])
def test_what_is_added_to_shared_weights_is_never_lost(told: Any, size: int, name: str) -> None:
    assert torch.allclose(seen(told, size, name)[0].final * size, once_each(BATCHES[:size]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["dropped", "dropped, late"])
def test_what_is_dropped_is_named_and_everything_else_applied_once(told: Any, name: str) -> None:
    for size in (2, 4):
        everyone = seen(told, size, name)
        expected = once_each(BATCHES[:size]).reshape(size, AT_MOST)
        for rank, one in enumerate(everyone):
            assert len(set(one.lost)) == len(one.lost)
            expected[rank, one.lost] -= 1.0
        assert torch.allclose(everyone[0].final * size, expected.reshape(-1), rtol=0, atol=1e-12)
        assert HELD_STEP in everyone[0].lost, "rank 0 was held until it was late"


@pytest.mark.parametrize(("size", "name"), [run for run in RUNS if "bounded" in run[1]])
def test_a_bound_on_staleness_is_held(told: Any, size: int, name: str) -> None:
    bound = CASES[name].settings["staleness"]
    stale = [
        age for one in seen(told, size, name) for r in one.rounds for age in r.staleness.values() if r.started_by >= 0
    ]
    assert isinstance(bound, int)
    assert max(stale, default=0) <= bound


@pytest.mark.parametrize("size", [2, 3, 4, 5, 9])
def test_all_tell_the_same_of_every_round(told: Any, size: int) -> None:
    for name in ("first", "majority", "late", "bounded"):
        everyone = seen(told, size, name)
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
def test_with_nobody_late_eager_has_the_bits_of_allreduce(told: Any, size: int) -> None:
    for out in forge.values(told["in step", size]):
        for name in ("eager", "eager, full", "eager, every step"):
            assert torch.equal(out[name], out["allreduce"])


@pytest.mark.parametrize("size", [2, 4])
def test_with_nobody_late_wagma_in_one_group_is_allreduce_to_rounding(told: Any, size: int) -> None:
    for out in forge.values(told["in step", size]):
        for name in ("wagma", "wagma, full"):
            assert torch.allclose(out[name], out["allreduce"], rtol=0, atol=1e-6)


def test_after_a_full_round_replicas_have_the_same_bits(told: Any) -> None:
    outs = forge.values(told["in step", 4])
    for name in ("eager, full", "wagma, full"):
        assert all(torch.equal(out[f"{name}: before the end"], outs[0][f"{name}: before the end"]) for out in outs)


@pytest.mark.parametrize("name", AVERAGED)
def test_replicas_are_equal_after_an_average_though_one_is_slow_and_one_has_finished(told: Any, name: str) -> None:
    outs = [out[name] for out in forge.values(told["averaged"])]
    assert [len(out.averages) for out in outs] == [2, 2, 2, 0]
    for number in (0, 1):
        assert all(torch.equal(out.averages[number], outs[0].averages[number]) for out in outs[:3])
    assert all(torch.equal(out.final, outs[0].final) for out in outs)


@pytest.mark.parametrize("name", [name for name in AVERAGED if name in EAGER or name in SUM_KEPT])
def test_an_average_in_the_middle_loses_nothing(told: Any, name: str) -> None:
    for out in forge.values(told["averaged"]):
        assert torch.allclose(out[name].final * 4, once_each((7, 7, 7, 0)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", STOPPED)
def test_nothing_is_lost_or_applied_twice_across_a_stop(told: Any, name: str) -> None:
    for final, _, _ in (out[name] for out in forge.values(told["resumed"])):
        assert torch.allclose(final * 3, once_each((12, 13, 14)), rtol=0, atol=1e-12)


def test_gradients_that_were_owed_at_the_stop_travel_in_the_state(told: Any) -> None:
    first, *_ = forge.values(told["resumed"])
    assert [first[name][1] for name in OWED] == [True] * len(OWED)


def test_a_state_is_refused_after_the_first_step(told: Any) -> None:
    for out in forge.values(told["resumed"]):
        assert all(said.startswith("load_state_dict() came after the first step") for _, _, said in out.values())


@pytest.mark.parametrize(("name", "how", "who"), FAILS)
def test_the_others_end_within_seconds_and_say_who_failed(told: Any, name: str, how: str, who: int) -> None:
    outcomes = told[name, how, who]
    reason = f"rank {who} failed: ValueError: the disk is full" if how == "raised" else f"rank {who} gives no sign of"
    assert outcomes[who].exit_code == (1 if how == "raised" else -signal.SIGKILL)
    for rank, outcome in enumerate(outcomes):
        if rank != who:
            assert (outcome.exit_code, outcome.hung) == (1, False), outcome.stderr
            assert f"PeerFailed: {reason}" in outcome.stderr or f"; {reason}" in outcome.stderr, outcome.stderr
    assert max(outcome.ended_s for outcome in outcomes) - outcomes[who].ended_s < 60


def test_the_others_end_when_the_rank_with_the_hub_and_the_store_is_killed(told: Any) -> None:
    for outcome in told["hosting"][1:]:
        assert (outcome.exit_code, outcome.hung) == (1, False), outcome.stderr
        assert "PeerFailed" in outcome.error
