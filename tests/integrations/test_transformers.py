"""Hugging Face's Trainer with the mix-in: what its users expect of it, and nobody waits for a slow worker."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat as ob
from offbeat.integrations.transformers import OffbeatTrainerMixin
from tests.support import forge
from tests.support.fitting import (
    LATE_STEPS,
    ONCE,
    SIZE,
    data,
    late,
    outlived,
    quiet,
    shared_folder,
    small,
    told_by_script,
    weights,
)
from tests.support.forge import Job
from tests.support.scenarios import Told, scenario

pytest.importorskip("transformers.trainer", reason="needs transformers: pip install 'offbeat[transformers]'")
pytestmark = pytest.mark.live

METHODS = (ob.allreduce(), ob.eager(), ob.wagma(), ob.local_sgd(period=2), ob.ad_psgd())
APART = ob.local_sgd(period=1000)
_folders = itertools.count()


class Small(nn.Module):
    """``slow``: rank 1 stands in a step, in this run; ``fails_at``: it raises in this step."""

    def __init__(self, rank: int, slow: str = "", fails_at: int | None = None, ahead: int = 6) -> None:
        super().__init__()
        self.net = small()
        self._rank, self._slow, self._fails_at, self._ahead = rank, slow, fails_at, ahead
        self.steps, self.used, self.losses = 0, list[int](), list[float]()

    def forward(self, x: Tensor, labels: Tensor, index: Tensor | None = None) -> dict[str, Tensor]:
        if self.training:
            if self._slow:
                late(self._rank, self.steps, self._slow, self._ahead)
            self.steps += 1
            self.used += [] if index is None else index.tolist()
            if self._rank == 1 and self.steps == self._fails_at:
                raise ValueError("no such file")
        out = self.net(x)
        loss = F.mse_loss(out, labels)
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss, "logits": out}


def trained(
    model: Small,
    method: ob.Strategy | None,
    resume: str | None = None,
    folder: Path | None = None,
    callbacks: tuple[Any, ...] = (),
    share: bool = True,
    rows: int = 64,
    **settings: Any,
) -> Any:
    """The trainer, after it has trained with ``method``, or with its own DDP."""
    with quiet():
        from transformers import Trainer, TrainingArguments

    class Mine(OffbeatTrainerMixin, Trainer):  # type: ignore[misc]
        evaluated: list[Tensor]

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            self.evaluated = [*getattr(self, "evaluated", []), weights(model)]
            return super().evaluation_loop(*args, **kwargs)

    given = {"num_train_epochs": 2, "learning_rate": 0.02, "save_strategy": "no", "report_to": [], "seed": 7}
    common = {"per_device_train_batch_size": 4, "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    kept = [{"x": x, "labels": y, "index": i} for i, (x, y) in enumerate(zip(*data(rows).tensors, strict=True))]
    with quiet():
        place = folder or shared_folder() / str(next(_folders))
        arguments = TrainingArguments(output_dir=str(place), **{**given, **common, **settings})
        kwargs: dict[str, Any] = {"train_dataset": kept, "eval_dataset": kept[:16], "callbacks": list(callbacks)}
        trainer: Any = (
            Trainer(model, arguments, **kwargs)
            if method is None
            else Mine(model, arguments, method=method, share=share, **kwargs)
        )
        trainer.train(resume_from_checkpoint=resume)
    return trainer


@scenario(SIZE)
def beside_ddp(rank: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for settings in ({}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}, {"bf16": True}):
        theirs, ours = Small(rank), Small(rank)
        trained(theirs, None, **settings)
        trained(ours, ob.allreduce(), **settings)
        found.append((weights(theirs), weights(ours)))
    return found


def test_allreduce_ends_with_the_bits_of_the_trainers_own_ddp(told: Told) -> None:
    for found in told(beside_ddp):
        for theirs, ours in found:
            assert torch.equal(theirs, ours), "plain, with accumulation and clipping, with mixed precision"


@scenario(SIZE)
def saved_and_resumed(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    folder = shared_folder() / "resumed"
    whole, resumed = Small(rank), Small(rank)
    trained(whole, ob.allreduce(), folder=folder, save_strategy="epoch")
    dist.barrier()
    trained(resumed, ob.allreduce(), resume=str(folder / "checkpoint-8"))
    again = Small(rank)
    trained(again, ob.allreduce(), resume=str(folder / "checkpoint-8"))
    return weights(whole), weights(resumed), weights(again)


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_stopped(told: Told) -> None:
    for whole, resumed, again in told(saved_and_resumed):
        assert torch.equal(whole, resumed)
        assert torch.equal(resumed, again)


@scenario(SIZE)
def evaluated_and_saved(rank: int) -> dict[str, tuple[list[Tensor], Tensor, Tensor, Any]]:
    """For each method: what was evaluated, what was saved last, and what the worker ends with."""
    found = {}
    for method in (*METHODS, APART):
        folder, model = shared_folder() / f"kept {method}", Small(rank)
        trainer = trained(model, method, folder=folder, save_strategy="epoch", eval_strategy="epoch")
        dist.barrier()
        from safetensors.torch import load_file

        state = load_file(folder / "checkpoint-16" / "model.safetensors")
        saved = torch.cat([state[name].reshape(-1) for name, _ in model.named_parameters()])
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        found[str(method)] = trainer.evaluated, saved, weights(model), losses
    return found


def test_what_is_evaluated_and_saved_is_the_average_of_the_workers(told: Told) -> None:
    first, second = told(evaluated_and_saved)
    for method, (evaluated, saved, end, losses) in first.items():
        assert len(evaluated) == 2
        assert losses[1] < losses[0]
        assert all(torch.equal(a, b) for a, b in zip(evaluated, second[method][0], strict=True)), method
        assert torch.equal(saved, evaluated[-1]), method
        assert torch.equal(end, second[method][2]), method
    evaluated, _, end, _ = first[str(APART)]
    assert torch.equal(evaluated[-1], end)
    assert not torch.equal(evaluated[0], end)


@scenario(SIZE)
def saved_in_the_middle(rank: int) -> tuple[Tensor, Tensor]:
    """Where replicas differ: what this worker held before, and what was saved."""
    from safetensors.torch import load_file
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, folder, held = Small(rank), shared_folder() / "middle", []

    class Looks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                held.append(weights(model))

    class Mine(OffbeatTrainerMixin, Trainer):  # type: ignore[misc]
        pass

    with quiet():
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=4, save_steps=3, use_cpu=True, report_to=[], disable_tqdm=True
        )
        rows = [{"x": x, "labels": y} for x, y in zip(*data().tensors, strict=True)]
        Mine(model, arguments, train_dataset=rows, method=APART, callbacks=[Looks()]).train()
    dist.barrier()
    state = load_file(folder / "checkpoint-3" / "model.safetensors")
    return held[0], torch.cat([state[name].reshape(-1) for name, _ in model.named_parameters()])


def test_a_checkpoint_in_the_middle_is_the_mean_of_replicas_that_differ(told: Told) -> None:
    (own, saved), (theirs, _) = told(saved_in_the_middle)
    assert not torch.equal(own, theirs)
    assert torch.allclose(saved, (own + theirs) / 2, atol=1e-6)


@scenario(SIZE)
def tied(rank: int) -> tuple[Tensor, Tensor]:
    """A model of the library itself, with tied weights and a way of its own to save: held before, and saved."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    folder, held = shared_folder() / "tied", list[Tensor]()

    class Looks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                held.append(weights(model))

    class Mine(OffbeatTrainerMixin, Trainer):  # type: ignore[misc]
        pass

    with quiet():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
        rows = [{"input_ids": text, "labels": text} for text in torch.randint(0, 32, (64, 8))]
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            save_steps=3,
            average_tokens_across_devices=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        Mine(model, arguments, train_dataset=rows, method=APART, callbacks=[Looks()]).train()
        dist.barrier()
        return held[0], weights(GPT2LMHeadModel.from_pretrained(folder / "checkpoint-3"))


