"""``follow``: a learning-rate schedule that goes by the work of all workers, not by this worker's own steps."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.basics.warn import warn
from offbeat.live.work import share as work
from offbeat.live.work.share import SharedBatches

S = TypeVar("S", bound=LRScheduler)

LOOK = 16  # steps after which, and then after twice as many each time, it is looked whether a schedule fits the job
APART = 0.1

_followed: weakref.WeakKeyDictionary[LRScheduler, SharedBatches | None] = weakref.WeakKeyDictionary()


def follow(scheduler: S, share: Any = None) -> S:
    """Let ``scheduler.step()`` go to where the job is: the steps of all workers so far, over their number.

    With shared work a fast worker takes more steps than a schedule was made for, and a slow one fewer. The loop stays
    as it is, with ``scheduler.step()`` behind every ``optimizer.step()``; the schedule is made for ``epochs *
    len(loader)`` steps. ``share``: the sampler or loader whose work counts, where the script has several. One that is
    stepped once an epoch need not follow: epochs are the same for all.
    """
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"{type(scheduler).__name__} cannot follow the work: it is not stepped by a number of steps; step it "
            "yourself, where the metric is known"
        )
    share = getattr(share, "batch_sampler", share)
    share = getattr(share, "sampler", share)  # of shards
    if share is not None and not isinstance(share, SharedBatches):
        raise TypeError(
            f"follow takes what ob.share returned, not a {type(share).__name__}; give it a loader of ob.share"
        )
    if not isinstance(scheduler, _Following):
        kind = type(scheduler)
        # A class of its own: a function put into the object would be a part of its state_dict().
        scheduler.__class__ = type(kind.__name__, (_Following, kind), {"__module__": kind.__module__})
    _followed[scheduler] = share
    return scheduler


def keep_up(optimizer: Optimizer) -> None:
    """The worker took a step without data, which its loop does not know of: what follows goes with it."""
    for scheduler in _followers(optimizer):
        scheduler.step()


def _followers(optimizer: Optimizer) -> list[LRScheduler]:
    """Made on this inner optimiser, or on the attached one."""
    return [one for one in list(_followed) if getattr(one.optimizer, "inner", one.optimizer) is optimizer]


class OwnRates:
    """Notices a learning rate that goes by this worker's own steps, while those of the others are others."""

    def __init__(self, optimizer: Optimizer, run: str) -> None:
        self._optimizer, self._run = weakref.ref(optimizer), run
        self._rates: list[float] | None = None
        self._steps = self._changes = 0

    def stepped(self) -> None:
        """Warns, once, where the schedule of a worker with shared work runs ahead of the job, or behind it."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        rates, before = [float(group["lr"]) for group in optimizer.param_groups], self._rates
        self._rates, self._steps = rates, self._steps + 1
        self._changes += before is not None and rates != before
        if self._steps < LOOK or self._steps & (self._steps - 1) or self._changes < self._steps / 2:
            return
        share = work.used_by(self._run)
        if share is None or abs(self._steps - (of_the_job := share.steps)) < APART * self._steps:
            return
        if _followers(optimizer):
            return
        self._changes = -(10**9)
        warn(
            f"the learning rate goes by this worker's own steps, {self._steps} by now, and the job has taken "
            f"{of_the_job:.0f}: with shared work workers take unequally many; let the schedule go by the work of all: "
            "scheduler = ob.follow(scheduler)"
        )


class _Following(LRScheduler):
    def step(self, *args: Any, **kwargs: Any) -> None:
        plain = super().step
        share = _followed[self] = _followed.get(self) or work.used_by()
        if share is None:  # nothing is shared: every worker takes its own steps
            plain(*args, **kwargs)
            return
        for _ in range(int(share.steps) - _steps(self)):
            plain()


def _steps(scheduler: Any) -> int:
    """How often it has been stepped."""
    counted = getattr(scheduler, "last_epoch", None)
    return _steps(scheduler._schedulers[0]) if counted is None else int(counted)
