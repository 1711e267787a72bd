"""Accelerate with Offbeat's ``prepare``: what its users expect of it, and nobody waits for a slow worker."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import offbeat as ob
from offbeat.integrations.accelerate import attached, prepare
from tests.support import forge
from tests.support.fitting import (
    LATE_STEPS,
    ONCE,
    SIZE,
    data,
    late,
    quiet,
    shared_folder,
    small,
    told_by_script,
    weights,
)
from tests.support.forge import Job, attempt
from tests.support.scenarios import Told, scenario

pytest.importorskip("accelerate", reason="needs Accelerate: pip install 'offbeat[accelerate]'")
pytestmark = pytest.mark.live

METHODS = (ob.allreduce(), ob.eager(), ob.wagma(), ob.local_sgd(period=2), ob.ad_psgd())
APART = ob.local_sgd(period=1000)


class Loop:
    """A loop as Accelerate's users write it, with ``method`` or with its own DDP."""

    def __init__(
        self,
        rank: int,
        method: ob.Strategy | None,
        rows: int = 64,
        shuffle: bool = True,
        share: bool = True,
        **settings: Any,
    ) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
        from accelerate.utils import set_seed

        AcceleratorState._reset_state(reset_partial_state=True)  # several accelerators in one process
        GradientState._reset_state()
        set_seed(7)
        self.rank, self.steps, self.used = rank, 0, list[int]()
        self.accelerator: Any = Accelerator(cpu=True, **settings)
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        others = (
            DataLoader(TensorDataset(*data(rows).tensors, torch.arange(rows)), batch_size=4, shuffle=shuffle),
            torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9),
        )
        if method is None:
            prepared = self.accelerator.prepare(model, optimizer, *others)
        else:
            prepared = prepare(self.accelerator, model, optimizer, *others, method=method, share=share)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.plain = model

    def epoch(self, slow: str = "", fails_at: int | None = None, clip: float | None = None) -> None:
        for number, (x, y, index) in enumerate(self.loader):
            if slow:
                late(self.rank, number, slow)
            self.steps += 1
            self.used += index.tolist()
            if self.rank == 1 and number == fails_at:
                raise ValueError("no such file")
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(F.mse_loss(self.model(x), y))
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()


@scenario(SIZE)
def beside_ddp(rank: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for settings in ({}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}):
        with quiet():
            theirs = Loop(rank, None, **settings)
            theirs.epoch(clip=0.5)
            ours = Loop(rank, ob.allreduce(), **settings)
            with attached(ours.optimizer):
                ours.epoch(clip=0.5)
        found.append((weights(theirs.plain), weights(ours.plain)))
    return found


def test_allreduce_ends_with_the_bits_of_accelerates_own_ddp(told: Told) -> None:
    for found in told(beside_ddp):
        for theirs, ours in found:
            assert torch.equal(theirs, ours), "plain, with accumulation, with mixed precision"


@scenario(SIZE)
def saved_and_resumed(rank: int) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each method: before saving, after it, after loading elsewhere, and at the end of the resumed run."""
    found = {}
    for method in (*METHODS, APART):
        folder = shared_folder() / str(method)
        with quiet():
            first = Loop(rank, method)
            with attached(first.optimizer):
                first.epoch()
                before = weights(first.plain)
                first.accelerator.save_state(folder)
                after = weights(first.plain)
            dist.barrier()
            second = Loop(rank, method)
            with attached(second.optimizer):
                second.accelerator.load_state(folder)
                loaded = weights(second.plain)
                second.epoch()
        found[str(method)] = before, after, loaded, weights(second.plain)
    return found


def test_what_is_saved_and_loaded_is_the_average_of_the_workers(told: Told) -> None:
    first, second = told(saved_and_resumed)
    for method, (_, after, loaded, end) in first.items():
        assert torch.equal(after, loaded), method
        assert torch.equal(loaded, second[method][2]), method
        assert torch.equal(end, second[method][3]), method
    before, after, _, _ = first[str(APART)]
    theirs = second[str(APART)][0]
    assert not torch.equal(before, theirs)
    assert torch.allclose(after, (before + theirs) / 2, atol=1e-6)


@scenario(SIZE)
def model_saved(rank: int) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """What ``save_model`` has written in the middle of a run, and what the model was then."""
    from safetensors.torch import load_file

    folder = shared_folder() / "save_model"
    with quiet():
        loop = Loop(rank, APART)
        with attached(loop.optimizer):
            loop.epoch()
            attached(loop.optimizer).average()
            loop.accelerator.save_model(loop.model, folder)
            loop.accelerator.wait_for_everyone()
            held = {name: value.clone() for name, value in loop.plain.state_dict().items()}
    return list(held), load_file(folder / "model.safetensors"), held


def test_save_model_in_the_middle_of_a_run_writes_every_tensor(told: Told) -> None:
    for names, kept, held in told(model_saved):
        assert sorted(kept) == sorted(names)
        assert all(torch.equal(kept[name], held[name]) for name in names)


@scenario(SIZE)
def resumed(rank: int) -> list[list[Tensor]]:
    """A run that was never stopped, and one from a state of its middle: with Accelerate's DDP, and with ours."""
    found = []
    for name, method in (("theirs", None), ("ours", ob.allreduce())):
        with quiet():
            whole = Loop(rank, method, shuffle=False)
            with nullcontext() if method is None else attached(whole.optimizer):
                whole.epoch()
                whole.accelerator.save_state(shared_folder() / name)
                whole.epoch()
            dist.barrier()
            again = Loop(rank, method, shuffle=False)
            with nullcontext() if method is None else attached(again.optimizer):
                again.accelerator.load_state(shared_folder() / name)
                again.epoch()
        found.append([weights(whole.plain), weights(again.plain)])
    return found


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_stopped(told: Told) -> None:
    for (whole, again), (ours, ours_again) in told(resumed):
        assert torch.equal(whole, again)
        assert torch.equal(ours, ours_again)
        assert torch.equal(ours, whole)