def test_a_checkpoint_of_a_model_with_tied_weights_is_whole(told: Told) -> None:
    (own, saved), (theirs, _) = told(tied)
    assert not torch.equal(own, theirs)
    assert torch.allclose(saved, (own + theirs) / 2, atol=1e-6)


@scenario(SIZE)
def the_best_at_the_end(rank: int) -> tuple[Tensor, list[Tensor], Any]:
    """The largest loss counts as the best here, so that it is the first; two steps are taken after the last one."""
    from transformers import EarlyStoppingCallback, TrainerCallback

    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 8

    model, steps = Small(rank), {"eval_steps": 3, "save_steps": 3, "max_steps": 20}
    when: dict[str, Any] = {"save_strategy": "steps", "eval_strategy": "steps", **steps}
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trained(model, ob.eager(late=1), None, None, (EarlyStoppingCallback(5), Stops()), False, **when, **best)
    return weights(model), trainer.evaluated, trainer.state.global_step


def test_the_best_model_is_loaded_after_all_that_was_under_way(told: Told) -> None:
    (end, evaluated, steps), (there, _, _) = told(the_best_at_the_end)
    assert (steps, len(evaluated)) == (8, 2)
    assert torch.equal(end, evaluated[0])
    assert torch.equal(end, there)


@scenario(SIZE)
def beside_a_slow_worker(rank: int) -> tuple[int, ob.Summary, list[dict[str, float]]]:
    model = Small(rank, slow="fixed shares")
    settings: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}
    trainer = trained(model, ob.eager(late=1), max_steps=LATE_STEPS, share=False, **settings)
    return model.steps, trainer.attached.summary(), trainer.state.log_history


