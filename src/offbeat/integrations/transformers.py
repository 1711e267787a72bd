"""Hugging Face's Trainer: ``class Mine(OffbeatTrainerMixin, Trainer)``, then ``Mine(…, method=…)``.

The model is not wrapped in DDP, the Trainer's optimiser is attached, and whatever is evaluated or saved is the average
of the workers. At each log the Trainer gathers the loss and the number of operations of all workers: a barrier. Here
each worker logs the loss of its own batches instead, unless ``log_own_loss=False``.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import torch

from offbeat.integrations.needs import needed
from offbeat.live.attached.attach import attach
from offbeat.live.attached.optimizer import Attached
from offbeat.method.strategy import Method
from offbeat.strategies import as_method

AT_LEAST = "4.57"


class OffbeatTrainerMixin:
    """Put it before ``Trainer``, or a class made from it, among the bases.

    ``method`` decides what each step exchanges; it, ``max_norm``, ``patience_s`` and ``log`` are those of
    ``ob.attach``; the seed, the number of steps and accumulation are the training arguments'. ``attached`` is the
    attached optimiser, from the start of ``train()`` on, and after it for its ``summary()``.
    """

    attached: Attached | None = None

    def __init__(
        self,
        *args: Any,
        method: Method | str | None = None,
        max_norm: float | None = None,
        patience_s: float = 1800.0,
        log: Any = None,
        log_own_loss: bool = True,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> None:
        needed("transformers", AT_LEAST, "transformers")
        self.method, self._log_own_loss = as_method(method), log_own_loss
        self._settings: dict[str, Any] = {"max_norm": max_norm, "patience_s": patience_s, "log": log}
        # Before the user's: what their on_train_end does, it does to the average.
        super().__init__(*args, **kwargs, callbacks=[_finishing(self), *(callbacks or [])])  # type: ignore[call-arg]

    # A run.

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        me: Any = self
        # Device, autocast and compilation, as for a model that is only evaluated: no DDP.
        me.accelerator.prepare_model = functools.partial(me.accelerator.prepare_model, evaluation_mode=True)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        me: Any = self
        if self.attached is not None and self.attached.is_over:  # train() again
            me.optimizer, self.attached = self.attached.inner, None
        inner = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self.attached is None:
            self._warn_of_tokens()
            self.attached = attach(
                inner,
                me.model,
                self.method,
                accumulate=me.args.gradient_accumulation_steps,
                steps=me.args.max_steps if me.args.max_steps > 0 else None,
                seed=me.args.seed,
                **self._settings,
            )
            me.optimizer = self.attached
        optimizer: torch.optim.Optimizer = me.optimizer
        return optimizer

    def _warn_of_tokens(self) -> None:
        me: Any = self
        counts = me.model_accepts_loss_kwargs or me.compute_loss_func is not None
        gathers = getattr(me.args, "average_tokens_across_devices", False) and counts and me.args.world_size > 1
        if gathers and self.method.name != "allreduce":
            warnings.warn(
                "average_tokens_across_devices=True gathers the number of tokens in every step, where fast workers "
                f"wait for slow ones; with {self.method} use TrainingArguments(average_tokens_across_devices=False)",
                stacklevel=4,
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:  # the others hear why, and end
            if self.attached is not None:
                self.attached.__exit__(type(error), error, error.__traceback__)
            raise

    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any:
        """What is still under way belongs to the weights of the last step, not to those that are loaded now."""
        self._finish()
        return super()._load_best_model(*args, **kwargs)  # type: ignore[misc]

    def _finish(self) -> None:
        if self.attached is not None:
            self.attached.finish()

    # What is evaluated or saved is the average.

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._average()
        return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self._average()
        return super().predict(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        """On all ranks, as the Trainer calls it for a checkpoint."""
        self._average()
        return super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _average(self) -> None:
        if self.attached is not None and not self.attached.is_over:
            self.attached.average()

    # Logs without meeting anybody.

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        me: Any = self
        whole = super()._maybe_log_save_evaluate  # type: ignore[misc]
        if self._log_own_loss and me.control.should_log and me.state.global_step > me._globalstep_last_logged:
            given = inspect.signature(whole).bind(*args, **kwargs).arguments
            own, rate = given["tr_loss"].item(), given.get("learning_rate")
            norm = given.get("grad_norm")
            logs = {"loss": own / (me.state.global_step - me._globalstep_last_logged)}
            if norm is not None:
                logs["grad_norm"] = float(norm)
            logs["learning_rate"] = me._get_learning_rate() if rate is None else rate
            given["tr_loss"].zero_()
            me._total_loss_scalar += own
            me._globalstep_last_logged = me.state.global_step
            me.store_flos()
            me.log(logs, given["start_time"])
            me.control.should_log = False
        return whole(*args, **kwargs)

    def store_flos(self) -> None:
        me: Any = self
        if not self._log_own_loss:
            super().store_flos()  # type: ignore[misc]
        else:
            me.state.total_flos += me.current_flos * me.args.world_size
            me.current_flos = 0


def _finishing(trainer: OffbeatTrainerMixin) -> Any:
    from transformers import TrainerCallback

    class Finishing(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            trainer._finish()

    return Finishing()
