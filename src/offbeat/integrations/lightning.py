"""Lightning: ``Trainer(strategy=OffbeatStrategy())``, or with a method, ``OffbeatStrategy("wagma:tau=5")``.

Lightning's own DDP strategy without its wrapper: ranks, samplers, launchers, Slurm and precision stay Lightning's, and
the optimiser that ``configure_optimizers`` returns is attached. Whatever is evaluated or saved is the average of the
workers. All of this is public to strategies, but for two things. Since 2.5.2 the training loop broadcasts in every step
whether rank 0 has received SIGTERM, in which a fast worker waits for rank 0. That is left out here. A worker that
receives SIGTERM still ends, at its next step, and the others end with it, since they have lost a peer. And the training
loop ends an epoch after as many batches as the loader is long. Where the work is shared, it ends when there is none
left: the loop fetches one batch ahead, as it does where a loader has no length.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.integrations.needs import trainer as imported
from offbeat.integrations.shares import TrainersShare, shared
from offbeat.live.attached.attach import attach
from offbeat.live.attached.optimizer import Attached
from offbeat.live.work.follow import follow
from offbeat.method.strategy import Method
from offbeat.strategies import as_method

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
AT_LEAST = "2.4"
_made: dict[str, type] = {}


class OffbeatStrategy:
    """Lightning's DDP strategy, in which ``method`` decides what each step exchanges.

    It is what ``ob.attach`` takes: a method, one in words, or none for the default.
    ``share=False``: fixed shares of the training data, as Lightning's own; otherwise workers share the work.
    ``max_norm``, ``seed``, ``patience_s`` and ``log`` are those of ``ob.attach``; ``steps`` and ``accumulate`` are
    the trainer's. What else is given (``process_group_backend``, ``timeout``, …) goes to Lightning's ``DDPStrategy``.
    Lightning has two names, ``lightning`` and ``pytorch_lightning``, whose classes are strangers to each other: the one
    that is imported is taken, or ``package``.
    """

    _trainer: Any
    _work: TrainersShare | None  # that all workers share
    attached: Attached | None  # from the start of fit on; after it for its summary()

    def __new__(cls, method: Method | str | None = None, *, package: str | None = None, **_: Any) -> OffbeatStrategy:
        """An instance of a class that has Lightning's ``DDPStrategy`` as its base, too."""
        as_method(method)  # refuses what is none before Lightning is looked for
        name = package or _imported()
        if name not in PACKAGES:
            raise ValueError(f"package is {name!r}; use one of {', '.join(PACKAGES)}")
        if name not in _made:
            base = imported(f"{PACKAGES[name]}.strategies", name, AT_LEAST, "lightning").DDPStrategy
            _made[name] = type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__module__": cls.__module__})
        made: OffbeatStrategy = object.__new__(_made[name])
        return made

    def __init__(
        self,
        method: Method | str | None = None,
        *,
        package: str | None = None,
        max_norm: float | None = None,
        seed: int = 0,
        patience_s: float = 1800.0,
        log: Any = None,
        share: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.method, self.attached, self._trainer = as_method(method), None, None
        self._share, self._work = share, None
        self._settings: dict[str, Any] = {"max_norm": max_norm, "seed": seed, "patience_s": patience_s, "log": log}

    # A run.

    def setup(self, trainer: Any) -> None:
        self._trainer, self._work = trainer, None
        if self._share:
            self._share_training_data(trainer.fit_loop)
        super().setup(trainer)  # type: ignore[misc]
        loop = trainer.fit_loop.epoch_loop
        if self.attached is not None and hasattr(loop, "_broadcast_sigterm_tensor"):
            loop._broadcast_sigterm_tensor = lambda: None

    def configure_ddp(self) -> None:
        """Nothing is wrapped."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        me: Any = self
        if len(me.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {len(me.optimizers)} optimizers, and OffbeatStrategy attaches one; "
                "give all parameters to one optimizer, in groups, or write the loop yourself with ob.attach"
            )
        (inner,) = me.optimizers
        steps = trainer.max_steps if trainer.max_steps > 0 else None
        self.attached = attach(
            inner,
            me.lightning_module,
            self.method,
            accumulate=trainer.accumulate_grad_batches,
            steps=steps,
            **self._settings,
        )
        me.optimizers = [self.attached]

    # Shared work.

    def _share_training_data(self, loop: Any) -> None:
        """From now on the loop's data are those that all workers share, where they can be."""
        kind = type(loop)

        def setup_data() -> None:
            before = loop._combined_loader
            kind.setup_data(loop)
            if loop._combined_loader is not before and not self._fixed_because(loop):
                self._deal(loop)

        loop.setup_data = setup_data

    def _fixed_because(self, loop: Any) -> str:
        """Why workers need equally many batches, in words; empty if they do not."""
        trainer = self._trainer
        if not trainer._accelerator_connector.use_distributed_sampler:
            return "use_distributed_sampler=False"
        if trainer.limit_train_batches != 1.0 or trainer.overfit_batches or trainer.fast_dev_run:
            return "batches are limited"
        if trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None:
            return "validation in the middle of an epoch"
        if not trainer.lightning_module.automatic_optimization:
            return "manual optimization"
        if loop.restarting and loop.epoch_loop.batch_progress.current.ready:
            return "the checkpoint was made in the middle of an epoch"
        saves = [one for one in trainer.checkpoint_callbacks if _saves_in_an_epoch(one)]
        return "a checkpoint callback saves in the middle of an epoch" if saves else ""

    def _deal(self, loop: Any) -> None:
        loaders = loop._combined_loader.flattened
        dealt = shared(loaders[0], self.method, 0) if len(loaders) == 1 else None
        if dealt is None or type(loop._data_fetcher).__name__ != "_PrefetchDataFetcher":
            return
        work: Any = dealt.batch_sampler
        trainer = self._trainer
        each = -(-len(work) // trainer.accumulate_grad_batches)
        work.plan(each, trainer.max_steps if trainer.max_steps > 0 else None, trainer.accumulate_grad_batches)
        work.set_epoch(loop.epoch_progress.current.processed)
        self._work = work
        loop._combined_loader.flattened = [dealt]
        loop._combined_loader.limits = [float("inf")]
        fetcher = loop._data_fetcher
        fetcher.__class__ = _endless(type(fetcher), loop)
        fetcher.setup(loop._combined_loader)
        iter(fetcher)
        loop.max_batches = _Expected(len(work))
        trainer.val_check_batch = float("inf")  # when there is no batch left

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        done = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        if self._work is not None:
            loop = self._trainer.fit_loop.epoch_loop
            is_last = loop.batch_progress.is_last_batch
            step = self._work.end_epoch() if is_last else self._work.steps
            # What the trainer calls its global step is that of the job; it adds one.
            loop.automatic_optimization.optim_progress.optimizer.step.total.completed = int(step) - 1
        return done

    def on_train_start(self) -> None:
        super().on_train_start()  # type: ignore[misc]
        for config in self._trainer.lr_scheduler_configs:
            one = config.scheduler
            can_follow = isinstance(one, LRScheduler) and not isinstance(one, ReduceLROnPlateau)
            if self._work is not None and config.interval == "step" and can_follow:
                follow(one, self._work)

    def on_train_end(self) -> None:
        super().on_train_end()  # type: ignore[misc]
        if self.attached is not None:
            self.attached.finish()

    def on_exception(self, exception: BaseException) -> None:
        """The others hear why, and end."""
        if self.attached is not None:
            self.attached.__exit__(type(exception), exception, exception.__traceback__)
        super().on_exception(exception)  # type: ignore[misc]

    # What is evaluated or saved is the average.

    def on_validation_start(self) -> None:
        super().on_validation_start()  # type: ignore[misc]
        if not self._trainer.sanity_checking:  # before the first step replicas are equal
            self._average()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """For a checkpoint, which Lightning makes on all ranks."""
        self._average()
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return state

    def _average(self) -> None:
        # Where an exception is on its way, the others are not here to meet: the checkpoint is of this worker alone.
        if self.attached is not None and not self.attached.is_over and not self._trainer.interrupted:
            self.attached.average()


class _Expected(int):
    """How many batches a worker would have if all took equally many. No count is equal to it: that ends no epoch."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def _endless(kind: type, loop: Any) -> type:
    """Lightning's fetcher for loaders without a length: it looks one batch ahead, and so knows the last one."""

    class Endless(kind):  # type: ignore[misc]
        def __next__(self) -> Any:
            if not self.batches and not self.fetched:  # no batch in this epoch, but the others meet at its end
                epoch = loop.epoch_loop
                epoch.batch_progress.is_last_batch = True
                epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
                epoch.on_advance_end(self)
                raise StopIteration
            return super().__next__()

        def reset(self) -> None:
            super().reset()
            self.length, self.done = None, False

    return Endless


def _saves_in_an_epoch(callback: Any) -> bool:
    every = getattr(callback, "_every_n_train_steps", 0), getattr(callback, "_train_time_interval", None)
    return bool(every[0]) or every[1] is not None


def _imported() -> str:
    names = [name for name, module in PACKAGES.items() if module in sys.modules]
    if len(names) > 1:
        raise ValueError(
            "both lightning and pytorch_lightning are imported, whose classes are strangers to each other; say whose "
            "Trainer this is for: OffbeatStrategy(…, package='pytorch_lightning')"
        )
    return names[0] if names else next(iter(PACKAGES))
