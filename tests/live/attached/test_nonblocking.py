"""Non-blocking SGD in a user's own loop: the laws of its rounds, whoever is late and whoever rings."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat as ob
from offbeat import topology
from tests.support.micro_batches import (
    EVERYBODY,
    FORMS,
    LR,
    ROWS,
    SIZE,
    Held,
    Pace,
    Sleeps,
    all_of,
    attached,
    by_round,
    follows_the_union,
    gradient,
    learn,
    loader,
    reference,
    train,
)
from tests.support.nets import flat
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live


HELD_ROUNDS = 6  # of 8 batches: in these everybody has data


def slower(rank: int) -> Pace:
    return Sleeps(lambda _, rows: rows * (0.004 if rank == 3 else 0.001))


def who_stalls(r: int) -> dict[int, int]:
    """Who stalls in round r, and where: any but one, at random."""
    draw = random.Random(r)
    return {
        rank: draw.randrange(2) for rank in range(SIZE) if r < HELD_ROUNDS and rank != r % SIZE and draw.random() < 0.5
    }


def judge(over: str, runs: list[dict[str, Any]], micro: int, batches: list[int]) -> None:
    """The laws of section 5.4 on what a live run recorded."""
    for rank, run in enumerate(runs):
        seen = [n for _, pieces, _, _ in run["log"] for piece in pieces for n in piece]
        assert seen == list(range(ROWS * batches[rank])), "each sample once, in order"
        assert all(1 <= len(pieces) <= most <= micro for _, pieces, _, most in run["log"])
        assert run["used"] == [ROWS * count for count in batches], "the tally, on every rank"
    assert all(torch.equal(run["final"], runs[0]["final"]) for run in runs)
    if over in ("allreduce", "server"):
        follows_the_union(runs)
    for parts in by_round(runs):
        if over in ("ring", "matcha") and len(parts) == SIZE:
            moved = [before - LR * gradient(before, [(rank, numbers)]) for rank, before, numbers, _ in parts]
            after = [after for *_, after in parts]
            torch.testing.assert_close(sum(after) / SIZE, sum(moved) / SIZE, rtol=1e-9, atol=1e-11)
            if over == "ring":
                W = torch.from_numpy(topology.graph("ring", SIZE)(0).matrix())
                torch.testing.assert_close(torch.stack(after), W @ torch.stack(moved), rtol=1e-9, atol=1e-11)


def stopped(run: dict[str, Any]) -> list[bool]:
    """Of each round, whether the worker was stopped before it was through its batch."""
    return [len(pieces) < most for _, pieces, _, most in run["log"]]


@scenario(SIZE)
def nobody_late(rank: int) -> Any:
    out = {}
    for over in ("allreduce", "server"):
        for micro in (1, 3, 4, 20):
            run = train(rank, ob.nonblocking(micro, over, **EVERYBODY))
            out[over, micro] = (run["final"] - reference(all_of(6))).abs().max().item()
    return out


def test_with_nobody_late_it_is_one_process_with_the_large_batch(told: Told) -> None:
    for differences in told(nobody_late):
        assert max(differences.values()) < 1e-13, differences


@scenario(SIZE)
def one_micro_batch(rank: int) -> Any:
    def plain(strategy: ob.Strategy) -> Tensor:
        model, optimizer = attached(strategy)
        with optimizer:
            for batch in loader(rank, 6):
                optimizer.zero_grad()
                learn(model, batch)
                optimizer.step()
        return flat(model)

    twins = {
        "allreduce": ob.allreduce(),
        "ring": ob.dpsgd(order="atc"),
        "matcha": ob.matcha(),
        "server": ob.allreduce(),
    }
    return {k: (train(rank, ob.nonblocking(1, k))["final"] - plain(s)).abs().max().item() for k, s in twins.items()}


def test_one_micro_batch_is_allreduce_dpsgd_and_matcha(told: Told) -> None:
    for differences in told(one_micro_batch):
        assert max(differences.values()) < 1e-14, differences


@scenario(SIZE)
def one_that_is_always_last(rank: int) -> Any:
    def last(r: int) -> dict[int, int]:
        return {3: 0} if r < HELD_ROUNDS else {}

    return {over: train(rank, ob.nonblocking(4, over), 8, Held(rank, f"last {over}", last)) for over in FORMS}


@pytest.mark.parametrize("over", FORMS)
def test_with_one_worker_always_last_every_update_is_the_gradient_of_what_was_finished(told: Told, over: str) -> None:
    runs = [run[over] for run in told(one_that_is_always_last)]
    judge(over, runs, 4, [8] * SIZE)
    rounds = stopped(runs[3])[:HELD_ROUNDS]
    assert 2 * sum(rounds) >= len(rounds), "the bell had rung, and the slow worker went on"


@scenario(SIZE)
def stalls(rank: int) -> Any:
    return {over: train(rank, ob.nonblocking(4, over), 8, Held(rank, f"stalls {over}", who_stalls)) for over in FORMS}


@pytest.mark.parametrize("over", FORMS)
def test_with_random_stalls_every_update_is_the_gradient_of_what_was_finished(told: Told, over: str) -> None:
    runs = [run[over] for run in told(stalls)]
    judge(over, runs, 4, [8] * SIZE)
    assert any(any(stopped(run)) for run in runs)


@scenario(SIZE)
def weighting_by_workers(rank: int) -> Any:
    return train(rank, ob.nonblocking(4, weighting="workers"), 4, slower(rank))


def test_weighting_by_workers_is_the_mean_of_the_workers_means(told: Told) -> None:
    for parts in by_round(told(weighting_by_workers)):
        steps = [gradient(before, [(rank, numbers)]) for rank, before, numbers, _ in parts]
        expected = parts[0][1] - LR * sum(steps) / len(steps)
        torch.testing.assert_close(parts[0][3], expected, rtol=1e-9, atol=1e-11)


@scenario(SIZE)
def codecs(rank: int) -> Any:
    return {over: train(rank, ob.nonblocking(4, over, codec=ob.codec.qsgd(8)), 8, slower(rank)) for over in FORMS}


@pytest.mark.parametrize("over", FORMS)
def test_codecs_compose(told: Told, over: str) -> None:
    runs = [run[over] for run in told(codecs)]
    assert all(torch.equal(run["final"], runs[0]["final"]) for run in runs)
    assert all(run["used"] == [8 * ROWS] * SIZE for run in runs)
    assert torch.isfinite(runs[0]["final"]).all()


@scenario(SIZE)
def micro_auto(rank: int) -> Any:
    pace = Held(rank, "micro auto", lambda r: {3: 0} if r < 5 else {})  # the rounds after which the number is adapted
    return train(rank, ob.nonblocking("auto"), 10, pace, rows=32)


def test_with_micro_auto_a_slow_worker_cuts_finer(told: Told) -> None:
    runs = told(micro_auto)
    assert [run["micro"][0] for run in runs] == [8] * SIZE
    assert 16 <= max(runs[3]["micro"]) <= 64


@scenario(SIZE)
def stop_auto(rank: int) -> Any:
    """Rank 3's batches take 1.2 s and more where they are compared; a fast one's 32 ms, or several times that."""
    pace = Sleeps(lambda r, rows: 0.15 if rank == 3 and 1 <= r < 6 else rows * 0.002)
    return train(rank, ob.nonblocking(8, stop="auto"), 6, pace, rows=16)


def test_a_learned_deadline_stops_the_slow_worker_and_loses_nothing(told: Told) -> None:
    runs = told(stop_auto)
    for run in runs:
        assert [n for _, pieces, _, _ in run["log"] for piece in pieces for n in piece] == list(range(6 * 16))
    assert [len(run["log"][0][1]) for run in runs] == [8] * SIZE, "nothing is known in the first round"
    assert any(stopped(runs[3])[2:6])


@scenario(SIZE)
def uneven(rank: int) -> Any:
    counts = [[0, 3, 5, 2], [4, 0, 1, 3], [1, 0, 0, 0]]
    return [
        (each, {over: train(rank, ob.nonblocking(4, over), each[rank], slower(rank)) for over in FORMS})
        for each in counts
    ]


@pytest.mark.parametrize("case", [0, 1, 2])
@pytest.mark.parametrize("over", FORMS)
def test_workers_with_different_amounts_of_data_and_with_none_all_end(told: Told, over: str, case: int) -> None:
    outs = told(uneven)
    judge(over, [out[case][1][over] for out in outs], 4, outs[0][case][0])