def test_the_fast_worker_does_not_wait_for_the_slow_one_though_every_step_is_logged(told: Told) -> None:
    (steps, summary, logged), (its_steps, _, _) = told(beside_a_slow_worker)
    assert (steps, its_steps) == (LATE_STEPS, LATE_STEPS)
    assert len([entry for entry in logged if "loss" in entry]) == LATE_STEPS
    assert not [one for one in summary.foreign if one.steps > 2], "no collective of the Trainer's in every step"


@scenario(SIZE)
def unequal(rank: int) -> list[dict[str, Any]]:
    """Rank 1 stands until rank 0 is far ahead: evaluated and saved by epochs, and by steps that end in an epoch."""
    by_epochs: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "gradient_accumulation_steps": 1}
    by_steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 5}
    ways = (by_epochs, {**by_steps, "max_steps": 14}, {**by_epochs, "gradient_accumulation_steps": 3})
    found = []
    for number, settings in enumerate(ways):
        folder, model = shared_folder() / f"unequal {number}", Small(rank, slow=f"unequal {number}")
        logs: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 2}
        trainer = trained(model, ob.self_clocked(), folder=folder, rows=62, **settings, **logs)
        dist.barrier()
        found.append(
            {
                "used": model.used,
                "said": trainer.attached.summary().sentences,
                "evaluated": trainer.evaluated,
                "at": [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry],
                "saved": sorted(int(one.name.partition("-")[2]) for one in folder.glob("checkpoint-*")),
                "steps": trainer.state.global_step,
                "rate": trainer.lr_scheduler.get_last_lr()[0],
                "end": weights(model),
                "own": model.losses,
                "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
                "train_loss": trainer.state.log_history[-1]["train_loss"],
            }
        )
    return found


def test_every_sample_is_used_once_an_epoch_by_whoever_is_free(told: Told) -> None:
    for way in (0, 2):
        first, second = (found[way] for found in told(unequal))
        assert sorted(first["used"] + second["used"]) == sorted(2 * [*range(62)])
        assert ONCE in first["said"]


