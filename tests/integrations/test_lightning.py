"""Lightning with an Offbeat strategy: what its users expect of a trainer, and nobody waits for a slow worker."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import offbeat as ob
from offbeat.integrations.lightning import OffbeatStrategy
from tests.support import forge
from tests.support.fitting import (
    LATE_STEPS,
    ONCE,
    SIZE,
    data,
    late,
    outlived,
    own_folder,
    quiet,
    shared_folder,
    small,
    told_by_script,
    weights,
)
from tests.support.forge import Job, attempt
from tests.support.scenarios import Told, scenario

pytest.importorskip("lightning", reason="needs Lightning: pip install 'offbeat[lightning]'")
pytestmark = pytest.mark.live

METHODS = (ob.allreduce(), ob.eager(), ob.wagma(), ob.local_sgd(period=2), ob.ad_psgd())


def module(rank: int, slow: str = "", fails_at: int | None = None, package: str = "lightning") -> Any:
    L: Any = importlib.import_module(package)

    class Small(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = small()
            self.evaluated: list[Tensor] = []
            self.before_saving: list[Tensor] = []
            self.steps, self.used = 0, list[int]()

        def training_step(self, batch: Any, number: int) -> Tensor:
            if slow:
                late(rank, self.steps, slow)
            self.steps += 1
            self.used += batch[2].tolist()
            if rank == 1 and number == fails_at:
                raise ValueError("no such file")
            return F.mse_loss(self.net(batch[0]), batch[1])

        def on_train_epoch_end(self) -> None:
            self.before_saving.append(weights(self))

        def on_validation_epoch_start(self) -> None:
            self.evaluated.append(weights(self))

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    return Small()


def numbered(rows: int) -> TensorDataset:
    return TensorDataset(*data(rows).tensors, torch.arange(rows))


def fit(
    model: Any,
    strategy: Any,
    epochs: int = 2,
    ckpt_path: Any = None,
    validates: bool = False,
    package: str = "lightning",
    rows: int = 64,
    **settings: Any,
) -> Any:
    L: Any = importlib.import_module(package)
    plain = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    settings = {"enable_checkpointing": False, **plain, **settings}
    with quiet():
        L.seed_everything(7, verbose=False)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=SIZE,
            strategy=strategy,
            max_epochs=epochs,
            default_root_dir=own_folder(),
            **settings,
        )
        loader = DataLoader(numbered(rows), batch_size=4, shuffle=True)
        trainer.fit(model, loader, DataLoader(data(16), batch_size=4) if validates else None, ckpt_path=ckpt_path)
    return trainer


@scenario(SIZE)
def beside_ddp(rank: int) -> list[tuple[Tensor, Tensor]]:
    from lightning.pytorch.strategies import DDPStrategy

    found = []
    for settings in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}):
        theirs, ours = module(rank), module(rank)
        fit(theirs, DDPStrategy(), **settings)
        fit(ours, OffbeatStrategy(ob.allreduce()), **settings)
        found.append((weights(theirs), weights(ours)))
    return found


def test_allreduce_ends_with_the_bits_of_lightnings_own_ddp(told: Told) -> None:
    ranks = told(beside_ddp)
    for found in ranks:
        for theirs, ours in found:
            assert torch.equal(theirs, ours), "plain, with accumulation and clipping, with mixed precision"
    assert not torch.equal(ranks[0][0][1], ranks[0][1][1])


@scenario(SIZE)
def saved_and_resumed(rank: int) -> tuple[Tensor, Tensor]:
    path = shared_folder() / "half.ckpt"
    half, whole, resumed = module(rank), module(rank), module(rank)
    fit(whole, OffbeatStrategy(ob.allreduce()), 4)
    trainer = fit(half, OffbeatStrategy(ob.allreduce()), 2, enable_checkpointing=True)
    trainer.save_checkpoint(path)
    fit(resumed, OffbeatStrategy(ob.allreduce()), 4, ckpt_path=path)
    return weights(whole), weights(resumed)


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_stopped(told: Told) -> None:
    for whole, resumed in told(saved_and_resumed):
        assert torch.equal(whole, resumed)


@scenario(SIZE)
def checkpoints(rank: int) -> dict[str, tuple[list[Tensor], list[Tensor], Tensor, Tensor]]:
    """Of every epoch: what the workers held before, what was evaluated and what was saved; and what they end with."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    found = {}
    for method in (*METHODS, ob.local_sgd(period=1000)):
        folder, model = shared_folder() / str(method), module(rank)
        callbacks = [ModelCheckpoint(folder, "last", every_n_epochs=1), EarlyStopping("val_loss", patience=5)]
        fit(model, OffbeatStrategy(method), 3, callbacks=callbacks, enable_checkpointing=True, validates=True)
        dist.barrier()
        with quiet():
            (file,) = folder.glob("*.ckpt")
            state = torch.load(file, weights_only=False)["state_dict"]
        names = [name for name, _ in model.named_parameters()]
        saved = torch.cat([state[name].reshape(-1) for name in names])
        found[str(method)] = model.before_saving, model.evaluated, saved, weights(model)
    return found