@scenario(SIZE)
def beside_a_slow_worker(rank: int) -> tuple[int, ob.Summary]:
    with quiet():
        loop = Loop(rank, ob.eager(late=1), rows=4 * SIZE * LATE_STEPS, share=False)
        with attached(loop.optimizer):
            loop.epoch(slow="fixed shares")  # one: at the beginning of each, Accelerate lets all meet
    return loop.steps, attached(loop.optimizer).summary()


def test_the_fast_worker_does_not_wait_for_the_slow_one(told: Told) -> None:
    (steps, summary), (its_steps, _) = told(beside_a_slow_worker)
    assert (steps, its_steps) == (LATE_STEPS, LATE_STEPS)
    assert not [one for one in summary.foreign if one.steps > 2], "no collective of Accelerate's in every step"


@scenario(SIZE)
def unequal(rank: int) -> list[dict[str, Any]]:
    """Two epochs; in the first of them rank 1 stands until rank 0 is ahead. With and without accumulation."""
    found = []
    ways: list[dict[str, Any]] = [{}, {"gradient_accumulation_steps": 3}]
    for number, settings in enumerate(ways):
        with quiet():
            loop = Loop(rank, ob.self_clocked(), rows=62, **settings)
            with attached(loop.optimizer):
                loop.epoch(slow=f"unequal {number}")
                loop.accelerator.save_state(shared_folder() / f"unequal {number}")
                loop.epoch()
        said = attached(loop.optimizer).summary().sentences
        found.append({"used": loop.used, "said": said, "length": len(loop.loader), "end": weights(loop.plain)})
    return found


def test_every_sample_is_used_once_an_epoch_by_whoever_is_free(told: Told) -> None:
    for first, second in zip(*told(unequal), strict=True):
        assert sorted(first["used"] + second["used"]) == sorted(2 * [*range(62)])
        assert ONCE in first["said"]
        assert first["length"] == second["length"] == 8
        assert torch.equal(first["end"], second["end"])


@scenario(SIZE)
def in_the_middle(rank: int) -> list[int]:
    """What is used by a run that is saved in an epoch, in which rank 0 is ahead, and one that goes on from there."""
    with quiet():
        first = Loop(rank, ob.self_clocked())
        with attached(first.optimizer):
            for number, (x, y, index) in enumerate(first.loader):
                late(rank, number, "in the middle")
                first.accelerator.backward(F.mse_loss(first.model(x), y))
                first.optimizer.step()
                first.optimizer.zero_grad()
                first.used += index.tolist()
                if number == (7, 3)[rank]:
                    break
            first.accelerator.save_state(shared_folder() / "in the middle")
        dist.barrier()
        second = Loop(rank, ob.self_clocked())
        with attached(second.optimizer):
            second.accelerator.load_state(shared_folder() / "in the middle")
            second.epoch()
    return first.used + second.used


def test_a_resumed_run_uses_what_was_left_of_the_epoch(told: Told) -> None:
    first, second = told(in_the_middle)
    assert sorted(first + second) == [*range(64)]


@scenario(SIZE)
def named(rank: int) -> list[str]:
    """The methods of loops that name none, name one in words, and name one before the model, as was done before."""
    with quiet():
        accelerator, found = Loop(rank, None).accelerator, []
        ways: list[tuple[Any, Any]] = [((), {}), ((), {"method": "local_sgd:period=2"}), ((ob.local_sgd(3),), {})]
        for before, given in ways:
            model = small()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(data(), batch_size=4)
            _, optimizer, _ = prepare(accelerator, *before, model, optimizer, loader, **given)
            with attached(optimizer) as inside:
                found.append(str(inside.method))
    return found


def test_a_method_is_named_by_itself_in_words_or_not_at_all(told: Told) -> None:
    assert told(named) == SIZE * [[str(ob.self_clocked()), str(ob.local_sgd(2)), str(ob.local_sgd(3))]]


def fails(rank: int) -> None:
    with quiet():
        loop = Loop(rank, ob.local_sgd(period=2))
        with attached(loop.optimizer):
            loop.epoch(fails_at=2)


def test_one_failing_worker_ends_the_job_with_its_error() -> None:
    (outcomes,) = forge.run([Job(fails, SIZE)])
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "PeerFailed: rank 1 failed: ValueError: no such file" in outcomes[0].stderr
    assert "ValueError: no such file" in outcomes[1].stderr
    assert "in epoch" in outcomes[1].stderr


def test_arguments_in_the_wrong_order_and_optimizers_of_others_get_a_sentence() -> None:
    model = small()
    optimizer: Any = torch.optim.SGD(model.parameters())
    wrong = attempt(lambda: prepare(object(), model, optimizer, ob.allreduce()))
    assert "allreduce() came among what is to be prepared; say method=allreduce()" in wrong
    for before in ((), (ob.eager(),)):
        wrong = attempt(partial(prepare, object(), *before, optimizer, model))
        assert "but after the accelerator came (SGD, Sequential)" in wrong
    wrong = attempt(lambda: prepare(object(), model, optimizer, method="eagre"))
    assert "no method is called 'eagre'; did you mean 'eager'?" in wrong
    assert "SGD was not made by offbeat.integrations.accelerate.prepare" in attempt(lambda: attached(optimizer))


def test_the_script_of_the_page_runs() -> None:
    assert all("Vectors went through shared memory." in told for told in told_by_script("accelerate"))
