"""Hugging Face's Trainer: ``class Mine(OffbeatTrainerMixin, Trainer)``, then ``Mine(…, method=…)``.

The model is not wrapped in DDP, the Trainer's optimiser is attached, and whatever is evaluated or saved is the average
of the workers. At each log the Trainer gathers the loss and the number of operations of all workers: a barrier. Here
each worker logs the loss of its own batches instead, unless ``log_own_loss=False``.

The work is shared: ``global_step`` is the step of the job, the same for all, and not the number of steps that this
worker has taken. Evaluation and checkpoints are meetings of all workers, and their own steps are no clock for them. So
each rank has the same list of *moments*, in steps of the job, and goes through it in order: one at the end of a step by
which the job has reached it, and what is left when there is no work left.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import torch

from offbeat.basics.warn import warn
from offbeat.integrations.accelerate import placed
from offbeat.integrations.needs import needed
from offbeat.integrations.shares import TrainersShare, shared, work_of
from offbeat.live.attached.attach import attach
from offbeat.live.attached.optimizer import Attached
from offbeat.live.work.follow import follow
from offbeat.method.strategy import Method
from offbeat.strategies import as_method

AT_LEAST = "4.57"
PLACE = "offbeat_share.pt"  # in a checkpoint: which batches were used


class OffbeatTrainerMixin:
    """Put it before ``Trainer``, or a class made from it, among the bases.

    ``method`` decides what each step exchanges; it, ``max_norm``, ``patience_s`` and ``log`` are those of
    ``ob.attach``; the seed, the number of steps and accumulation are the training arguments'. ``attached`` is the
    attached optimiser, from the start of ``train()`` on, and after it for its ``summary()``. ``share=False``: fixed
    shares of the data, as the Trainer's own.
    """

    attached: Attached | None = None
    _work: TrainersShare | None = None  # that all workers share
    _moment = 0  # the last step of the job at which all have met
    _own_steps = _own_at_log = _own_in_epoch = 0
    _given: dict[str, Any]  # of this epoch
    _epochs_length: _Length

    def __init__(
        self,
        *args: Any,
        method: Method | str | None = None,
        max_norm: float | None = None,
        patience_s: float = 1800.0,
        log: Any = None,
        log_own_loss: bool = True,
        share: bool = True,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> None:
        needed("transformers", AT_LEAST, "transformers")
        self.method, self._log_own_loss, self._share = as_method(method), log_own_loss, share
        self._settings: dict[str, Any] = {"max_norm": max_norm, "patience_s": patience_s, "log": log}
        # Before the user's: what their on_train_end does, it does to the average.
        super().__init__(*args, **kwargs, callbacks=[_following(self), *(callbacks or [])])  # type: ignore[call-arg]

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

    def _gathers_tokens(self) -> bool:
        me: Any = self
        counts = me.model_accepts_loss_kwargs or me.compute_loss_func is not None
        return bool(getattr(me.args, "average_tokens_across_devices", False) and counts and me.args.world_size > 1)

    def _warn_of_tokens(self) -> None:
        if self._gathers_tokens() and self.method.name != "allreduce":
            warn(
                "average_tokens_across_devices=True gathers the number of tokens in every step, where fast workers "
                f"wait for slow ones; with {self.method} use TrainingArguments(average_tokens_across_devices=False)"
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

    # Shared work.

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        me: Any = self
        whole = super()._get_dataloader  # type: ignore[misc]
        if not kwargs.get("is_training") or self._fixed_because():
            return whole(*args, **kwargs)
        prepare, me.accelerator.prepare = me.accelerator.prepare, lambda loader: loader
        try:
            loader = whole(*args, **kwargs)
        finally:
            me.accelerator.prepare = prepare
        given = me.args.seed if me.args.data_seed is None else me.args.data_seed
        dealt = shared(loader, self.method, given)
        return prepare(loader) if dealt is None else placed(dealt, me.accelerator)

    def _fixed_because(self) -> str:
        """Why workers need equally many batches, in words; empty if they do not."""
        me: Any = self
        if not self._share:
            return "share=False"
        if not hasattr(super(), "_run_epoch"):
            return "this version of transformers has no epochs of its own"
        if not self._log_own_loss:
            return "log_own_loss=False"
        if self._gathers_tokens():
            return "average_tokens_across_devices=True"
        if str(getattr(me.args, "include_num_input_tokens_seen", "no")) not in ("no", "False"):
            return "include_num_input_tokens_seen"
        config = me.accelerator
        return "split_batches" if config.split_batches else "dispatch_batches" if config.dispatch_batches else ""

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any, **kwargs: Any) -> Any:
        values = super().set_initial_training_values(args, dataloader, *more, **kwargs)  # type: ignore[misc]
        self._work, self._moment = work_of(dataloader), 0
        self._own_steps = self._own_at_log = 0
        if self._work is not None:
            self._work.plan(values[1], values[-1], args.gradient_accumulation_steps)
        return values

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        made = super().create_scheduler(*args, **kwargs)  # type: ignore[misc]
        if self._work is not None and isinstance(made, torch.optim.lr_scheduler.LRScheduler):
            follow(made, self._work)
        return made

    def _run_epoch(self, **given: Any) -> Any:
        me: Any = self
        run, work = super()._run_epoch, self._work  # type: ignore[misc]
        if work is None:
            return run(**given)
        if given["resume_from_checkpoint"] is not None and given["epoch"] == given["epochs_trained"]:
            self._moment = me.state.global_step
            self._take_up(given)
        self._given, self._own_in_epoch, self._epochs_length = given, 0, _Length(work.batches)
        given["steps_in_epoch"] = self._epochs_length
        given["num_update_steps_per_epoch"] = work.batches  # if this worker took them all
        return run(**given)

    def _take_up(self, given: dict[str, Any]) -> None:
        """The rest of an epoch in which a checkpoint was made."""
        file = Path(given["resume_from_checkpoint"], PLACE)
        if given["steps_trained_in_current_epoch"] and file.exists():
            assert self._work is not None
            self._work.load_state_dict(torch.load(file, weights_only=True))
        given["steps_trained_in_current_epoch"] = 0

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        me: Any = self
        if self._work is not None:
            num_batches = me.args.gradient_accumulation_steps
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)  # type: ignore[misc]
        if self._work is not None:
            self._own_in_epoch += len(samples)
            if len(samples) < num_batches:  # these are the last, and their step is taken though they are few
                self._epochs_length.reached = self._own_in_epoch
                me.control.should_epoch_stop = me.control.should_epoch_stop or not samples
        return samples, items

    def _stepped(self, state: Any) -> None:
        self._own_steps += 1
        if self._work is not None:
            state.global_step = int(self._work.steps) - 1  # the Trainer adds one

    def _look_for_moments(self, state: Any, control: Any) -> None:
        """What is due at the end of a step. The Trainer has decided by whether a multiple was hit; it may be jumped."""
        me: Any = self
        if self._work is None:
            return
        state.epoch = state.global_step / self._work.per_epoch
        every = int(state.logging_steps) if me.args.logging_strategy == "steps" else 0
        is_first = me.args.logging_first_step and not self._own_at_log
        is_due = bool(every) and state.global_step // every > me._globalstep_last_logged // every
        control.should_log = is_first or is_due
        control.should_evaluate = control.should_save = False
        moment = self._next_moment(state)
        if moment is not None and moment <= state.global_step:
            self._come_to(moment, state, control)

    def _next_moment(self, state: Any) -> int | None:
        me: Any = self
        evaluates, saves = me.args.eval_strategy == "steps", me.args.save_strategy == "steps" and state.save_steps > 0
        found = [state.max_steps] if evaluates or saves else []
        if evaluates:
            first = max(self._moment, int(me.args.eval_delay) - 1)
            found.append((first // int(state.eval_steps) + 1) * int(state.eval_steps))
        if saves:
            found.append((self._moment // int(state.save_steps) + 1) * int(state.save_steps))
        moment = min(found, default=None)
        return None if moment is None or moment <= self._moment or moment > state.max_steps else moment

    def _come_to(self, moment: int, state: Any, control: Any) -> None:
        """All workers come here for the same moments, one after the other."""
        me: Any = self
        self._moment = state.global_step = moment
        is_last = moment == state.max_steps
        if me.args.eval_strategy == "steps" and me.args.eval_delay <= moment:
            control.should_evaluate = is_last or moment % state.eval_steps == 0
        if me.args.save_strategy == "steps" and state.save_steps > 0:
            control.should_save = is_last or moment % state.save_steps == 0

    def _end_epoch(self, state: Any, control: Any) -> None:
        """No work is left in this epoch: what the others still compute counts as done."""
        me: Any = self
        work = self._work
        if work is None or work.now is None:
            return
        if not self._own_in_epoch:  # the Trainer takes it for the end of all data
            control.should_training_stop = False
        if control.should_training_stop and state.global_step < state.max_steps:
            return  # by a callback, on all ranks
        end = int(work.end_epoch())
        of_the_epoch = control.should_log, control.should_evaluate, control.should_save
        given = self._given
        while (moment := self._next_moment(state)) is not None and moment <= end:
            control.should_log = control.should_evaluate = control.should_save = False
            self._come_to(moment, state, control)
            me._maybe_log_save_evaluate(
                me._tr_loss,
                None,
                given["model"],
                given["trial"],
                given["epoch"],
                given["ignore_keys_for_eval"],
                given["start_time"],
            )
        control.should_log, control.should_evaluate, control.should_save = of_the_epoch
        state.global_step, state.epoch = end, end / work.per_epoch
        if isinstance(me.lr_scheduler, torch.optim.lr_scheduler.LRScheduler):
            me.lr_scheduler.step()  # to where the job is

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        me: Any = self
        if self._work is not None and self._own_steps:  # the mean loss is that of this worker's own steps
            scale = (me.state.global_step - me._initial_global_step) / self._own_steps
            me._total_loss_scalar *= scale
            me._tr_loss *= scale
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        me: Any = self
        if self._work is not None and me.args.should_save:
            torch.save(self._work.state_dict(), Path(output_dir, PLACE))

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
            logs = {"loss": own / max(self._own_steps - self._own_at_log, 1)}
            self._own_at_log = self._own_steps
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


class _Length(int):
    """How many batches this worker has in an epoch, which is known when it has the last: until then, no number."""

    reached = 0

    def __eq__(self, other: object) -> bool:
        return bool(other == self.reached)

    __hash__ = int.__hash__


def _following(trainer: OffbeatTrainerMixin) -> Any:
    from transformers import TrainerCallback

    class Following(TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer._stepped(state)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer._look_for_moments(state, control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer._end_epoch(state, control)

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            trainer._finish()

    return Following()