def test_what_is_evaluated_is_the_average_of_the_workers(told: Told) -> None:
    first, second = told(checkpoints)
    for method in first:
        (_, evaluated, _, _), (_, evaluated_there, _, _) = first[method], second[method]
        assert len(evaluated) == 3
        assert all(torch.equal(a, b) for a, b in zip(evaluated, evaluated_there, strict=True)), method
    apart = str(ob.local_sgd(period=1000))
    assert not torch.equal(first[apart][1][0], first[apart][1][1])


def test_what_is_saved_is_the_average_of_the_workers(told: Told) -> None:
    _, evaluated, saved, end = told(checkpoints)[0][str(ob.local_sgd(period=1000))]
    assert torch.equal(saved, evaluated[-1])
    assert torch.equal(saved, end), "nothing was trained after it"


def test_all_workers_end_with_the_same_weights(told: Told) -> None:
    first, second = told(checkpoints)
    for method in first:
        assert torch.equal(first[method][3], second[method][3]), method


@scenario(SIZE)
def stopped_early(rank: int) -> list[tuple[int, Tensor]]:
    """After how many epochs, and with which weights, where the loss never grows and one worker is slow."""
    from lightning.pytorch.callbacks import EarlyStopping

    found = []
    for method in (ob.eager(late=1), ob.self_clocked()):
        model = module(rank, slow=f"stopped early, {method.name}")
        grows = EarlyStopping("val_loss", mode="max", patience=0)
        trainer = fit(model, OffbeatStrategy(method), 8, callbacks=[grows], validates=True)
        found.append((trainer.current_epoch, weights(model)))
    return found


def test_early_stopping_stops_all_workers_after_the_same_epoch(told: Told) -> None:
    for (epochs, one), (also, other) in zip(*told(stopped_early), strict=True):
        assert epochs == also < 8
        assert torch.equal(one, other)


@scenario(SIZE)
def replicas_apart(rank: int) -> tuple[Tensor, Tensor]:
    """Saved in the middle of an epoch, where replicas differ."""
    import lightning as L

    path, held = shared_folder() / "middle.ckpt", list[Tensor]()

    class Saves(L.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, number: int) -> None:
            if number == 3 and not held:
                held.append(weights(model))
                trainer.save_checkpoint(path)

    model = module(rank)
    fit(model, OffbeatStrategy(ob.local_sgd(period=1000)), 1, callbacks=[Saves()], enable_checkpointing=True)
    state = torch.load(path, weights_only=False)["state_dict"]
    return held[0], torch.cat([state[name].reshape(-1) for name, _ in model.named_parameters()])


def test_a_checkpoint_in_the_middle_of_an_epoch_is_the_mean_of_replicas_that_differ(told: Told) -> None:
    (own, saved), (theirs, _) = told(replicas_apart)
    assert not torch.equal(own, theirs)
    assert torch.allclose(saved, (own + theirs) / 2, atol=1e-6)


@scenario(SIZE)
def beside_a_slow_worker(rank: int) -> tuple[int, ob.Summary]:
    model = module(rank, slow="beside a slow worker")
    strategy = OffbeatStrategy(ob.eager(late=1), share=False)
    fit(model, strategy, 100, max_steps=LATE_STEPS)
    assert strategy.attached is not None
    return model.steps, strategy.attached.summary()


def test_the_fast_worker_does_not_wait_for_the_slow_one(told: Told) -> None:
    (steps, summary), (its_steps, _) = told(beside_a_slow_worker)
    assert (steps, its_steps) == (LATE_STEPS, LATE_STEPS)
    assert not [one for one in summary.foreign if one.steps > 2], "no collective of Lightning's in every step"


