"""What a user may rely on when an optimiser is attached. The scenarios are in attach_jobs, for three processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.live.attached import attach_jobs as jobs
from tests.live.attached.attach_jobs import SIZE, distance
from tests.support import forge
from tests.support.forge import Job

pytestmark = pytest.mark.live

SCENARIOS = [name for name in vars(jobs) if name.startswith("s_")]


@pytest.fixture(scope="module")
def told() -> Callable[[Callable[[int], Any]], list[Any]]:
    plan = [Job("tests.support.forge", "table", SIZE, ("tests.live.attached.attach_jobs", SCENARIOS), timeout_s=600)]
    (outcomes,) = forge.run(plan)
    tables = forge.values(outcomes)

    def of(scenario: Callable[[int], Any]) -> list[Any]:
        return [scenarios[scenario.__name__][1] for scenarios in tables]

    return of


Told = Callable[[Callable[[int], Any]], list[Any]]


def same(tensors: Iterable[Tensor]) -> bool:
    first, *rest = tensors
    return all(torch.equal(first, other) for other in rest)


def test_attach_gives_all_ranks_the_parameters_and_buffers_of_rank_0(told: Told) -> None:
    first, *rest = told(jobs.s_start)
    assert first["1.running_mean"].abs().sum() == 0
    assert first["frozen"].abs().sum() == 0
    for other in rest:
        assert {n: t.tolist() for n, t in other.items()} == {n: t.tolist() for n, t in first.items()}


def test_clipping_between_backward_and_step_gives_the_weights_that_ddp_gives(told: Told) -> None:
    for differences in told(jobs.s_clipping_as_ddp):
        assert differences["SGD"] < 1e-12
        assert differences["AdamW"] < 1e-12


def test_with_allreduce_the_gradient_is_the_mean_when_backward_returns(told: Told) -> None:
    assert max(told(jobs.s_grad_is_the_mean_after_backward)) < 1e-15


def test_parameter_groups_keep_their_own_settings(told: Told) -> None:
    for difference, rates in told(jobs.s_parameter_groups):
        assert difference < 1e-14
        assert rates == [0.1, 0.02]


def test_max_norm_clips_what_the_optimizer_is_given(told: Told) -> None:
    assert max(told(jobs.s_max_norm)) < 1e-14


def test_accumulation_as_declared_is_right_and_silent(told: Told) -> None:
    for out in told(jobs.s_accumulate):
        difference, said = out[4, 4]
        assert difference < 1e-14
        assert said == []


@pytest.mark.parametrize("case", [(1, 3), (4, 2), (2, 5)])
def test_another_number_of_backwards_than_declared_is_right_and_said_once(told: Told, case: tuple[int, int]) -> None:
    for out in told(jobs.s_accumulate):
        difference, said = out[case]
        assert difference < 1e-14
        assert len(said) == 1
        assert f"accumulate={case[0]}" in said[0]


def test_accumulation_needs_nothing_where_gradients_stay_local(told: Told) -> None:
    assert max(told(jobs.s_accumulate_with_local_gradients)) < 1e-14


@pytest.mark.parametrize("zero", ["optimizer", "model"])
@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "qsgd"])
def test_mixed_precision_skips_a_step_with_infinite_gradients(told: Told, name: str, zero: str) -> None:
    outs = [out[name, zero] for out in told(jobs.s_mixed_precision)]
    assert same(weights for weights, _, _, _ in outs)
    assert all(bool(torch.isfinite(weights).all()) for weights, _, _, _ in outs)
    skipped = [0, 1, 2] if name == "allreduce" else [1]  # the mean of an infinite gradient is infinite everywhere
    for rank, (_, steps, scale, said) in enumerate(outs):
        if name != "qsgd":
            assert steps == (5 if rank in skipped else 6)
        assert scale == (4.0 if rank in skipped else 8.0)
        assert said == []


@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "qsgd"])
def test_all_ways_to_zero_gradients_are_alike(told: Told, name: str) -> None:
    for out in told(jobs.s_zero_grad):
        assert same(weights for (strategy, _), weights in out.items() if strategy == name)


def test_tied_frozen_and_unused_parameters_train_as_in_one_process(told: Told) -> None:
    for out in told(jobs.s_odd_parameters):
        difference, never, tied = out["allreduce"]
        assert difference < 1e-14
        assert all(never)
        assert tied
        difference, never, _ = out["qsgd"]
        assert difference < 1e-3  # 16 bits a gradient
        assert all(never)


@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "dpsgd", "qsgd", "sgp", "diloco"])
def test_a_model_of_three_dtypes_trains_and_keeps_them(told: Told, name: str) -> None:
    outs = [out[name] for out in told(jobs.s_mixed_dtypes)]
    assert same(weights for weights, _ in outs)
    assert set(outs[0][1]) == {torch.bfloat16, torch.float32, torch.float64}
    assert bool(torch.isfinite(outs[0][0]).all())


def test_channels_last_weights_stay_so_and_train_right(told: Told) -> None:
    for difference, kept in told(jobs.s_channels_last):
        assert difference < 1e-14
        assert kept


def test_floating_buffers_take_the_mean_and_integer_ones_the_maximum_at_the_end(told: Told) -> None:
    outs = [out["finish"] for out in told(jobs.s_batch_norm)]
    mean = torch.stack([local for local, _, _ in outs]).mean(dim=0)
    assert not same(local for local, _, _ in outs)
    assert all(distance(final, mean) < 1e-15 for _, final, _ in outs)
    assert [count for _, _, count in outs] == [4, 4, 4]


def test_local_sgd_averages_floating_buffers_with_the_weights(told: Told) -> None:
    outs = [out["sync"] for out in told(jobs.s_batch_norm)]
    assert same(local for local, _, _ in outs)


def test_a_buffer_that_the_model_replaces_is_averaged_too(told: Told) -> None:
    assert told(jobs.s_buffers_put_anew) == [4.0, 4.0, 4.0]  # the mean of 2, 4 and 6


def test_parameters_that_only_the_optimizer_knows_are_trained_alike(told: Told) -> None:
    outs = told(jobs.s_parameters_only_the_optimizer_knows)
    assert all(began.abs().sum() == 0 for began, _ in outs)
    assert same(end for _, end in outs)
    assert outs[0][1].abs().sum() > 0


def test_weights_that_the_user_replaces_are_taken_over(told: Told) -> None:
    assert max(told(jobs.s_broken_views)) < 1e-14


def test_a_model_converted_after_attach_is_refused_with_both_dtypes(told: Told) -> None:
    for said in told(jobs.s_converted_model):
        assert "parameter 2.bias" in said or "parameter 0.weight" in said
        assert "torch.float64" in said
        assert "torch.float32" in said
        assert "before attach" in said


def test_step_takes_a_closure_and_gives_back_its_loss(told: Told) -> None:
    for difference, positive in told(jobs.s_closure):
        assert difference < 1e-14
        assert positive


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("LBFGS", "LBFGS needs a closure"),
        ("nothing to learn", "no trainable parameters"),
        ("swapped", "attach takes (optimizer, model, strategy), but got (Sequential, SGD"),
        ("no strategy", "'local_sgd' is not a strategy; use one such as ob.local_sgd(period=8)"),
        ("factory", "is not a strategy; use one such as ob.local_sgd(period=8)"),
        ("twice", "attached already, with allreduce()"),
        ("accumulate", "accumulate is 0"),
        ("ddp", "DistributedDataParallel"),
        ("complex", "complex64"),
        ("new group", "before it"),
        ("step", "step() came after the run was ended"),
        ("average", "average() came after the run was ended"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(told: Told, case: str, words: str) -> None:
    for out in told(jobs.s_refusals):
        assert words in out[case]


def test_finish_may_be_called_twice(told: Told) -> None:
    assert [out["finish"] for out in told(jobs.s_refusals)] == ["", "", ""]


def test_an_effect_that_is_not_ours_is_named(told: Told) -> None:
    for said in told(jobs.s_foreign_effect):
        assert "a strategy awaited Sleep(), which is not an Offbeat effect" in said


def test_models_can_be_attached_one_after_the_other(told: Told) -> None:
    for runs in told(jobs.s_models_one_after_the_other):
        assert same(runs)


def test_two_models_can_be_attached_at_once(told: Told) -> None:
    assert told(jobs.s_two_models_at_once) == [[True, True]] * SIZE


@pytest.mark.parametrize("name", ["local_sgd", "dasgd", "dpsgd", "sgp", "diloco"])
def test_average_makes_all_ranks_equal_to_their_mean(told: Told, name: str) -> None:
    outs = [out[name] for out in told(jobs.s_average_in_the_middle)]
    assert not same(before for before, _ in outs)
    assert same(after for _, after in outs)
    assert distance(outs[0][1], torch.stack([before for before, _ in outs]).mean(dim=0)) < 1e-15


def test_one_rank_may_evaluate_and_save_by_itself(told: Told) -> None:
    outs = told(jobs.s_alone)
    assert max(difference for difference, _ in outs) < 1e-14
    saved = outs[1][1]
    assert saved["offbeat"]["strategy"] == "allreduce()"
    assert len(saved["state"]) == 4
    assert saved["param_groups"][0]["momentum"] == 0.9


def test_the_default_group_stays_the_users(told: Told) -> None:
    for sums, after, groups, alive in told(jobs.s_users_own_collectives):
        assert sums == [3.0 + 3 * t for t in range(6)]
        assert after == SIZE
        assert groups == 1
        assert alive


def test_schedulers_work_on_the_inner_and_on_the_attached_optimizer(told: Told) -> None:
    for out in told(jobs.s_schedulers):
        assert out["before"][1] == out["after"][1] == [0.1, 0.05, 0.05, 0.025, 0.025]
        assert out["before"][2] == out["after"][2] == 0.025
        assert torch.equal(out["before"][0], out["after"][0])


@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "dpsgd", "qsgd"])
def test_a_rank_that_leaves_between_backward_and_step_lets_the_others_finish(told: Told, name: str) -> None:
    assert same(out[name] for out in told(jobs.s_a_backward_without_its_step))


def test_gradients_are_averaged_among_the_groups_a_strategy_asks_for(told: Told) -> None:
    assert max(told(jobs.s_gradients_in_groups)) < 1e-14


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("names", ["rank 0 has a.weight", "rank 2 has b.weight"]),
        ("shapes", ["rank 0 has weight (2, 2)", "rank 2 has weight (3, 2)"]),
        ("dtypes", ["torch.float32", "torch.float64"]),
        ("count", ["rank 0 has 2 ", "rank 2 has 1"]),
        ("frozen", ["(2, 2)", "(3, 2)", "(frozen)"]),
        ("buffers", ["rank 0 has 5 ", "rank 2 has 2"]),
        ("strategy", ["local_sgd(period=8", "local_sgd(period=4"]),
        ("accumulate", ["accumulate: rank 0 has 1, rank 2 has 2"]),
        ("seed", ["seed: rank 0 has 0, rank 2 has 1"]),
    ],
)
def test_ranks_that_differ_are_refused_on_all_ranks(told: Told, case: str, words: list[str]) -> None:
    for out in told(jobs.s_mismatches):
        assert out[case].startswith("ConfigMismatch: ")
        for word in words:
            assert word in out[case]


def test_versions_that_differ_are_refused_on_all_ranks(told: Told) -> None:
    for said in told(jobs.s_version):
        assert "Offbeat version: rank 0 has 9.9, rank 1 has" in said


def test_a_plain_script_needs_neither_torchrun_nor_init() -> None:
    (outcome,) = forge.run([Job("tests.live.attached.attach_jobs", "alone_in_the_world", 1)])[0]
    before, during, after, again, difference = forge.values([outcome])[0]
    assert (before, during, after, again) == (False, True, False, True)
    assert difference < 1e-14
