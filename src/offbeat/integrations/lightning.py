"""Lightning: ``Trainer(strategy=OffbeatStrategy())``, or with a method, ``OffbeatStrategy("wagma:tau=5")``.

Lightning's own DDP strategy without its wrapper: ranks, samplers, launchers, Slurm and precision stay Lightning's, and
the optimiser that ``configure_optimizers`` returns is attached. Whatever is evaluated or saved is the average of the
workers. All of this is public to strategies, but for one thing: since 2.5.2 the training loop broadcasts in every step
whether rank 0 has received SIGTERM, in which a fast worker waits for rank 0. That is left out here. A worker that
receives SIGTERM still ends, at its next step, and the others end with it, since they have lost a peer.
"""

from __future__ import annotations

import sys
from typing import Any

from offbeat.integrations.needs import trainer as imported
from offbeat.live.attached.attach import attach
from offbeat.live.attached.optimizer import Attached
from offbeat.method.strategy import Method
from offbeat.strategies import as_method

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
AT_LEAST = "2.4"
_made: dict[str, type] = {}


class OffbeatStrategy:
    """Lightning's DDP strategy, in which ``method`` decides what each step exchanges.

    It is what ``ob.attach`` takes: a method, one in words, or none for the default.
    ``max_norm``, ``seed``, ``patience_s`` and ``log`` are those of ``ob.attach``; ``steps`` and ``accumulate`` are
    the trainer's. What else is given (``process_group_backend``, ``timeout``, …) goes to Lightning's ``DDPStrategy``.
    Lightning has two names, ``lightning`` and ``pytorch_lightning``, whose classes are strangers to each other: the one
    that is imported is taken, or ``package``.
    """

    _trainer: Any
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
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.method, self.attached, self._trainer = as_method(method), None, None
        self._settings: dict[str, Any] = {"max_norm": max_norm, "seed": seed, "patience_s": patience_s, "log": log}

    # A run.

    def setup(self, trainer: Any) -> None:
        self._trainer = trainer
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


def _imported() -> str:
    names = [name for name, module in PACKAGES.items() if module in sys.modules]
    if len(names) > 1:
        raise ValueError(
            "both lightning and pytorch_lightning are imported, whose classes are strangers to each other; say whose "
            "Trainer this is for: OffbeatStrategy(…, package='pytorch_lightning')"
        )
    return names[0] if names else next(iter(PACKAGES))