@scenario(SIZE)
def unequal(rank: int) -> list[dict[str, Any]]:
    """Rank 1 stands until rank 0 is far ahead: evaluated and saved by epochs, to the end of one, and to a step."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = []
    ways: list[dict[str, Any]] = [{}, {"max_steps": 14}, {"accumulate_grad_batches": 3}]
    for number, settings in enumerate(ways):
        name = f"unequal {number}"
        model, rates = module(rank, slow=name), list[float]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

        def scheduled(inner: Any = optimizer, of: Any = model) -> Any:
            steps = of.trainer.estimated_stepping_batches
            falls = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0 - step / steps)
            return [inner], [{"scheduler": falls, "interval": "step"}]

        model.configure_optimizers = scheduled
        callbacks = [ModelCheckpoint(shared_folder() / name, save_top_k=-1)]
        more: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": True, "validates": True, "rows": 62}
        trainer = fit(model, OffbeatStrategy(), 2, **more, **settings)
        dist.barrier()
        rates += trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
        saved = sorted(one.name for one in (shared_folder() / name).glob("*.ckpt"))
        found.append(
            {
                "used": model.used,
                "said": trainer.strategy.attached.summary().sentences,
                "evaluated": model.evaluated,
                "saved": saved,
                "steps": trainer.global_step,
                "rate": rates[0],
                "end": weights(model),
            }
        )
    return found


def test_every_sample_is_used_once_an_epoch_by_whoever_is_free(told: Told) -> None:
    for way in (0, 2):
        first, second = (found[way] for found in told(unequal))
        assert sorted(first["used"] + second["used"]) == sorted(2 * [*range(62)])
        assert ONCE in first["said"]


def test_the_job_ends_at_its_last_step_and_the_schedule_with_it(told: Told) -> None:
    for found in told(unequal):
        assert [one["steps"] for one in found] == [16, 14, 6]
        assert [one["rate"] for one in found] == [pytest.approx(0.0)] * 3
    assert sum(len(found[1]["used"]) for found in told(unequal)) == 62 + 12 * 4


def test_all_evaluate_and_save_at_the_ends_of_epochs(told: Told) -> None:
    first, second = told(unequal)
    for here, there in zip(first, second, strict=True):
        assert len(here["evaluated"]) == 2
        assert all(torch.equal(a, b) for a, b in zip(here["evaluated"], there["evaluated"], strict=True))
        assert torch.equal(here["end"], there["end"])
    assert first[0]["saved"] == ["epoch=0-step=8.ckpt", "epoch=1-step=16.ckpt"]


@scenario(SIZE)
def under_the_other_name(rank: int) -> tuple[str, str, Tensor]:
    import pytorch_lightning

    model, name = module(rank, package="pytorch_lightning"), "pytorch_lightning"
    ambiguous = attempt(lambda: OffbeatStrategy(ob.wagma()))  # this process has imported both by now
    strategy = OffbeatStrategy(ob.allreduce(), package=name)
    assert isinstance(strategy, pytorch_lightning.strategies.DDPStrategy)
    fit(model, strategy, package=name)
    unknown = attempt(lambda: OffbeatStrategy(ob.wagma(), package="pl"))
    return ambiguous, unknown, weights(model)


def test_both_names_of_lightning_are_served(told: Told) -> None:
    (ambiguous, unknown, ours), _ = told(under_the_other_name)
    assert "say whose Trainer this is for: OffbeatStrategy(…, package='pytorch_lightning')" in ambiguous
    assert unknown == "ValueError: package is 'pl'; use one of lightning, pytorch_lightning"
    assert torch.equal(ours, told(beside_ddp)[0][0][1])


@scenario(SIZE)
def named(rank: int) -> list[str]:
    strategy: Any = partial(OffbeatStrategy, package="lightning")
    with quiet():
        made = [strategy(), strategy("local_sgd:period=2"), strategy(method=ob.local_sgd(3))]
        return [*(str(one.method) for one in made), attempt(lambda: strategy(ob.wagma))]


def test_a_method_is_named_by_itself_in_words_or_not_at_all(told: Told) -> None:
    for *methods, said in told(named):
        assert methods == [str(ob.self_clocked()), str(ob.local_sgd(2)), str(ob.local_sgd(3))]
        assert "ob.wagma is the function that makes the method; call it: ob.wagma()" in said


def several_optimizers(rank: int) -> None:
    model = module(rank)
    parameters = list(model.parameters())
    model.automatic_optimization = False
    model.configure_optimizers = lambda: [torch.optim.SGD(p, lr=0.1) for p in (parameters[:2], parameters[2:])]
    fit(model, OffbeatStrategy(ob.wagma()))


def test_several_optimizers_are_refused_with_a_sentence() -> None:
    (outcomes,) = forge.run([Job(several_optimizers, SIZE)])
    assert "configure_optimizers returned 2 optimizers, and OffbeatStrategy attaches one" in outcomes[0].stderr


def fails(rank: int) -> None:
    outlived(rank, lambda: fit(module(rank, fails_at=2), OffbeatStrategy(ob.local_sgd(period=2))))


def test_one_failing_worker_ends_the_job_with_its_error() -> None:
    (outcomes,) = forge.run([Job(fails, SIZE)])
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "PeerFailed: rank 1 failed: ValueError: no such file" in outcomes[0].stderr
    assert "ValueError: no such file" in outcomes[1].stderr
    assert "training_step" in outcomes[1].stderr


def test_the_script_of_the_page_runs() -> None:
    assert all("Vectors went through shared memory." in told for told in told_by_script("lightning"))
