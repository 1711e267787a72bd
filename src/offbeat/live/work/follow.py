"""``follow``: a learning-rate schedule that goes by the work of all workers, not by this worker's own steps."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.live.work import share as work
from offbeat.live.work.share import Share

S = TypeVar("S", bound=LRScheduler)

_followed: weakref.WeakKeyDictionary[LRScheduler, Share | None] = weakref.WeakKeyDictionary()


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
    if share is not None and not isinstance(share, Share):
        raise TypeError(f"follow takes what ob.share returned, not a {type(share).__name__}")
    if not isinstance(scheduler, _Following):
        kind = type(scheduler)
        # A class of its own: a function put into the object would be a part of its state_dict().
        scheduler.__class__ = type(kind.__name__, (_Following, kind), {"__module__": kind.__module__})
    _followed[scheduler] = share
    return scheduler


class _Following(LRScheduler):
    def step(self, *args: Any, **kwargs: Any) -> None:
        plain = super().step
        share = _followed.get(self)
        goal = share.steps if share is not None else work.steps_of_the_job()
        if goal is None:  # nothing is shared: every worker takes its own steps
            plain(*args, **kwargs)
            return
        for _ in range(int(goal) - _steps(self)):
            plain()


def _steps(scheduler: Any) -> int:
    """How often it has been stepped."""
    counted = getattr(scheduler, "last_epoch", None)
    return _steps(scheduler._schedulers[0]) if counted is None else int(counted)
