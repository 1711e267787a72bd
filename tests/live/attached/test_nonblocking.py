"""Non-blocking SGD in a user's own loop. The scenarios are in nonblocking_jobs, for four processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from offbeat import topology
from tests.live.attached import nonblocking_jobs as jobs
from tests.live.attached.attach_jobs import flat, net
from tests.live.attached.nonblocking_jobs import FORMS, HELD_ROUNDS, LR, ROWS, SIZE, samples
from tests.support import forge
from tests.support.forge import Job

pytestmark = pytest.mark.live

SCENARIOS = [name for name in vars(jobs) if name.startswith("s_")]


@pytest.fixture(scope="module")
def told() -> Callable[[Callable[[int], Any]], list[Any]]:
    (outcomes,) = forge.run(
        [Job("tests.support.forge", "table", SIZE, ("tests.live.attached.nonblocking_jobs", SCENARIOS), timeout_s=600)]
    )
    tables = forge.values(outcomes)

    def of(scenario: Callable[[int], Any]) -> list[Any]:
        for rank, scenarios in enumerate(tables):
            kind, value = scenarios[scenario.__name__]
            assert kind == "returned", f"rank {rank}: {value}"
        return [scenarios[scenario.__name__][1] for scenarios in tables]

    return of


Told = Callable[[Callable[[int], Any]], list[Any]]


def gradient(weights: torch.Tensor, parts: list[tuple[int, list[int]]]) -> torch.Tensor:
    """The gradient at ``weights`` of one process on the samples of all ``parts`` (rank, numbers)."""
    model = net()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    xs, ys = zip(*(tuple(column[n] for column in samples(rank, 0, 500)[:2]) for rank, n in parts), strict=True)
    F.mse_loss(model(torch.cat(xs)), torch.cat(ys)).backward()
    return flat(p.grad for p in model.parameters())


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def by_round(runs: list[dict[str, Any]]) -> list[list[tuple[int, Any, list[int], Any]]]:
    """Of each round, of each rank that had data: its rank, weights before, samples, weights after."""
    rounds = max(len(run["log"]) for run in runs)
    return [
        [
            (rank, run["log"][r][0], joined(run["log"][r][1]), run["log"][r][2])
            for rank, run in enumerate(runs)
            if r < len(run["log"])
        ]
        for r in range(rounds)
    ]


def follows_the_union(runs: list[dict[str, Any]]) -> None:
    """Every update is that of one process with all samples that were finished in its round."""
    for parts in by_round(runs):
        assert all(torch.equal(before, parts[0][1]) for _, before, _, _ in parts)
        step = gradient(parts[0][1], [(rank, numbers) for rank, _, numbers, _ in parts])
        for _, before, _, after in parts:
            torch.testing.assert_close(after, before - LR * step, rtol=1e-9, atol=1e-11)


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


def test_with_nobody_late_it_is_one_process_with_the_large_batch(told: Told) -> None:
    for differences in told(jobs.s_nobody_late):
        assert max(differences.values()) < 1e-13, differences


def test_one_micro_batch_is_allreduce_dpsgd_and_matcha(told: Told) -> None:
    for differences in told(jobs.s_one_micro_batch):
        assert max(differences.values()) < 1e-14, differences


def stopped(run: dict[str, Any]) -> list[bool]:
    """Of each round, whether the worker was stopped before it was through its batch."""
    return [len(pieces) < most for _, pieces, _, most in run["log"]]


@pytest.mark.parametrize("over", FORMS)
def test_with_one_worker_always_last_every_update_is_the_gradient_of_what_was_finished(told: Told, over: str) -> None:
    runs = [run[over] for run in told(jobs.s_one_that_is_always_last)]
    judge(over, runs, 4, [8] * SIZE)
    rounds = stopped(runs[3])[:HELD_ROUNDS]
    assert 2 * sum(rounds) >= len(rounds), "the bell had rung, and the slow worker went on"


@pytest.mark.parametrize("over", FORMS)
def test_with_random_stalls_every_update_is_the_gradient_of_what_was_finished(told: Told, over: str) -> None:
    runs = [run[over] for run in told(jobs.s_stalls)]
    judge(over, runs, 4, [8] * SIZE)
    assert any(any(stopped(run)) for run in runs)


def test_weighting_by_workers_is_the_mean_of_the_workers_means(told: Told) -> None:
    for parts in by_round(told(jobs.s_weighting_by_workers)):
        steps = [gradient(before, [(rank, numbers)]) for rank, before, numbers, _ in parts]
        expected = parts[0][1] - LR * sum(steps) / len(steps)
        torch.testing.assert_close(parts[0][3], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("over", FORMS)
def test_codecs_compose(told: Told, over: str) -> None:
    runs = [run[over] for run in told(jobs.s_codecs)]
    assert all(torch.equal(run["final"], runs[0]["final"]) for run in runs)
    assert all(run["used"] == [8 * ROWS] * SIZE for run in runs)
    assert torch.isfinite(runs[0]["final"]).all()


def test_tensors_and_tuples_lists_and_dicts_of_them_are_cut_alike(told: Told) -> None:
    for kinds in told(jobs.s_kinds_of_batches):
        for kind, (most, batch, handed) in kinds.items():
            assert most == len(handed) == 4, kind
            assert all(type(piece) is type(batch) for piece in handed), kind
        x = kinds["tensor"][1]
        y = kinds["tuple"][1][1]
        whole = torch.cat
        assert torch.equal(whole(kinds["tensor"][2]), x)
        for kind in ("tuple", "list", "named tuple"):
            assert torch.equal(whole([piece[0] for piece in kinds[kind][2]]), x)
            assert torch.equal(whole([piece[1] for piece in kinds[kind][2]]), y)
        assert torch.equal(whole([piece["y"] for piece in kinds["dict"][2]]), y)
        assert torch.equal(whole([piece.y for piece in kinds["named tuple"][2]]), y)
        assert torch.equal(whole([piece["x"][1][0] for piece in kinds["nested"][2]]), y)
        assert {piece["name"] for piece in kinds["nested"][2]} == {"train"}
        assert joined(piece[1] for piece in kinds["words"][2]) == [f"sample {k}" for k in range(ROWS)]
        assert joined(piece[1].tolist() for piece in kinds["array"][2]) == y.tolist()
        assert torch.equal(whole([piece["x"] for piece in kinds["user dict"][2]]), x)


def test_leftovers_come_first_and_those_never_used_are_spoken_of(told: Told) -> None:
    for seen, used, said in told(jobs.s_leftovers_come_first):
        assert seen == list(range(6))
        assert used == [6] * SIZE
        assert len(said) == 1
        assert "18 samples of this worker were never used; loop over optimizer.batches(loader)" in said[0]


def test_batches_fetches_data_only_when_the_leftovers_make_no_round(told: Told) -> None:
    for when, difference in told(jobs.s_data_is_fetched_only_when_needed):
        assert when == [1, 2, 2, 2, 2, 2, 2, 2]
        assert difference < 1e-13


def test_a_pile_of_leftovers_is_spoken_of_once(told: Told) -> None:
    for said in told(jobs.s_a_word_about_many_leftovers):
        assert len(said) == 1
        assert "samples wait on this worker" in said[0]


def test_micro_batches_can_be_cut_by_cost(told: Told) -> None:
    for pieces, difference, asked in told(jobs.s_cuts_by_cost):
        assert [length for piece in pieces for length in piece] == [9, 1, 1, 1, 3, 3, 3, 9]
        assert [sum(piece) for piece in pieces] == [9, 6, 6, 9]
        assert difference < 1e-14
        assert asked == [5] * ROWS


def test_with_micro_auto_a_slow_worker_cuts_finer(told: Told) -> None:
    runs = told(jobs.s_micro_auto)
    assert [run["micro"][0] for run in runs] == [8] * SIZE
    assert 16 <= max(runs[3]["micro"]) <= 64


def test_a_learned_deadline_stops_the_slow_worker_and_loses_nothing(told: Told) -> None:
    runs = told(jobs.s_stop_auto)
    for run in runs:
        assert [n for _, pieces, _, _ in run["log"] for piece in pieces for n in piece] == list(range(6 * 16))
    assert [len(run["log"][0][1]) for run in runs] == [8] * SIZE, "nothing is known in the first round"
    assert any(stopped(runs[3])[2:6])


def test_a_batch_that_makes_no_sense_is_refused_in_a_sentence_and_can_be_replaced(told: Told) -> None:
    for out in told(jobs.s_bad_batches):
        assert "the tensors of a batch have 5, 8 rows; give all of them one row a sample" in out["unequal"]
        assert "has no dimensions" in out["scalar"]
        assert "a batch of type list holds no tensors" in out["text"]
        assert "a batch of type int holds no tensors" in out["number"]
        assert "a sample cannot cost -1.0" in out["cost"]
        assert out["after"] < 1e-14


def test_an_empty_batch_on_one_worker_adds_nothing_and_holds_up_nobody(told: Told) -> None:
    outs = told(jobs.s_an_empty_batch)
    assert outs[2][0] == [0, 0, 0]
    assert outs[0][0] == [4, 4, 4]
    for _, final, used in outs:
        assert torch.equal(final, outs[0][1])
        assert used == [24, 24, 0, 24]


def test_more_micro_batches_than_samples_give_one_sample_each(told: Told) -> None:
    for most, difference in told(jobs.s_few_samples):
        assert most == [3, 3, 3, 3]
        assert difference < 1e-14


def test_micro_batches_of_another_strategy_are_refused(told: Told) -> None:
    for said, used in told(jobs.s_another_strategy):
        assert "takes whole batches; micro_batches() goes with ob.nonblocking()" in said
        assert used == []


def test_without_micro_batches_it_is_allreduce_and_says_so_once(told: Told) -> None:
    for difference, said in told(jobs.s_without_micro_batches):
        assert difference < 1e-14
        assert len(said) == 1
        assert "for micro in optimizer.micro_batches(batch)" in said[0]


def test_after_an_error_in_the_loss_the_micro_batch_is_handed_out_again(told: Told) -> None:
    for rank, (seen, failed, difference) in enumerate(told(jobs.s_an_error_that_is_caught)):
        assert seen == list(range(3 * ROWS))
        assert failed == (rank == 1)
        assert difference < 1e-14


def test_breaking_off_keeps_what_was_done_and_what_was_not(told: Told) -> None:
    for seen, difference in told(jobs.s_breaking_off):
        assert [n for piece in seen for n in piece] == list(range(2 * ROWS))
        assert difference < 1e-14


def test_a_micro_batch_without_backward_is_not_counted(told: Told) -> None:
    for used, difference in told(jobs.s_skipping):
        assert used == [6] * SIZE
        assert difference < 1e-14


def test_two_batches_before_a_step_lose_nothing(told: Told) -> None:
    for _, used in told(jobs.s_two_batches_before_a_step):
        assert used == [2 * ROWS] * SIZE


@pytest.mark.parametrize("over", ["allreduce", "ring"])
def test_a_resumed_run_goes_on_behind_the_samples_that_were_used_and_says_so(told: Told, over: str) -> None:
    for rank, out in enumerate(told(jobs.s_resume)):
        start, said, difference, used = out[over]
        assert start == 10
        assert len(said) == 1
        assert f"6 samples waited on rank {rank}" in said[0]
        assert difference < 1e-14
        assert used == [26] * SIZE


@pytest.mark.parametrize("case", [0, 1, 2])
@pytest.mark.parametrize("over", FORMS)
def test_workers_with_different_amounts_of_data_and_with_none_all_end(told: Told, over: str, case: int) -> None:
    outs = told(jobs.s_uneven)
    judge(over, [out[case][1][over] for out in outs], 4, outs[0][case][0])


def test_a_grad_scaler_works_and_a_skipped_step_holds_up_nobody(told: Told) -> None:
    runs = told(jobs.s_grad_scaler)
    for rank, run in enumerate(runs):
        assert run["taken"].count(False) == (rank == 1)
        assert run["used"] == [32, 24, 32, 32]
        expected = [n for n in range(32) if rank != 1 or not 16 <= n < 24]
        assert [n for _, pieces, _, _ in run["log"] for piece in pieces for n in piece] == expected
    follows_the_union(runs)


def test_clipping_and_the_inner_optimizer_see_the_mean_over_all_samples(told: Told) -> None:
    for own, given, norm in told(jobs.s_clipping):
        assert own < 1e-14
        assert given < 1e-14
        assert norm == pytest.approx(0.05, rel=1e-4)


def test_sums_are_kept_wide(told: Told) -> None:
    assert told(jobs.s_low_precision) == [1.0] * SIZE


@pytest.mark.parametrize("how", ["loss", "unequal"])
def test_an_error_on_one_rank_ends_all_with_its_sentence(how: str) -> None:
    (outcomes,) = forge.run([Job("tests.live.attached.nonblocking_jobs", "failing", SIZE, (how,), timeout_s=180)])
    words = "the loss of rank 1 is out of luck" if how == "loss" else "give all of them one row a sample"
    for rank, outcome in enumerate(outcomes):
        assert not outcome.hung
        assert words in outcome.value, f"rank {rank}: {outcome}"
        assert ("rank 1 failed" in outcome.value) == (rank != 1)