def test_the_job_ends_at_its_last_step_and_the_schedule_with_it(told: Told) -> None:
    for by_epochs, by_steps, _ in told(unequal):
        assert (by_epochs["steps"], by_steps["steps"]) == (16, 14)
        assert by_epochs["rate"] == by_steps["rate"] == 0.0
    assert sum(len(found[1]["used"]) for found in told(unequal)) == 62 + 12 * 4


def test_all_evaluate_and_save_at_the_same_steps_of_the_job(told: Told) -> None:
    first, second = told(unequal)
    for here, there in zip(first, second, strict=True):
        assert here["at"] == there["at"]
        assert all(torch.equal(a, b) for a, b in zip(here["evaluated"], there["evaluated"], strict=True))
        assert torch.equal(here["end"], there["end"])
    assert [found["at"] for found in first] == [[8, 16], [6, 12, 14], [3, 6]]
    assert [found["saved"] for found in first] == [[8, 16], [5, 10, 14], [3, 6]]


def test_a_loss_that_is_logged_is_the_mean_of_the_steps_that_a_worker_took(told: Told) -> None:
    for found in told(unequal):
        for run in found:
            assert all(0.999 * min(run["own"]) <= loss <= 1.001 * max(run["own"]) for loss in run["losses"])
        for run in found[:2]:  # whose steps have one batch each
            assert run["train_loss"] == pytest.approx(sum(run["own"]) / len(run["own"]), rel=1e-3)


@scenario(SIZE)
def resumed_with_shares(rank: int) -> list[int]:
    """What a run uses that goes on from the middle of an epoch, in which one worker was ahead."""
    folder = shared_folder() / "resumed share"
    first, second = Small(rank, slow="resumed share", ahead=4), Small(rank)
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 6, "max_steps": 6}
    trained(first, ob.self_clocked(), folder=folder, **settings)
    dist.barrier()
    trained(second, ob.self_clocked(), resume=str(folder / "checkpoint-6"), max_steps=8)
    return first.used + second.used


def test_a_resumed_run_uses_what_was_left_of_the_epoch(told: Told) -> None:
    first, second = told(resumed_with_shares)
    assert sorted(first + second) == [*range(64)]


@scenario(SIZE)
def twice(rank: int) -> tuple[Tensor, Tensor]:
    model = Small(rank)
    trainer = trained(model, ob.local_sgd(period=2))
    once = weights(model)
    with quiet():
        trainer.train()
    return once, weights(model)


def test_a_trainer_can_train_again(told: Told) -> None:
    (once, again), (_, there) = told(twice)
    assert not torch.equal(once, again)
    assert torch.equal(again, there)


class Plain:
    """Where the mix-in's own arguments have been taken, the rest comes here."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class Mixed(OffbeatTrainerMixin, Plain):
    pass


def test_a_method_is_named_by_itself_in_words_or_not_at_all() -> None:
    with quiet():
        assert str(Mixed().method) == str(ob.self_clocked())
        assert str(Mixed(method="local_sgd:period=2").method) == str(ob.local_sgd(2))
        assert str(Mixed(method=ob.local_sgd(3)).method) == str(ob.local_sgd(3))
        with pytest.raises(ValueError, match=r"no method is called 'eagre'; did you mean 'eager'\?"):
            Mixed(method="eagre")


def fails(rank: int) -> None:
    outlived(rank, lambda: trained(Small(rank, fails_at=3), ob.local_sgd(period=2)))


def test_one_failing_worker_ends_the_job_with_its_error() -> None:
    (outcomes,) = forge.run([Job(fails, SIZE)])
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "PeerFailed: rank 1 failed: ValueError: no such file" in outcomes[0].stderr
    assert "ValueError: no such file" in outcomes[1].stderr
    assert "in forward" in outcomes[1].stderr


def test_the_script_of_the_page_runs() -> None:
    assert all("Vectors went through shared memory." in told for told in told_by_script("transformers"))
